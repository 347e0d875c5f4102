"""What `advise` finds again of an earlier call: the same model under other names, and no other model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from keras import layers

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import lower_step
from keras_mp.planner.compile import compiler as compiling
from keras_mp.planner.compile.program_hash import step_hash
from keras_mp.planner.read.asked import Asked

WIDTH = 16


class Block(layers.Layer):
    """A layer of a user's own, whose sublayers get automatic names."""

    def __init__(self, rate=0.1, epsilon=1e-3, activation="gelu", **arguments):
        super().__init__(**arguments)
        self.norm = layers.LayerNormalization(epsilon=epsilon)
        self.dense, self.dropout = layers.Dense(WIDTH, activation), layers.Dropout(rate)

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x, training=False):
        return x + self.dropout(self.dense(self.norm(x)), training=training)


class ScaledBlock(Block):
    """The same program but for a constant."""

    def call(self, x, training=False):
        return super().call(x, training=training) * 0.5


class SameBlock(Block):
    """The same program, of another class: what measures make of it may differ."""


def build(block=Block, loss="mse", optimizer=None, head=None, **arguments):
    inputs = keras.Input((WIDTH,))
    x = block(**arguments)(inputs)
    model = keras.Model(inputs, layers.Dense(4, dtype=head)(layers.Dense(4, name="before")(x)))
    model.compile(optimizer or keras.optimizers.Adam(1e-3), loss)
    return model


BATCH = keras.KerasTensor((8, WIDTH)), keras.KerasTensor((8, 4))


def hash_of(batch=BATCH, **arguments):
    """By which the compiled step of a model in bfloat16 is kept."""
    with keras_mp.set_global_policy("mixed_bfloat16"):
        return step_hash(lower_step(build(**arguments), batch, training=True, chip=TracedChip("gpu")))


OTHERS = {
    "dropout": {"rate": 0.2},
    "epsilon": {"epsilon": 1e-5},
    "activation": {"activation": "relu"},
    "optimizer": {"optimizer": lambda: keras.optimizers.Nadam(1e-3)},
    "loss": {"loss": "mae"},
    "class": {"block": SameBlock},
    "constant": {"block": ScaledBlock},
    "precision of one layer": {"head": "float32"},
}


@pytest.mark.slow
def test_models_that_differ_in_one_thing_do_not_share():
    hashes = [hash_of()]
    for difference in OTHERS.values():
        made = {name: value() if name == "optimizer" else value for name, value in difference.items()}
        hashes.append(hash_of(**made))
    hashes.append(hash_of(tuple(keras.KerasTensor((16, *one.shape[1:])) for one in BATCH)))
    assert len(set(hashes)) == len(OTHERS) + 2


def test_a_model_that_is_built_again_and_another_learning_rate_are_the_same_step():
    assert hash_of() == hash_of() == hash_of(optimizer=keras.optimizers.Adam(1e-2))


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """In place of compilers: a list of the targets that they were given."""
    targets = []

    def run(folder, target):
        targets.append(target.name)
        sizes = dict.fromkeys(("argument", "output", "alias", "temp", "generated_code"), 100)
        (folder / "memory.json").write_text(json.dumps(sizes))
        (folder / "compiled.hlo").write_text("ENTRY %main () -> f32[] {\n  ROOT %one = f32[] constant(1)\n}\n")
        (folder / json.loads((folder / "target.json").read_text())["asked"]).write_text(Asked().text())

    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_run", run)
    return targets


def test_a_second_call_compiles_nothing(compiled):
    models = build(), build(), build(epsilon=1e-5)
    reports = [keras_mp.advise(model, BATCH, ["h100"], verbose=False) for model in models]
    assert compiled == ["h100", "h100"]
    assert [(report.compiles, report.kept) for report in reports] == [(1, 0), (1, 1), (1, 0)]


def test_what_inspect_compiled_is_not_compiled_again(compiled):
    with keras_mp.set_global_policy("mixed_bfloat16"):
        model = build()
    there = keras_mp.inspect(model, BATCH, "h100")
    report = keras_mp.advise(model, BATCH, ["h100"], verbose=False)
    assert compiled == ["h100"] and (report.compiles, report.kept) == (1, 1)
    assert report["h100"].report.to_dict() == there.to_dict()


PROGRAM = """
import json
import test_kept_figures as shared
import keras_mp
from keras_mp.rebuild.walk import layers_by_path
model = shared.build()
report = keras_mp.advise(model, shared.BATCH, ["h100"], verbose=False)
layers = {buffer.layer for buffer in report["h100"].memory.largest} - {"unattributed"}
print(json.dumps([keras_mp.__file__, report.compiles, report.kept, layers <= {*layers_by_path(model), model.name}]))
"""


@pytest.mark.slow
def test_an_edit_of_the_kit_compiles_nothing_again(tmp_path, monkeypatch):
    """In a new process, with a comment more in each file of a room that no step is made by."""
    shutil.copytree(Path(keras_mp.__file__).parent, tmp_path / "keras_mp")
    for file in (tmp_path / "keras_mp" / "export").glob("*.py"):
        file.write_text(f"{file.read_text()}\n# edited\n")
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (tmp_path, here, *here.parents[:3])))
    environment = os.environ | {"KERAS_MP_CACHE": str(tmp_path / "cache"), "PYTHONPATH": paths}
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path / "cache"))
    build()  # automatic names go on from here, and begin again in the new process
    first = keras_mp.advise(build(), BATCH, ["h100"], verbose=False)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    file, compiles, kept, named = json.loads(done.stdout)
    assert Path(file).is_relative_to(tmp_path) and named
    assert (first.compiles, first.kept, compiles, kept) == (1, 0, 1, 1)
