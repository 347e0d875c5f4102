"""Where a lean model is lean: in its training step, whatever phase its layers are told; never in inference."""

import keras
import numpy as np
import own_blocks
import pytest
from keras import layers
from test_lean_families import assert_same_step, blocks, compiled, data, recomputing, step
from twins import twin

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import lower_step
from keras_mp.planner.read.program import read_module

pytestmark = pytest.mark.slow
TOKENS = keras.KerasTensor((4, own_blocks.LENGTH), "int32")


def barriers(model, training):
    """How many barriers a step's program has; each recomputation of a block begins behind one."""
    lowered = lower_step(model, (TOKENS, TOKENS) if training else TOKENS, training=training, chip=TracedChip("cpu"))
    return str(read_module(lowered.module)).count("stablehlo.optimization_barrier")


def test_the_program_of_a_model_without_the_argument_training_recomputes():
    model = compiled(own_blocks.nested())
    plain, ours = keras_mp.lean.make_lean(twin(model)), recomputing(model)
    assert barriers(ours, training=True) >= barriers(plain, training=True) + 3
    assert barriers(ours, training=False) == 0


def test_inference_runs_the_layers_own_code(recomputed):
    model = recomputing(compiled(own_blocks.mini_gpt(blocks=2), run_eagerly=own_blocks.EAGERLY))
    x, y = data(model, np.random.default_rng())
    model.predict_on_batch(x), model.test_on_batch(x, y), model(x)
    assert not recomputed
    model.train_on_batch(x, y)
    assert recomputed


@keras.saving.register_keras_serializable("test_lean_phases")
class Quiet(keras.Model):
    """Takes `training` and does not pass it on: on JAX, Keras tells its layers nothing then."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.embeddings, self.head = own_blocks.Embeddings(), layers.Dense(own_blocks.VOCABULARY)
        self.blocks = [own_blocks.TransformerBlock(rate=0.0, name=f"block_{index}") for index in range(2)]

    def call(self, tokens, training=None):
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@keras.saving.register_keras_serializable("test_lean_phases")
class OwnStep(own_blocks.MiniGpt):
    """Has a training step of its own, in which it takes gradients in the phase of inference."""

    def train_step(self, *arguments):
        return super().train_step(*arguments)


def called(model):
    model(keras.ops.zeros((1, own_blocks.LENGTH), "int32"))
    return model


def tuned():
    """A base that is called with `training=False`, as in Keras's guide to fine-tuning; in a step Keras says True."""
    base = own_blocks.vit(blocks=2, rate=0.5)
    images = keras.Input(base.input_shape[1:])
    return keras.Model(images, layers.Dense(4)(base(images, training=False)))


@pytest.mark.jax
@pytest.mark.parametrize("build", [lambda: called(Quiet()), lambda: called(OwnStep(2)), tuned])
def test_layers_that_are_not_told_to_train_recompute_in_a_training_step(build, recomputed, one_mask):
    model = compiled(build(), run_eagerly=own_blocks.EAGERLY)
    ours = recomputing(model)
    x, y = data(model, np.random.default_rng())
    made = step(ours, x, y)
    assert len(blocks(ours)) > 1 and recomputed and len(recomputed) % len(blocks(ours)) == 0
    assert_same_step(made, step(model, x, y))


def test_what_takes_gradients_beside_a_training_step_says_training():
    """A loop of one's own: `training=True` makes the layers lean, and the result is the same without it."""
    model = own_blocks.vit(rate=0.0)
    ours = recomputing(model)
    x, _ = data(model, np.random.default_rng())
    for training in (True, False):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(ours(x, training=training)),
            keras.ops.convert_to_numpy(model(x, training=training)),
            rtol=1e-5, atol=1e-6,
        )  # fmt: skip
