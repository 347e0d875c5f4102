"""Where a lean model is lean: in its training step, whatever phase its layers are told; never in inference."""

import keras
import numpy as np
import own_blocks
import pytest
from keras import layers
from same_step import assert_same_step, compiled, lean_of, step
from test_lean_families import blocks, data

pytestmark = pytest.mark.slow


def test_inference_runs_the_layers_own_code(recomputed):
    model = lean_of(compiled(own_blocks.mini_gpt(blocks=2), run_eagerly=own_blocks.EAGERLY), remat=True)
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


@pytest.mark.parametrize(
    "build", [pytest.param(lambda: called(Quiet()), marks=pytest.mark.jax), lambda: called(OwnStep(2)), tuned]
)
def test_layers_that_are_not_told_to_train_recompute_in_a_training_step(build, recomputed, one_mask):
    model = compiled(build(), run_eagerly=own_blocks.EAGERLY)
    ours = lean_of(model, remat=True)
    x, y = data(model, np.random.default_rng())
    made = step(ours, x, y)
    assert len(blocks(ours)) > 1 and recomputed and len(recomputed) % len(blocks(ours)) == 0
    assert_same_step(made, step(model, x, y), least=1.0)  # some are zero but for rounding, as of the bias of keys
