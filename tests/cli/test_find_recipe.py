"""Where training recipes are found: a file, a module and a function, a name."""

import sys

import pytest

from keras_mp.cli.training_recipe import find_recipe, recipes_in

SOURCE = '''"""A training of mine."""
import dataclasses

@dataclasses.dataclass(frozen=True)
class Config:
    epochs: int = 1

def {name}():
    return Config()

def wide():
    return Config(epochs=7)

def train(config): ...
'''


def recipe_file(folder, name, head=""):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(SOURCE.format(name=name) + head)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, which is the current one and, as in the command, the first that is imported from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def epochs(given):
    return find_recipe(given).config([], "test").epochs


def test_a_file_a_function_of_a_file_and_a_function_of_a_module(here):
    path = recipe_file(here / "of_mine", "thin_training")
    assert epochs(str(path)) == 1 and epochs("of_mine/thin_training.py") == 1
    assert epochs(f"{path}:wide") == 7
    assert epochs("of_mine.thin_training:wide") == 7


def test_a_bare_name_is_a_file_in_the_folder_recipes_of_the_current_one(here):
    recipe_file(here / "recipes", "thin_training")
    assert epochs("thin_training") == 1
    assert recipes_in() == {"thin_training": "A training of mine."}
    assert find_recipe("thin_training").file == here / "recipes" / "thin_training.py"


def test_a_file_that_is_no_python_does_not_hide_the_others(here):
    recipe_file(here / "recipes", "thin_training")
    (here / "recipes" / "half_written.py").write_text("def half_written(:")
    (here / "recipes" / "binary.py").write_bytes(b"\x00\xff")
    assert list(recipes_in()) == ["thin_training"]
    with pytest.raises(ValueError, match="Did you mean 'thin_training'"):
        find_recipe("thin_trainings")


@pytest.mark.parametrize("given", [":wide", "thin_training:", "thin_training.py:"])
def test_half_of_module_and_function(here, given):
    recipe_file(here, "thin_training")
    with pytest.raises(ValueError, match="must have a name on both sides of the colon"):
        find_recipe(given)


def test_a_file_of_a_package_is_imported_as_part_of_it(here):
    recipe_file(here / "trainings_of_mine", "thin_training")
    (here / "trainings_of_mine" / "__init__.py").touch()
    module = find_recipe("trainings_of_mine/thin_training.py").module
    assert module.__name__ == "trainings_of_mine.thin_training" and sys.modules[module.__name__] is module
    assert find_recipe("trainings_of_mine.thin_training:wide").module is module


def test_a_file_imports_what_lies_beside_it(here, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "data_of_mine.py").write_text("ROWS = 3")
    path = recipe_file(elsewhere, "uses_data", "from data_of_mine import ROWS\n")
    assert find_recipe(str(path)).module.ROWS == 3


def test_a_file_with_the_name_of_a_module_is_that_file(here):
    path = recipe_file(here / "deep", "json")
    recipe = find_recipe(str(path))
    assert recipe.file == path and recipe.module is not sys.modules.get("json")
    again = recipe_file(here / "deeper", "json")
    assert find_recipe(str(again)).file == again


def test_a_file_that_fails_leaves_no_module_behind(here):
    path = recipe_file(here, "fails_to_load", "raise RuntimeError('no data')\n")
    with pytest.raises(RuntimeError, match="no data"):
        find_recipe(str(path))
    assert not [name for name in sys.modules if "fails_to_load" in name]


@pytest.mark.parametrize(
    "given, error, said",
    [
        ("nowhere/mine.py", FileNotFoundError, "no training recipe 'nowhere/mine.py': no such file. A training recipe"),
        ("nowhere/mine.py:wide", FileNotFoundError, "there is no training recipe 'nowhere/mine.py': no such file"),
        ("no_such_module:wide", ModuleNotFoundError, "'no_such_module:wide': there is no module 'no_such_module'"),
        (
            "json:wide",
            ValueError,
            "json.__init__.py is no training recipe: it defines no function wide and ",
        ),
    ],
)
def test_what_is_not_there_is_said_in_a_line(here, given, error, said):
    with pytest.raises(error, match=said) as told:
        find_recipe(given)
    assert "\n" not in str(told.value)
