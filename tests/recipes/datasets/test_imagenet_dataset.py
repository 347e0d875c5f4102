"""ImageNet's readers: order and crops are functions of seed and epoch, all images come once, both readers agree."""

import io

import keras
import numpy as np
import pytest
from mocked_data import jpeg, mocked, photograph

from recipes.datasets import imagenet
from recipes.datasets.prepared import prepared, tfds

needs_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the tf.data reader is the one of the TensorFlow backend"
)
READERS = ["random access", pytest.param("tf.data", marks=needs_tensorflow)]
EXAMPLES, BATCH, SIZE = 23, 4, 32


class Photographs(tfds.core.GeneratorBasedBuilder):
    """A set with ImageNet's features, in files; a label is the image's number."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=1000),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples() for split in ("train", "validation")}

    def _generate_examples(self):
        for index in range(EXAMPLES):
            example = photograph(index)
            yield index, example | {"image": io.BytesIO(example["image"]), "file_name": f"{index}"}


def reader(name, folder):
    """The builder of the photographs, prepared for a reader."""
    file_format = "tfrecord" if name == "tf.data" else "array_record"
    builder = Photographs(data_dir=str(folder / file_format), file_format=file_format)
    builder.download_and_prepare()
    return builder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("photographs")


def training(name, folder, monkeypatch, seed=0, batch_size=BATCH):
    monkeypatch.setattr(imagenet, "prepared", lambda *arguments: reader(name, folder))
    return imagenet.training_batches(batch_size, SIZE, seed, None, False)


def labels(batches, epoch):
    return [int(label) for step in range(batches.steps) for label in batches.batch(epoch, step)[1]]


@pytest.mark.parametrize("name", READERS)
def test_an_epoch_is_full_batches_of_distinct_images_in_an_order_of_its_own(name, folder, monkeypatch):
    batches = training(name, folder, monkeypatch)
    assert batches.examples == EXAMPLES and batches.steps == EXAMPLES // BATCH
    orders = [labels(batches, epoch) for epoch in range(2)]
    assert all(len(set(order)) == len(order) == EXAMPLES // BATCH * BATCH for order in orders)
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
    assert labels(training(name, folder, monkeypatch, seed=1), 0) != orders[0]
    images, _ = batches.batch(0, 0)
    assert images.shape == (BATCH, SIZE, SIZE, 3) and images.dtype == np.uint8


@pytest.mark.parametrize("name", READERS)
def test_all_images_occur_once(name, folder, monkeypatch):
    assert sorted(labels(training(name, folder, monkeypatch, batch_size=EXAMPLES), 5)) == list(range(EXAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_batch_is_the_same_from_any_place_whatever_was_read_before(name, folder, monkeypatch):
    whole = training(name, folder, monkeypatch)
    expected = [whole.batch(2, step) for step in range(whole.steps)]
    for step in (3, 1, 4):
        np.testing.assert_equal(training(name, folder, monkeypatch).batch(2, step), expected[step])


@needs_tensorflow
def test_both_readers_cut_the_same_middle(folder, monkeypatch):
    found = {}
    for name in ("random access", "tf.data"):
        monkeypatch.setattr(imagenet, "prepared", lambda *arguments, name=name: reader(name, folder))
        batches = imagenet.test_batches(10, SIZE, None, False)
        parts = [[np.asarray(part) for part in batch] for batch in batches]
        assert [len(part[1]) for part in parts] == [10, 10, 3]
        found[name] = {int(label): image.astype(int) for part in parts for image, label in zip(*part, strict=True)}
        assert len(found[name]) == EXAMPLES
    for label, image in found["tf.data"].items():
        assert np.abs(image - found["random access"][label]).max() <= 2


def test_the_middle_is_seven_eighths_of_the_shorter_side():
    image = np.zeros((64, 128, 3), np.uint8)
    image[4:60, 36:92] = 200
    found = imagenet.middle_crop(jpeg(image), 56)
    assert found.shape == (56, 56, 3) and found[2:-2, 2:-2].min() > 190
    wider = image.copy()
    wider[:2], wider[:, :34] = 255, 255
    np.testing.assert_allclose(imagenet.middle_crop(jpeg(wider), 56)[4:-4, 4:-4].astype(int), 200, atol=8)


def test_random_boxes_have_the_areas_and_the_aspect_ratios_of_the_paper():
    generator = np.random.default_rng(0)
    boxes = np.array([imagenet.random_box(400, 300, generator) for _ in range(4000)])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 400 and boxes[:, 3].max() <= 300
    share = across * down / (400 * 300)
    assert 0.075 < share.min() < 0.1 and 0.9 < share.max() <= 1
    ratio = across / down
    assert 0.74 < ratio.min() < 0.8 and 1.3 < ratio.max() < 1.35
    assert imagenet.random_box(1000, 2, generator) == (0, 0, 1000, 2)  # no part of it has such sides


def test_the_real_set_is_read_as_tensorflow_datasets_mocks_it():
    with mocked(9, images=True):
        assert prepared(imagenet.SOURCE, None, download=True).info.features["label"].num_classes == 1000
        batches = imagenet.training_batches(4, SIZE, 0, None, download=True)
        images, numbers = batches.batch(0, 1)
        assert images.shape == (4, SIZE, SIZE, 3) and numbers.shape == (4,)
        found = [np.asarray(numbers) for _, numbers in imagenet.test_batches(4, SIZE, None, download=True)]
        assert [len(numbers) for numbers in found] == [4, 4, 1]
