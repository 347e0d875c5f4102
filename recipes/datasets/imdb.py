"""IMDB: 50,000 movie reviews, positive or negative, a download of 80 MiB.

Source: Maas et al., "Learning Word Vectors for Sentiment Analysis", 2011.
"""

import numpy as np

from recipes.datasets.prepared import Source, examples, prepared

SOURCE = Source("imdb_reviews", "80 MiB")
CLASSES = 2


def load(split: str, data_dir: str | None, download: bool) -> tuple[list[str], np.ndarray]:
    """Loads a split into memory.

    Args:
        split: `"train"` or `"test"`, 25,000 examples each.
        data_dir: the folder of the prepared files, as `prepared` takes it.
        download: whether to download and prepare them, as `prepared` takes it.

    Returns:
        The texts, and labels, int64, shape `(examples,)`: 0 negative, 1 positive.

    Raises:
        NotPreparedError: the set is not prepared, and is not to be downloaded.
    """
    reviews = list(examples(prepared(SOURCE, data_dir, download), split))
    texts = [review["text"].decode("utf-8", errors="replace") for review in reviews]
    return texts, np.array([review["label"] for review in reviews], np.int64)
