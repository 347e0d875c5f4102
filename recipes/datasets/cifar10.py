"""CIFAR-10: 60,000 photographs of 32x32 pixels in ten classes, a download of 162 MiB.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

import numpy as np

from recipes.datasets.prepared import Source, arrays, prepared

SOURCE = Source("cifar10", "162 MiB")
CLASSES = 10
IMAGE_SHAPE = (32, 32, 3)


def load(split: str, data_dir: str | None, download: bool) -> tuple[np.ndarray, np.ndarray]:
    """Loads a split into memory: 150 MiB for training, 30 MiB for the test.

    Args:
        split: `"train"` (50,000 examples) or `"test"` (10,000).
        data_dir: the folder of the prepared files, as `prepared` takes it.
        download: whether to download and prepare them, as `prepared` takes it.

    Returns:
        Images, uint8, shape `(examples, 32, 32, 3)`; and labels, int64, shape `(examples,)`.

    Raises:
        NotPreparedError: the set is not prepared, and is not to be downloaded.
    """
    images, labels = arrays(prepared(SOURCE, data_dir, download), split, "image", "label")
    return images, labels.astype(np.int64)
