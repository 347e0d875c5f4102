"""A training recipe of one's own, far from a clone, in each command that takes one."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from keras_mp.cli import app

ROOT = Path(__file__).parents[2]
COMMANDS = ("train", "inspect", "audit", "bench")

MINE = '''"""Lines through points."""

import dataclasses
from pathlib import Path
from typing import Annotated

import keras
import numpy as np

import keras_mp


@dataclasses.dataclass(frozen=True)
class Config:
    policy: str = "float32"
    batch_size: Annotated[int, "points a step"] = 8
    width: Annotated[int, "of the hidden layer"] = 4
    out: Path = Path("trained.keras")


def mine():
    return Config()


def build(config):
    keras_mp.set_global_policy(config.policy)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(config.width), keras.layers.Dense(1)], name="lines")
    model.compile("sgd", "mse")
    return model


def step(config):
    return build(config), tuple(keras.KerasTensor((config.batch_size, size), "float32") for size in (3, 1))


def batches(config):
    rows = np.random.default_rng(0).normal(size=(4, config.batch_size, 3)).astype("float32")
    return [(x, x[:, :1]) for x in rows]


def train(config):
    model = build(config)
    for x, y in batches(config):
        model.train_on_batch(x, y)
    model.save(config.out)
'''


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder, which is the current one, and the path of a training recipe in another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "of_mine" / "mine.py"
    path.parent.mkdir()
    path.write_text(MINE)
    return path


def told(command, *arguments):
    """What a command says of a mistake, as its `main` prints it."""
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert result.exit_code == 1
    said = f"error: {result.exception}\n"
    assert said.count("\n") == 1
    return said


def test_outside_a_clone_all_four_commands_say_the_same_of_a_name(elsewhere):
    (said,) = {told(command, "digits") for command in COMMANDS}
    for text in (
        f"there is no file {Path.cwd()}/recipes/digits.py",
        "A training recipe is a Python file with a function of its own name",
        "keras-mp's own are in the folder recipes/ of its repository, and are run from a clone of it",
        "your own is given as the path of its file, or as module:function",
    ):
        assert text in said


def test_inspect_and_audit_take_a_file_or_a_function_of_a_module(elsewhere):
    result = CliRunner().invoke(app, ["inspect", "of_mine.mine:mine", "--width", "5", "--json"])
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["batch"] == ["float32[8, 3]", "float32[8, 1]"]
    result = CliRunner().invoke(app, ["audit", str(elsewhere), "--steps", "2", "--batch-size", "6", "--json"])
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout)
    assert (report["model"], report["steps"]) == ("lines", 2)
    assert not any("random" in note for note in report["notes"])


@pytest.mark.parametrize("command", ["inspect.inspect", "advise.advise"])
@pytest.mark.parametrize("target, dtype", [("h100,t4", "bfloat16"), ("t4", "float16")])
def test_auto_is_the_policy_of_the_target(elsewhere, monkeypatch, command, target, dtype):
    given = mock.Mock(side_effect=ValueError("given"))
    monkeypatch.setattr(f"keras_mp.planner.{command}", given)
    target = target if command[0] == "a" else target.partition(",")[0]
    assert "given" in told(command.partition(".")[0], elsewhere, "--policy", "auto", "--target", target)
    assert given.call_args.args[0].layers[0].compute_dtype == dtype


def test_audit_of_a_training_recipe_without_data_says_what_to_add(elsewhere):
    elsewhere.write_text(MINE.replace("def batches", "def draw").replace("in batches", "in draw"))
    result = CliRunner().invoke(app, ["audit", str(elsewhere), "--steps", "1", "--json"])
    assert result.exit_code == 0, result.exception
    assert "random numbers" in (note := json.loads(result.stdout)["notes"][-1])
    assert note.endswith("Give the training recipe a function batches(config).")


@pytest.mark.slow
def test_bench_measures_a_file(elsewhere):
    result = CliRunner().invoke(app, ["bench", str(elsewhere), "--rounds", "1", "--seconds", "0", "--json"])
    assert result.exit_code == 0, result.exception
    rows = json.loads(result.stdout)["rows"]
    assert [(row["name"], row["problem"], row["batch"]) for row in rows] == [
        ("float32", "", 8),
        ("mixed_bfloat16", "", 8),
    ]
