"""What a training recipe must offer, and what is said where it does not."""

import types

import keras
import numpy as np
import pytest

from keras_mp.cli.training_recipe import find_recipe, run_recipe

HEAD = """
import dataclasses
from pathlib import Path

@dataclasses.dataclass(frozen=True)
class Config:
    epochs: int = 1
    folder: Path = Path("here")
"""
CONFIG = "def mine(): return Config()\n"
TRAIN = "def train(config):\n    (config.folder / 'trained').write_text(str(config.epochs))\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the source of a training recipe into a file `mine.py`, and returns its path."""
    monkeypatch.delenv("KERAS_MP_TRACEBACK", raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def write(source, name="mine.py"):
        path = tmp_path / name
        path.write_text(HEAD + source)
        return str(path)

    return write


@pytest.mark.parametrize("returned", ["None", "{'loss': 1.0}", "3", "Config()"])
def test_a_train_that_returns_nothing_or_something_of_its_own_ends_well(write, tmp_path, capfd, returned):
    path = write(f"{CONFIG}{TRAIN}    return {returned}\n")
    assert run_recipe([path, "--epochs", "3", "--folder", str(tmp_path)]) == 0
    assert (tmp_path / "trained").read_text() == "3" and capfd.readouterr().err == ""


@pytest.mark.parametrize("interrupted, status", [(False, 0), (True, 130)])
def test_an_end_by_ctrl_c_is_the_exit_status(write, interrupted, status):
    path = write(f"import types\n{CONFIG}def train(config): return types.SimpleNamespace(interrupted={interrupted})\n")
    assert run_recipe([path]) == status


@pytest.mark.parametrize(
    "source, said",
    [
        (
            "def mine(): return {'epochs': 3}\n" + TRAIN,
            "mine() must return its config, an instance of a dataclass, whose fields are the options of the command "
            "line; it returned {'epochs': 3}",
        ),
        ("def mine(): return Config\n" + TRAIN, "it returned <class '"),
        ("def mine(): pass\n" + TRAIN, "it returned None"),
        (CONFIG, "is no training recipe: it defines no function train. A training recipe is a Python file with"),
        (TRAIN, "is no training recipe: it defines no function mine. A training recipe is a Python file with"),
        ("train = mine = None", "it defines no function mine and no function train."),
    ],
)
def test_a_file_that_is_no_training_recipe_is_told_before_anything_is_trained(
    write, tmp_path, monkeypatch, source, said
):
    monkeypatch.chdir(tmp_path)
    path = write(source)
    with pytest.raises(ValueError) as told:
        run_recipe([path])
    error = str(told.value)
    assert path in error and said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "trained").exists() and not (tmp_path / "here").exists()


class Recipe:
    """A training recipe whose functions `step` and `batches` a test gives."""

    def __new__(cls, write, **functions):
        recipe = find_recipe(write(CONFIG + TRAIN))
        for name, function in functions.items():
            setattr(recipe.module, name, function)
        return recipe


def model():
    small = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    small.compile("sgd", "mse")
    return small


ROWS = np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32")


def test_a_step_is_a_model_and_a_batch(write):
    small = model()
    recipe = Recipe(write, step=lambda config: [small, list(ROWS)])
    assert recipe.step(recipe.config([], "test")) == (small, ROWS)
    assert recipe.batches(None) is None


@pytest.mark.parametrize(
    "step, said",
    [
        (lambda config: None, r"step\(config\) must return a compiled keras.Model and a batch.*; it returned None"),
        (lambda config: model(), "must return a compiled keras.Model and a batch.*; it returned <Sequential"),
        (lambda config: (ROWS, model()), r"it returned \(\(array"),
        (lambda config: (model(), ROWS[0]), r"\(model, \(x, y\)\).*; it returned \(<Sequential"),
        (lambda config: (model(), ROWS[:1]), r"\(model, \(x, y\)\).*; it returned \(<Sequential"),
    ],
)
def test_a_step_that_is_something_else_is_named(write, step, said):
    recipe = Recipe(write, step=step)
    with pytest.raises(ValueError, match=f"mine.py.*{said}" if "mine" not in said else said):
        recipe.step(None)


def test_batches_that_are_none_are_not_taken_for_no_data(write):
    with pytest.raises(ValueError, match=r"mine.py: batches\(config\) must return the .* it returned None"):
        Recipe(write, batches=lambda config: None).batches(None)


def test_a_benchmark_needs_a_step_and_a_policy(write):
    recipe = Recipe(write)
    with pytest.raises(ValueError, match=r"mine.py defines no function step\(config\)"):
        recipe.check_can_be_measured(recipe.config([], "test"))
    recipe.module.step = lambda config: None
    with pytest.raises(ValueError, match=r"the config of mine\(\) has no field policy.*add policy: str"):
        recipe.check_can_be_measured(recipe.config([], "test"))
    recipe.check_can_be_measured(types.SimpleNamespace(policy="auto"))
