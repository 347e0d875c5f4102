"""The corpora, and that training and validation text do not overlap."""

import numpy as np
import pytest

from recipes.datasets import text


def test_pydoc_is_english_and_the_same_each_time():
    corpus = text.read("pydoc")
    assert len(corpus) > 400_000 and corpus == text.read("pydoc")
    assert corpus.count(b" the ") > 1000


def test_stdlib_is_python_source_without_tests_or_packages_up_to_its_cap(tmp_path, monkeypatch):
    corpus = text.read("stdlib")
    assert len(corpus) == text.STDLIB_BYTES and corpus.count(b"\ndef ") > 500

    files = {"b/late.py": b"3", "abc.py": b"1", "b/__init__.py": b"2", "z.py": b"4"}
    ignored = {"test/t.py": b"t", "site-packages/p.py": b"p", "b/test/t.py": b"t", "_sysconfigdata_x.py": b"/home/me"}
    for name, content in {**files, **ignored, "data.txt": b"d"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    assert text.read("stdlib") == b"1234"
    monkeypatch.setattr(text, "STDLIB_BYTES", 3)
    assert text.read("stdlib") == b"123"


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(bytes(range(256)))
    assert text.read(str(path)) == bytes(range(256))


@pytest.mark.parametrize("size, length", [(1000, 7), (1000, 100), (999, 1), (50, 5)])
def test_the_split_is_whole_validation_sequences_after_the_training_text(size, length):
    corpus = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    train, validation = text.split(corpus, length)
    assert train.tobytes() + validation.tobytes() == corpus
    inputs, targets = text.sequences(validation, length)
    assert inputs.size == len(validation) - 1  # every byte but the first is predicted, once
    assert size // 10 - length < inputs.size <= size // 10


def test_targets_follow_inputs():
    inputs, targets = text.sequences(np.arange(10, dtype=np.uint8), 4)
    np.testing.assert_array_equal(inputs, [[0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(targets, inputs + 1)
    assert inputs.dtype == targets.dtype == np.int32
