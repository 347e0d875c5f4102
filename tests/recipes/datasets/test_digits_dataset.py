"""The digits: what is in the splits, and that both readers give it."""

import keras
import numpy as np
import pytest

from recipes.datasets import digits

pytest.importorskip("sklearn", reason="scikit-learn, which carries the digits, is not installed")


def test_splits_are_four_fifths_and_a_fifth_of_every_class(data_dir):
    train_images, train_labels = digits.load("train", data_dir)
    test_images, test_labels = digits.load("test", data_dir)
    assert train_images.shape == (1442, 8, 8, 1) and test_images.shape == (355, 8, 8, 1)
    assert train_images.dtype == np.float32 and train_labels.dtype == np.int64
    assert (train_images.min(), train_images.max()) == (0, digits.LARGEST_PIXEL)
    test, train = np.bincount(test_labels, minlength=10), np.bincount(train_labels, minlength=10)
    np.testing.assert_array_equal(test, (test + train) // 5)


def test_every_digit_is_in_one_split_with_its_label(data_dir):
    from sklearn.datasets import load_digits

    source = load_digits()
    splits = [digits.load(split, data_dir) for split in ("train", "test")]
    images = np.concatenate([split[0] for split in splits]).reshape(-1, 64)
    labels = np.concatenate([split[1] for split in splits])

    def in_order(images, labels):
        rows = np.column_stack([images, labels])
        return rows[np.lexsort(rows.T)]

    np.testing.assert_array_equal(in_order(images, labels), in_order(source.data, source.target))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the tf.data reader needs TensorFlow")
@pytest.mark.parametrize("split", ["train", "test"])
def test_both_readers_give_the_same_examples(split, data_dir):
    tf_data, data_source = digits.read_tf_data(split, data_dir), digits.read_data_source(split, data_dir)
    for ours, theirs in zip(tf_data, data_source, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_unknown_split_is_named(data_dir):
    with pytest.raises(ValueError, match='"train" or "test", got \'validation\''):
        digits.load("validation", data_dir)
