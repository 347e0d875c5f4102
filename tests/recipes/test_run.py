from pathlib import Path

import command_line
import pytest

from keras_mp.training.training_recipe import recipes_in, run_recipe
from recipes import digits

FOLDER = Path(digits.__file__).parent


def test_training_recipes_are_the_files_with_a_function_of_their_own_name(monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    found = recipes_in()
    assert found["digits"].startswith("Handwritten digits")
    assert "__init__" not in found


def test_a_recipe_is_imported_once(monkeypatch, tmp_path):
    trained = []
    monkeypatch.setattr(digits, "train", trained.append)
    monkeypatch.chdir(FOLDER.parent)
    assert run_recipe(["digits", "--epochs", "3"]) == 0
    monkeypatch.chdir(tmp_path)
    assert run_recipe([str(FOLDER / "digits.py"), "--epochs", "4"]) == 0
    assert [config.epochs for config in trained] == [3, 4]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["digit"], "unknown training recipe 'digit'. Did you mean 'digits'"),
        (["__init__"], "__init__.py is no training recipe: it defines no function train"),
        (["no/such/file.py"], "there is no training recipe 'no/such/file.py': no such file"),
        (["digits", "--epochs", "0"], "epochs must be above 0, got 0"),
        (["digits", "--policy", "float61"], "float61"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, monkeypatch):
    monkeypatch.delenv("KERAS_MP_TRACEBACK", raising=False)
    ended = command_line.run("train", *arguments, cwd=FOLDER.parent)
    assert ended.returncode == 1 and ended.stderr.startswith("error: ")
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_help_lists_the_training_recipes(capsys):
    assert run_recipe([]) == run_recipe(["--help"]) == 0
    assert "digits" in capsys.readouterr().out
