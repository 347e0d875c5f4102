from pathlib import Path

from keras_mp.cli.training_recipe import recipes_in, run_recipe
from recipes import digits

FOLDER = Path(digits.__file__).parent


def test_training_recipes_are_the_files_with_a_function_of_their_own_name(monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    found = recipes_in()
    assert found["digits"].startswith("Handwritten digits")
    assert "__init__" not in found


def test_help_lists_the_training_recipes(capsys):
    assert run_recipe([]) == run_recipe(["--help"]) == 0
    assert "digits" in capsys.readouterr().out
