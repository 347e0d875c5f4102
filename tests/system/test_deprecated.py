"""Old names of arguments, attributes and functions work, and warn, at the line that uses them, of the new ones."""

import inspect
import sys
import types
import warnings

import pytest

from keras_mp.system.deprecated import RenamedAttribute, renamed_arguments, renamed_names


@renamed_arguments(say="log", keep="max_to_keep")
def run(model, *, log=None, max_to_keep=3):
    return model, log, max_to_keep


class Callback:
    keep = RenamedAttribute("max_to_keep")
    found = RenamedAttribute("paths")

    @renamed_arguments(keep="max_to_keep")
    def __init__(self, folder, max_to_keep=3):
        self.folder, self.max_to_keep = folder, max_to_keep

    def paths(self):
        return [self.folder]


def only_warning(action, match):
    with pytest.warns(DeprecationWarning, match=match) as caught:
        result = action()
    assert [warning.filename for warning in caught] == [__file__]
    return result


def test_an_old_argument_is_passed_by_its_new_name():
    assert only_warning(lambda: run("m", say="x"), r"run\(say=...\) is now run\(log=...\)") == ("m", "x", 3)
    assert only_warning(lambda: Callback("f", keep=7), r"Callback\(keep=...\) is now Call").max_to_keep == 7


def test_new_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("m", log="x", max_to_keep=1) == ("m", "x", 1)
        assert Callback("f", 2).max_to_keep == 2


def test_an_argument_given_by_both_names_is_an_error():
    with pytest.raises(TypeError, match=r"run\(\) got 'log' and 'say', two names of one argument: give 'log' only"):
        run("m", log=1, say=2)


def test_the_signature_has_the_new_names_alone():
    assert list(inspect.signature(run).parameters) == ["model", "log", "max_to_keep"]
    assert inspect.getfullargspec(Callback.__init__).args == ["self", "folder", "max_to_keep"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'silent'"):
        run("m", silent=True)


def test_a_name_that_the_function_does_not_have_is_refused_at_once():
    with pytest.raises(TypeError, match="must have an argument 'log', and none named 'say'"):
        renamed_arguments(say="log")(lambda say: say)


def test_an_old_attribute_reads_and_writes_the_new_one():
    callback = Callback("f", 2)
    assert only_warning(lambda: callback.keep, "Callback.keep is now Callback.max_to_keep") == 2
    only_warning(lambda: setattr(callback, "keep", 5), "Callback.keep is now")
    assert callback.max_to_keep == 5
    assert only_warning(lambda: callback.found(), "Callback.found is now Callback.paths") == ["f"]


def test_an_old_name_of_a_module(monkeypatch):
    module = types.ModuleType("renamed_example")
    module.new = object()
    module.__getattr__ = renamed_names("renamed_example", {"old": "new", "moved": "keras_mp.system.versions:installed"})
    monkeypatch.setitem(sys.modules, "renamed_example", module)
    assert only_warning(lambda: module.old, r"renamed_example.old is now renamed_example.new") is module.new
    assert only_warning(lambda: module.moved, "moved is now keras_mp.system.versions.installed").__name__ == "installed"
    with pytest.raises(AttributeError, match="module 'renamed_example' has no attribute 'unknown'"):
        module.unknown  # noqa: B018
