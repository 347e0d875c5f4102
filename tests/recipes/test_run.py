import types

import pytest

from recipes import run

RECIPE = '''"""A recipe of mine."""
import dataclasses
from typing import Annotated

@dataclasses.dataclass(frozen=True)
class Config:
    epochs: Annotated[int, "how many"] = 1

def mine():
    return Config()

def train(config):
    trained.append(config.epochs)
    return result
'''


@pytest.fixture
def mine(tmp_path):
    """The path of a recipe file that appends to `trained`."""
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    return path


def test_recipes_are_the_files_with_a_function_of_their_own_name():
    found = run.recipes()
    assert found["digits"].startswith("Handwritten digits")
    assert not {"run", "parity", "__init__", "__main__"} & set(found)


def test_a_path_is_imported(mine):
    module = run.find(str(mine))
    assert module.mine().epochs == 1


@pytest.mark.parametrize("interrupted, status", [(False, 0), (True, 130)])
def test_options_reach_the_recipe_and_its_end_the_exit_status(mine, monkeypatch, interrupted, status):
    module = run.find(str(mine))
    module.trained, module.result = [], types.SimpleNamespace(interrupted=interrupted)
    monkeypatch.setattr(run, "find", lambda recipe: module)
    assert run.main([str(mine), "--epochs", "3"]) == status
    assert module.trained == [3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["digit"], "unknown recipe digit: did you mean digits"),
        (["no/such/file.py"], "there is no recipe file no/such/file.py"),
        (["digits", "--epoch", "3"], "unknown option --epoch: did you mean --epochs"),
        (["digits", "--epochs", "0"], "epochs must be above 0, got 0"),
        (["digits", "--policy", "float61"], "float61"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("KERAS_MP_TRACEBACK", raising=False)
    assert run.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_file_without_its_functions_is_no_recipe(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("def train(config): ...")
    with pytest.raises(ValueError, match="is no recipe: it defines no function other"):
        run.find(str(path))


def test_help_lists_the_recipes(capsys):
    assert run.main([]) == run.main(["--help"]) == 0
    assert "digits" in capsys.readouterr().out
