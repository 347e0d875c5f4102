"""What `advise` finds again of an earlier call: the same model under other names, and no other model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from keras import layers

import keras_mp
from keras_mp.advice import step as step_module
from keras_mp.advice.figures import Figures
from keras_mp.advice.kept import fingerprint
from keras_mp.xla.lower import lower_step
from keras_mp.xla.memory import Buffer

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
    x = block(**arguments)(block(**arguments)(inputs))
    model = keras.Model(inputs, layers.Dense(4, dtype=head)(layers.Dense(4, name="before")(x)))
    model.compile(optimizer or keras.optimizers.Adam(1e-3), loss)
    return model


BATCH = keras.KerasTensor((8, WIDTH)), keras.KerasTensor((8, 4))


def fingerprint_of(precision="float32", batch=BATCH, **arguments):
    """As `advise` takes it: of the step in float32, and of the model in the precision of the measures."""
    lowered = lower_step(build(**arguments), batch, training=True, platform="cuda")
    with keras_mp.policy_scope(precision):
        return fingerprint(lowered, build(**arguments))


OTHERS = {
    "dropout": {"rate": 0.2},
    "epsilon": {"epsilon": 1e-5},
    "activation": {"activation": "relu"},
    "learning rate": {"optimizer": lambda: keras.optimizers.Adam(1e-2)},
    "optimizer": {"optimizer": lambda: keras.optimizers.Nadam(1e-3)},
    "loss": {"loss": "mae"},
    "class": {"block": SameBlock},
    "constant": {"block": ScaledBlock},
    "precision of one layer": {"head": "float32"},
}


@pytest.mark.slow
def test_models_that_differ_in_one_thing_do_not_share():
    found = [fingerprint_of("mixed_bfloat16")]
    for difference in OTHERS.values():
        made = {name: value() if name == "optimizer" else value for name, value in difference.items()}
        found.append(fingerprint_of("mixed_bfloat16", **made))
    found.append(fingerprint_of("mixed_bfloat16", tuple(keras.KerasTensor((16, *one.shape[1:])) for one in BATCH)))
    assert len(set(found)) == len(OTHERS) + 2


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """In place of a compiler: a list of the layers of the steps that it was given."""
    compiled = []

    def figures(step, *_):
        compiled.append([call.path for call in step.calls])
        largest = Buffer(next(path for path in compiled[-1] if "dense" in path), "temporary", "float32", (8,), 32)
        return Figures(100, 100, temporary=100, peak=300, largest=(largest,))

    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    monkeypatch.setattr(step_module, "report_of", lambda step, *_, **__: step)
    monkeypatch.setattr(step_module, "figures_of", figures)
    return compiled


def test_a_second_call_compiles_nothing_and_names_the_layers_of_its_model(compiler):
    models = build(), build(), build(epsilon=1e-5)
    reports = [keras_mp.advise(model, BATCH, ["h100"], progress=False) for model in models]
    assert len(compiler) == 2
    assert [(report.compiles, report.kept) for report in reports] == [(1, 0), (1, 1), (1, 0)]
    for model, report in zip(models, reports, strict=True):
        named = report["h100"].figures.largest[0].layer
        assert named in {path for path in step_module.layers_by_path(model)}
    first, second, _ = (report["h100"].figures for report in reports)
    assert first.largest[0].layer != second.largest[0].layer and first.peak == second.peak


PROGRAM = """
import json
import test_kept_figures as shared
import keras_mp
report = keras_mp.advise(shared.build, shared.BATCH, ["h100"], progress=False)
print(json.dumps([report.compiles, report.kept]))
"""


@pytest.mark.slow
def test_what_the_real_compiler_made_is_found_again_in_a_new_process(tmp_path, monkeypatch):
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    environment = os.environ | {"KERAS_MP_CACHE": str(tmp_path), "PYTHONPATH": paths}
    monkeypatch.setenv("KERAS_MP_CACHE", str(tmp_path))
    assert keras_mp.advise(build, BATCH, ["h100"], progress=False).kept == 0
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [1, 1]
