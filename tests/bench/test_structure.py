"""What `benchmarks/structure.py` counts and follows in a small package that is made for it."""

from pathlib import Path

import pytest

from benchmarks.structure import Code, changes_of, listed, measures_of, modules_of, not_listed, taken_by_planner

FILES = {
    "keras_mp/__init__.py": "",
    "keras_mp/__init__.pyi": "from keras_mp.model.change import change as change\n",
    "keras_mp/backend/__init__.py": "if True:\n    from keras_mp.backend.one import *\n",
    "keras_mp/backend/one/__init__.py": "from keras_mp.backend.one.update import update\n",
    "keras_mp/backend/one/update.py": "def update(x):\n    return x\n",
    "keras_mp/step/__init__.py": "",
    "keras_mp/step/scale.py": '''"""A docstring of
two lines."""

LIMIT = 3
_hidden = 4


# A comment.
class Scale:
    """One line."""

    def __init__(self):
        self.name = "mine"

    def unused(self):
        pass


def grow(scale):
    return scale  # code
''',
    "keras_mp/model/__init__.py": "",
    "keras_mp/model/change.py": """import copy
from functools import partial

import keras

from keras_mp import backend
from keras_mp.step.scale import Scale, grow


class Base:
    def start(self):
        return partial(grow, 1)


class Step(Base):
    def run(self, update):
        super().start()
        self.finish()
        update(Scale())

    def finish(self):
        vars(self)["x"] = 1
        return backend.update(1)


def change(layer: keras.layers.Layer, other: Scale, own):
    layer.__class__ = Base


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
""",
    "tests/test_a.py": "def test_a():\n    assert True\n",
    "docs/maintainers/changes-of-keras.md": """| changes | why | in | by |
| --- | --- | --- | --- |
| `__class__` | a class | `model/change.py` | `change` |
| `__dict__` | a note | `model/change.py` | `taken` |
""",
}


@pytest.fixture
def package(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_lines_files_rooms_and_names_are_counted(package):
    text = "\n".join(text for name, text in FILES.items() if name.startswith("keras_mp") and name.endswith(".py"))
    measures = measures_of(package)
    assert measures["library: files"] == 8 and measures["tests: files"] == 1
    assert (measures["library: docstrings"], measures["library: comments"]) == (3, 1)
    assert measures["library: code"] == sum(bool(line.strip()) for line in text.splitlines()) - 3 - 1
    assert (measures["tests: code"], measures["tests: blank lines"]) == (2, 0)
    # model, above step and backend
    assert measures["rooms: folders, and files on the root"] == 3
    assert measures["floors: the longest chain of imports, of rooms"] == 2
    assert measures["modules in a circle of imports"] == measures["planner: lines"] == 0
    # Of `change` it is the package, which makes it public.
    assert measures["modules with exactly one importer"] == 3
    # LIMIT, Scale, grow; update; Base, Step, and six functions
    assert measures["public names at the top of modules"] == 3 + 1 + 8


def test_the_planner_takes_what_is_in_its_door_and_the_door_is_narrow():
    taken = taken_by_planner(modules_of(Path(__file__).parents[2]))
    assert {module for module, _ in taken} == {"keras_mp.lowering"} and len(taken) <= 15


def test_circles_and_what_the_planner_takes_are_counted(package):
    (package / "keras_mp/planner").mkdir()
    (package / "keras_mp/planner/__init__.py").write_text("from keras_mp.planner.other import a\n")
    (package / "keras_mp/planner/other.py").write_text(
        "from keras_mp import planner\n"
        "from keras_mp.reporting import text\n"
        "from keras_mp.step.scale import LIMIT\n"
        "a = 1\n"
    )
    measures = measures_of(package)
    assert (measures["modules in a circle of imports"], measures["planner: names that it takes from the kit"]) == (2, 1)
    assert (measures["planner: files"], measures["planner: lines"]) == (2, 5)


def test_changes_of_keras_are_seen_however_they_are_written(package):
    measures, missing = measures_of(package), not_listed(package)
    assert measures["functions that change a live object of Keras"] == 5
    assert measures["of them named in docs/maintainers/changes-of-keras.md"] == 2
    assert {function for _, function in missing} == {"named", "in_dictionary", "set_by_name"}
    assert missing["keras_mp/model/change.py", "named"].endswith(": layer.trainable")


def test_the_list_of_changes_of_keras_is_that_of_the_code():
    root = Path(__file__).parents[2]
    changes = {(file, name.split(".")[-1]) for file, name in changes_of(root)}
    assert len(changes) > 50 and listed(root) == changes


def test_a_visit_follows_names_through_imports(package):
    visited = Code(package).visits("keras_mp.model.change:Step.run")
    assert list(visited) == ["keras_mp.model.change", "keras_mp.step.scale", "keras_mp.backend.one.update"]
    assert visited["keras_mp.model.change"] == ["Step.run", "Base.start", "Step.finish"]
    assert visited["keras_mp.step.scale"] == ["grow", "Scale", "Scale.__init__"]
    with pytest.raises(SystemExit, match="no function keras_mp.model.change:Step.walk"):
        Code(package).visits("keras_mp.model.change:Step.walk")
