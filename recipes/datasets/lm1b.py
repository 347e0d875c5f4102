"""The One Billion Word Benchmark: 30 million sentences of news, a download of 1.7 GiB.

Source: Chelba et al., "One Billion Word Benchmark for Measuring Progress in Statistical Language Modeling", 2013
(arXiv:1312.3005). The sentences come in no order.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.datasets.prepared import Source, examples, prepared

SOURCE = Source("lm1b", "1.7 GiB")


def find(data_dir: str | None, download: bool) -> Any:
    """Finds the prepared set, or prepares it, as `prepared` does."""
    return prepared(SOURCE, data_dir, download)


def sentences(builder: Any, split: str) -> Iterator[str]:
    """The sentences of a split, `"train"` or `"test"`, in the order of the files."""
    return (example["text"].decode("utf-8", errors="replace") for example in examples(builder, split))


def folder(builder: Any) -> Path:
    """Where files made from the set go: beside its own."""
    return Path(builder.data_dir_root) / "keras_mp_tokens" / SOURCE.name
