"""The names of a stub: read without importing them, imported one by one."""

import sys

import pytest

from keras_mp.system.stub_names import door, load, names_in_stub


def test_a_stub_s_names_are_imported_when_they_are_used(tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "__init__.py").write_text("")
    (tmp_path / "made" / "inner.py").write_text("VALUE = 5")
    (tmp_path / "made" / "stub.pyi").write_text("from made import inner as inner\nfrom made.inner import VALUE as V\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert names_in_stub(tmp_path / "made" / "stub.pyi") == {"inner": "made", "V": "made.inner"}
    assert "made" not in sys.modules
    assert load("made", "inner").VALUE == load("made.inner", "VALUE") == 5
    with pytest.raises(ImportError, match="made.inner.missing"):
        load("made.inner", "missing")


def test_a_module_shows_the_names_of_its_stub(tmp_path):
    (tmp_path / "shown.pyi").write_text("from math import pi as pi\n")
    space = {"__name__": "shown", "__file__": str(tmp_path / "shown.py")}
    get, names = door(space, registers=False)
    assert get("__all__") == ["pi"] and get("pi") == space["pi"] == 3.141592653589793
    assert {"pi", "__name__"} <= set(names())
    with pytest.raises(AttributeError, match="module 'shown' has no attribute 'tau'; it has pi"):
        get("tau")
