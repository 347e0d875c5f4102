"""Handwritten digits: 1797 images of 8x8 pixels that scikit-learn carries, as a tensorflow-datasets builder.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
Nothing is downloaded. The first use writes two small files under the data folder; later ones read them.
"""

import contextlib
from typing import Any

import keras
import numpy as np

from recipes.common.require import require

tfds: Any = require("tensorflow_datasets", extra="data")

CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)
LARGEST_PIXEL = 16
TEST_EVERY = 5


class Digits(tfds.core.GeneratorBasedBuilder):
    """The digits, one builder config per file format, so that both formats can lie in one data folder."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name="tfrecord", description="read by tf.data"),
        tfds.core.BuilderConfig(name="array_record", description="read without TensorFlow"),
    ]

    def _info(self):
        # Only `Tensor` features can be read where TensorFlow is not installed; `Image` and `ClassLabel` cannot.
        features = {
            "image": tfds.features.Tensor(shape=IMAGE_SHAPE, dtype=np.uint8),
            "label": tfds.features.Tensor(shape=(), dtype=np.int64),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        digits = require("sklearn.datasets", extra="data").load_digits()
        test = is_test(digits.target)
        return {"train": self._generate_examples(digits, ~test), "test": self._generate_examples(digits, test)}

    def _generate_examples(self, digits, chosen):
        for index in np.flatnonzero(chosen):
            image = digits.images[index].astype(np.uint8).reshape(IMAGE_SHAPE)
            yield int(index), {"image": image, "label": digits.target[index]}


def is_test(labels: np.ndarray) -> np.ndarray:
    """Marks every fifth example of each class for the test split: stratified, and without a random number.

    Args:
        labels: integer classes, shape `(examples,)`.

    Returns:
        Booleans, shape `(examples,)`.
    """
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return test


def load(split: str, data_dir: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Loads a split, through tf.data when TensorFlow is the backend, without TensorFlow otherwise.

    Args:
        split: `"train"` (1442 examples) or `"test"` (355).
        data_dir: the folder of the prepared files; by default tensorflow-datasets' own.

    Returns:
        Images, float32, shape `(examples, 8, 8, 1)`, values 0 to 16; and labels, int64, shape `(examples,)`. Both
        readers give the same examples in the same order.

    Raises:
        ValueError: for another split.
    """
    if split not in ("train", "test"):
        raise ValueError(f'split is "train" or "test", got {split!r}')
    read = read_tf_data if keras.backend.backend() == "tensorflow" else read_data_source
    images, labels = read(split, data_dir)
    return images.astype(np.float32), labels


def read_tf_data(split: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Reads a split with tf.data: uint8 images and int64 labels."""
    examples = _prepared("tfrecord", data_dir).as_dataset(split=split, batch_size=-1)
    return examples["image"].numpy(), examples["label"].numpy()


def read_data_source(split: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Reads a split by random access, without TensorFlow: uint8 images and int64 labels."""
    examples = list(_prepared("array_record", data_dir).as_data_source(split=split))
    return np.stack([example["image"] for example in examples]), np.stack([example["label"] for example in examples])


def _prepared(file_format, data_dir):
    builder = Digits(config=file_format, file_format=file_format, data_dir=data_dir)
    if not builder.is_prepared():
        tfds.disable_progress_bar()
        # It announces a download, and there is none.
        with contextlib.redirect_stdout(None):
            builder.download_and_prepare()
    return builder
