"""Data sets that have to be downloaded, as `tfds.testing.mock_data` makes them up, for either reader."""

import contextlib
import io

import numpy as np
import tensorflow_datasets as tfds


@contextlib.contextmanager
def mocked(examples, images=False):
    """Within it, every set of tensorflow-datasets that is asked for with `download=True` has this many examples.

    Args:
        examples: the number of examples, the same in each split.
        images: whether the set is ImageNet.
    """

    def by_random_access(builder, split, decoders=None):
        if images:
            # Made here, because tensorflow-datasets encodes the images that it makes up with TensorFlow.
            return [photograph(index) for index in range(examples)]
        generator = tfds.testing.mocking.RandomFakeGenerator(builder.info.features, examples)
        return [{name: as_read(value) for name, value in generator[index].items()} for index in range(examples)]

    policy = tfds.testing.MockPolicy.USE_CODE
    with tfds.testing.mock_data(num_examples=examples, policy=policy, as_data_source_fn=by_random_access):
        yield


def as_read(value):
    """A text as files give it: bytes, where the generator of tensorflow-datasets gives a string."""
    return value.encode() if isinstance(value, str) else value


def photograph(index, classes=1000):
    """An example of ImageNet with a smooth image whose size depends on the index."""
    generator = np.random.default_rng(index)
    height, width = 40 + 7 * (index % 5), 64 - 5 * (index % 3)
    image = smooth(generator, height, width)
    return {"image": jpeg(image), "label": index % classes, "file_name": f"{index}.JPEG".encode()}


def smooth(generator, height, width):
    """A photograph-like image, uint8, which JPEG keeps nearly as it is."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows * a + b) * np.cos(columns * c + b) for a, b, c in generator.uniform(0.02, 0.15, (3, 3))]
    return (127.5 + 120 * np.stack(waves, -1)).astype(np.uint8)


def jpeg(image):
    """The bytes of an image as a JPEG of high quality."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling=0)
    return file.getvalue()
