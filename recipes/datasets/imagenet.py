"""ImageNet: 1.28 million photographs in 1000 classes, cropped where they are decoded.

Source: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015 (arXiv:1409.0575). The crops are
those of Szegedy et al., "Going Deeper with Convolutions", 2015 (arXiv:1409.4842, section 6): for training a part of 8%
to 100% of the image with sides of 3:4 to 4:3, mirrored or not; for the test the middle square of 7/8 of the shorter
side. Each training image's crop is a function of the seed, the epoch and its place in it.

Both readers give uint8 images. Their orders differ, their test images do not by more than rounding.
"""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from keras_mp.training import Batches
from recipes.common.require import require
from recipes.datasets.prepared import Source, prepared, reads_with_tf_data, tfds
from recipes.datasets.streamed import StreamedBatches, in_order_of, keys

SOURCE = Source(
    "imagenet2012",
    "144 GiB",
    "registering at image-net.org and putting ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar into "
    "downloads/manual of that folder",
)
CLASSES = 1000
AREA = (0.08, 1.0)
ASPECT_RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10
TEST_SHARE = 224 / 256
# Records that wait undecoded, to be drawn from at random: a tenth of a gigabyte for each thousand.
SHUFFLE_BUFFER = 16_384
DECODING_THREADS = 8


def training_batches(batch_size: int, size: int, seed: int, data_dir: str | None, download: bool) -> Batches:
    """Reads the training images, in another order and with other crops each epoch.

    Args:
        batch_size: images a step.
        size: pixels of an image's side.
        seed: the seed of the order and of the crops.
        data_dir: the folder of the prepared files, as `prepared` takes it.
        download: whether to download and prepare them, as `prepared` takes it.

    Returns:
        Batches of images, uint8, `(batch_size, size, size, 3)`, and labels, int64, `(batch_size,)`.

    Raises:
        NotPreparedError: the set is not prepared, and is not to be downloaded.
        ValueError: for a batch larger than the data.
    """
    builder = prepared(SOURCE, data_dir, download)
    if reads_with_tf_data(builder):
        return _streamed(builder, batch_size, size, seed)
    return RandomCrops(_records(builder, "train"), batch_size, size, seed)


def test_batches(batch_size: int, size: int, data_dir: str | None, download: bool) -> Any:
    """Reads the validation images, in the order of the files; the last batch may be smaller.

    Args:
        batch_size: images a step.
        size: pixels of an image's side.
        data_dir: the folder of the prepared files, as `prepared` takes it.
        download: whether to download and prepare them, as `prepared` takes it.

    Returns:
        What `evaluate` takes: a `tf.data.Dataset` or a `keras.utils.PyDataset`, of batches as `training_batches` has.

    Raises:
        NotPreparedError: the set is not prepared, and is not to be downloaded.
    """
    builder = prepared(SOURCE, data_dir, download)
    if not reads_with_tf_data(builder):
        return MiddleCrops(_records(builder, "validation"), batch_size, size)
    import tensorflow as tf

    images = builder.as_dataset(split="validation", shuffle_files=False, decoders=_undecoded())
    images = images.map(lambda example: (_tf_middle(example["image"], size), example["label"]), tf.data.AUTOTUNE)
    return images.batch(batch_size).prefetch(2)


def _undecoded():
    return {"image": tfds.decode.SkipDecoding()}


def _records(builder, split):
    return builder.as_data_source(split=split, decoders=_undecoded())


def _streamed(builder, batch_size, size, seed):
    import tensorflow as tf

    def opened(epoch: int, step: int) -> Iterator[Any]:
        order, files, crops, mirror = keys(seed, epoch)

        def read():
            reading = tfds.ReadConfig(shuffle_seed=int(files))
            records = builder.as_dataset(split="train", shuffle_files=True, decoders=_undecoded(), read_config=reading)
            return records.shuffle(SHUFFLE_BUFFER, seed=int(order))

        def cropped(index, example):
            image = _tf_crop(example["image"], size, (crops, index))
            flipped = tf.random.stateless_uniform((), (mirror, index)) < 0.5
            return tf.where(flipped, tf.reverse(image, [1]), image), example["label"]

        # What is skipped is read, but not decoded.
        images = in_order_of(int(order), read).enumerate().skip(step * batch_size)
        images = images.map(cropped, tf.data.AUTOTUNE, deterministic=True)
        return images.batch(batch_size, drop_remainder=True).prefetch(2).as_numpy_iterator()

    examples = int(builder.as_dataset(split="train", shuffle_files=False, decoders=_undecoded()).cardinality())
    return StreamedBatches(examples, batch_size, seed, opened)


def _tf_crop(encoded, size, seed):
    """A random part of an encoded JPEG, uint8, `(size, size, 3)`."""
    import tensorflow as tf

    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(encoded),
        tf.zeros((1, 0, 4)),
        seed,
        min_object_covered=0.0,
        aspect_ratio_range=ASPECT_RATIO,
        area_range=AREA,
        max_attempts=ATTEMPTS,
        use_image_if_no_bounding_boxes=True,
    )
    return _tf_resized(encoded, tf.concat([begin[:2], extent[:2]], 0), size)


def _tf_middle(encoded, size):
    import tensorflow as tf

    shape = tf.image.extract_jpeg_shape(encoded)[:2]
    side = tf.cast(tf.round(TEST_SHARE * tf.cast(tf.reduce_min(shape), tf.float32)), tf.int32)
    return _tf_resized(encoded, tf.concat([(shape - side) // 2, [side, side]], 0), size)


def _tf_resized(encoded, box, size):
    import tensorflow as tf

    # The accurate transform, because the fast one, the default here, is not what other decoders do.
    part = tf.image.decode_and_crop_jpeg(encoded, box, channels=3, dct_method="INTEGER_ACCURATE")
    image = tf.image.resize(part, (size, size), antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8)


class RandomCrops(Batches):
    """Training images by random access, without TensorFlow.

    Args:
        records: a sequence of examples with encoded images, as `as_data_source` gives.
        batch_size: images a step.
        size: pixels of an image's side.
        seed: the seed of the order and of the crops.
    """

    def __init__(self, records: Any, batch_size: int, size: int, seed: int) -> None:
        super().__init__(len(records), batch_size, seed)
        self.records, self.size = records, size
        self._threads = ThreadPoolExecutor(DECODING_THREADS)

    def batch(self, epoch: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        order = self.order(epoch)
        places = range(step * self.batch_size, (step + 1) * self.batch_size)

        def cropped(place):
            example = self.records[int(order[place])]
            generator = np.random.default_rng((self.seed, epoch, place))
            return random_crop(example["image"], self.size, generator), example["label"]

        return _stacked(self._threads.map(cropped, places))


class MiddleCrops(keras.utils.PyDataset):
    """Test images by random access, without TensorFlow.

    Args:
        records: a sequence of examples, as `RandomCrops` takes them.
        batch_size: images a step.
        size: pixels of an image's side.
    """

    def __init__(self, records: Any, batch_size: int, size: int) -> None:
        super().__init__()
        self.records, self.batch_size, self.size = records, batch_size, size
        self._threads = ThreadPoolExecutor(DECODING_THREADS)

    def __len__(self) -> int:
        return -(-len(self.records) // self.batch_size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        def cropped(place):
            example = self.records[place]
            return middle_crop(example["image"], self.size), example["label"]

        end = min((index + 1) * self.batch_size, len(self.records))
        return _stacked(self._threads.map(cropped, range(index * self.batch_size, end)))


def _stacked(examples):
    images, labels = zip(*examples, strict=True)
    return np.stack(images), np.array(labels, np.int64)


def random_crop(encoded: bytes, size: int, generator: np.random.Generator) -> np.ndarray:
    """A random part of an image, mirrored or not.

    Args:
        encoded: the image file.
        size: pixels of the result's side.
        generator: the generator that draws.

    Returns:
        uint8, shape `(size, size, 3)`.
    """
    image = _decoded(encoded)
    part = _resized(image, random_box(*image.size, generator), size)
    return part[:, ::-1] if generator.random() < 0.5 else part


def middle_crop(encoded: bytes, size: int) -> np.ndarray:
    """The middle square of an image, 7/8 of its shorter side: uint8, shape `(size, size, 3)`."""
    image = _decoded(encoded)
    side = round(TEST_SHARE * min(image.size))
    left, top = ((extent - side) // 2 for extent in image.size)
    return _resized(image, (left, top, left + side, top + side), size)


def random_box(width: int, height: int, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """Draws a part of an image: its area and its aspect ratio uniformly, then its place.

    Args:
        width: pixels of the image.
        height: pixels of the image.
        generator: the generator that draws.

    Returns:
        The pixels `(left, top, right, bottom)`, at least one each way; all of the image where ten draws do not fit.
    """
    for _ in range(ATTEMPTS):
        area, ratio = generator.uniform(*AREA) * width * height, generator.uniform(*ASPECT_RATIO)
        across, down = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < across <= width and 0 < down <= height:
            left, top = generator.integers(width - across + 1), generator.integers(height - down + 1)
            return int(left), int(top), int(left) + across, int(top) + down
    return 0, 0, width, height


def _decoded(encoded):
    image = require("PIL.Image", extra="data")
    return image.open(io.BytesIO(encoded)).convert("RGB")


def _resized(image, box, size):
    bilinear = require("PIL.Image", extra="data").Resampling.BILINEAR
    # Cut first: resizing with a box would look at pixels beyond it.
    return np.asarray(image.crop(box).resize((size, size), bilinear))
