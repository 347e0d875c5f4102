"""What is said of a set that is not prepared, and that both readers give the same examples."""

import importlib.util
import re

import keras
import numpy as np
import pytest

from keras_mp.system.packages import install_command
from recipes.datasets import cifar10, imagenet, imdb, lm1b
from recipes.datasets.prepared import arrays, examples, prepared, tfds

COMMAND = re.escape(install_command("tensorflow"))
SOURCES = [cifar10.SOURCE, imagenet.SOURCE, imdb.SOURCE, lm1b.SOURCE]


class Small(tfds.core.GeneratorBasedBuilder):
    """Ten numbers with texts."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"number": tfds.features.Tensor(shape=(2,), dtype=np.int32), "text": tfds.features.Text()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for index in range(10):
            yield index, {"number": np.array([index, -index], np.int32), "text": f"é{index}"}


def small(folder, file_format):
    builder = Small(data_dir=str(folder / file_format), file_format=file_format)
    builder.download_and_prepare()
    # As found later: the files say their format.
    return Small(data_dir=str(folder / file_format))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_the_size_is_that_of_the_files_that_tensorflow_datasets_knows(source, tmp_path):
    # ImageNet's third file is its test set, which has no labels.
    urls = tfds.builder(source.name, data_dir=str(tmp_path)).url_infos
    size = sum(int(info.size) for url, info in urls.items() if "_test" not in url)
    number, unit = source.size.split()
    assert float(number) == pytest.approx(size / {"MiB": 2**20, "GiB": 2**30}[unit], rel=0.02)


def test_a_set_that_was_asked_for_is_downloaded(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", lambda builder: asked.append(builder))
    builder = prepared(cifar10.SOURCE, str(tmp_path), download=True)
    assert asked == [builder]
    tensorflow = keras.backend.backend() == "tensorflow"
    assert builder.info.file_format.value == ("tfrecord" if tensorflow else "array_record")


def test_preparing_without_tensorflow_says_what_to_install(tmp_path, monkeypatch):
    def missing(builder):
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", missing)
    with pytest.raises(ImportError, match=f"prepares cifar10 with TensorFlow, once.*{COMMAND}"):
        prepared(cifar10.SOURCE, str(tmp_path), download=True)


FORMATS = ["array_record"]
if importlib.util.find_spec("tensorflow") is not None:
    FORMATS.append("tfrecord")


@pytest.mark.parametrize("file_format", FORMATS)
def test_each_format_is_read_in_order(file_format, tmp_path):
    builder = small(tmp_path, file_format)
    texts = {example["text"].decode(): example["number"].tolist() for example in examples(builder, "train")}
    assert texts == {f"é{index}": [index, -index] for index in range(10)}
    first, second = (arrays(builder, "train", "number")[0] for _ in range(2))
    assert first.shape == (10, 2) and first.dtype == np.int32
    np.testing.assert_array_equal(first, second)
