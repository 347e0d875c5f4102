"""The examples in the docstrings of public names run, and return what they say."""

import doctest
import types

import keras
import pytest

import keras_mp

# They compile for a chip, or write a SavedModel.
SLOW = {"advise"}
ON_TENSORFLOW = {"export_float32"}
NAMES = {name for name in keras_mp.__all__ if not isinstance(getattr(keras_mp, name), types.ModuleType)}


def public():
    for name in keras_mp.__all__:
        value = getattr(keras_mp, name)
        if isinstance(value, types.ModuleType):
            yield from ((inner, getattr(value, inner)) for inner in value.__all__)
        else:
            yield name, value


EXAMPLES = {name: value for name, value in public() if ">>>" in (value.__doc__ or "")}


@pytest.mark.jax
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in EXAMPLES])
def test_the_example_returns_what_it_says(name, tmp_path, monkeypatch):
    if name in ON_TENSORFLOW and keras.backend.backend() != "tensorflow":
        pytest.skip("TensorFlow writes SavedModels")
    monkeypatch.chdir(tmp_path)
    keras.utils.clear_session()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    (test,) = doctest.DocTestFinder(recurse=False).find(EXAMPLES[name], name, globs={})
    said = []
    assert doctest.DocTestRunner(optionflags=flags).run(test, out=said.append).failed == 0, "".join(said)


def test_each_public_name_has_an_example():
    assert EXAMPLES.keys() >= NAMES
