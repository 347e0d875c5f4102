"""Data sets of tensorflow-datasets that are read where they are prepared, and downloaded only when asked for.

A set is prepared once, in a format for one of two readers: tf.data where Keras runs on TensorFlow ("tfrecord"), random
access without TensorFlow elsewhere ("array_record"). The files then say which reader they need, whatever the backend.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import keras
import numpy as np

from recipes.common.require import MissingPackageError, install_command, require

tfds: Any = require("tensorflow_datasets", extra="data")


class Source(NamedTuple):
    """A data set that has to be downloaded.

    Attributes:
        name: the name in tensorflow-datasets.
        size: the size of the download, in words.
        manual: the thing to be done by hand first; empty where there is none.
    """

    name: str
    size: str
    manual: str = ""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What can be set in every training recipe whose data set has to be downloaded."""

    data_dir: Annotated[str | None, "folder of the prepared data; by default that of tensorflow-datasets"] = None
    download: Annotated[bool, "download and prepare the data set, if it is not prepared yet"] = False


class NotPreparedError(FileNotFoundError):
    """A data set is neither prepared nor embedded; the message says how to get it, and how large it is."""


def prepared(source: Source, data_dir: str | None, download: bool) -> Any:
    """Finds a prepared data set, or prepares it.

    Args:
        data_dir: the folder of the prepared files; by default tensorflow-datasets' own.
        download: whether to download and prepare it where it is not prepared.

    Returns:
        The builder.

    Raises:
        NotPreparedError: it is not prepared, and `download` is False.
        MissingPackageError: preparing it needs TensorFlow, which is not installed.
    """
    builder = tfds.builder(source.name, data_dir=data_dir)
    if builder.is_prepared():
        return builder
    if not download:
        raise NotPreparedError(
            f"data set {source.name} is not prepared in {str(builder.data_dir_root)!r}: --download gets and prepares "
            f"it ({source.size}){source.manual and f', after {source.manual}'}; --data-dir names another folder"
        )
    builder = tfds.builder(source.name, data_dir=data_dir, file_format=preferred_format())
    try:
        builder.download_and_prepare()
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise MissingPackageError(
            f"tensorflow-datasets prepares {source.name} with TensorFlow, once, and reads it without. Run: "
            f"{install_command('tensorflow')}"
        ) from error
    return builder


def preferred_format() -> str:
    """The file format that a data set is prepared in: for tf.data on TensorFlow, for random access elsewhere."""
    return "tfrecord" if keras.backend.backend() == "tensorflow" else "array_record"


def reads_with_tf_data(builder: Any) -> bool:
    """Whether a prepared set's files are for tf.data.

    Raises:
        MissingPackageError: they are, and TensorFlow is not installed.
    """
    if builder.info.file_format.value != "tfrecord":
        return False
    require("tensorflow", extra="tensorflow")
    return True


def examples(builder: Any, split: str) -> Any:
    """Reads a split in the order of its files.

    Args:
        builder: the result of `prepared`.
        split: the name of the split, for example `"train"`.

    Returns:
        An iterable of dictionaries from each feature's name to its value, as NumPy gives it; texts are bytes.
    """
    if reads_with_tf_data(builder):
        return builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator()
    return iter(builder.as_data_source(split=split))


def arrays(builder: Any, split: str, *features: str) -> list[np.ndarray]:
    """Reads features of a whole split into memory.

    Args:
        builder: the result of `prepared`.
        split: the name of the split, for example `"train"`.
        features: the names of the features; each has one shape.

    Returns:
        An array a feature, shape `(examples, ...)`.
    """
    rows = [[example[feature] for feature in features] for example in examples(builder, split)]
    return [np.stack(column) for column in zip(*rows, strict=True)]
