"""Gradients that are products in a step on a CPU, where TensorFlow's kernels are slower or wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.tensorflow import bias, small_images


@contextmanager
def gradients_on_cpus() -> Iterator[None]:
    """Within it, convolutions of small images and additions of a bias get such gradients."""
    with patched({"keras.src.backend.nn.conv": small_images.conv, "keras.src.backend.numpy.add": bias.add}):
        yield
