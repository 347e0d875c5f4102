"""What the tests of training recipes share: a text, and a folder for data."""

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The path of a text file, which a model soon knows."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 90)
    return str(path)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data"))
