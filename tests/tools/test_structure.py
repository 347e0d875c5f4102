"""Which functions `benchmarks/structure.py` sees change a live object of Keras, in a small module made for it."""

from pathlib import Path

import pytest

from benchmarks.structure import measures_of, modules_of, not_listed, taken_by_planner

pytestmark = pytest.mark.slow
MODULE = """import copy

import keras

from keras_mp.model.scale import Scale


def change(layer: keras.layers.Layer, other: Scale, own):
    layer.__class__ = Scale


def named(layer: keras.layers.Layer):
    layer.trainable = False


def in_dictionary(layer):
    vars(layer)["x"] = 1


def taken(layer):
    layer.__dict__.pop("x", None)


def set_by_name(layers, name):
    for layer in layers:
        object.__setattr__(layer, name, 1)


def not_of_keras(layer: keras.layers.Layer, other: Scale, own: list):
    layer.colour = "red"
    other.trainable = True
    setattr(own, "trainable", True)
    scale = Scale()
    scale.name = "new"
    own[0] = 1
    copied = copy.copy(layer)
    copied.trainable = False
"""
FILES = {
    "keras_mp/__init__.py": "",
    "keras_mp/__init__.pyi": "",
    "keras_mp/model/__init__.py": "",
    "keras_mp/model/scale.py": "class Scale:\n    def __init__(self):\n        self.name = 'mine'\n",
    "keras_mp/model/change.py": MODULE,
    "docs/maintainers/changes-of-keras.md": """| changes | why | in | by |
| --- | --- | --- | --- |
| `__class__` | a class | `model/change.py` | `change` |
| `__dict__` | a note | `model/change.py` | `taken` |
""",
}


def test_changes_of_keras_are_seen_however_they_are_written(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    measures, missing = measures_of(tmp_path), not_listed(tmp_path)
    assert measures["functions that change a live object of Keras"] == 5
    assert measures["of them named in docs/maintainers/changes-of-keras.md"] == 2
    assert {function for _, function in missing} == {"named", "in_dictionary", "set_by_name"}
    assert missing["keras_mp/model/change.py", "named"].endswith(": layer.trainable")


def test_the_planner_takes_what_is_in_its_door_and_the_door_is_narrow():
    taken = taken_by_planner(modules_of(Path(__file__).parents[2]))
    assert {module for module, _ in taken} == {"keras_mp.lowering"} and len(taken) <= 15
