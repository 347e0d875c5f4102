"""How many batch sizes the islands of a prepared model are compiled for."""

import keras
import numpy as np
import pytest
from jitted_programs import jitted, with_islands

import keras_mp
from keras_mp.lean.gelu import gelu

if keras.backend.backend() != "tensorflow":
    pytest.skip("JAX has no graph that is not jitted", allow_module_level=True)

import tensorflow as tf

from keras_mp.backend.tensorflow import tensors as programs
from keras_mp.lean import _tensorflow_step as module


def network():
    layers = [keras.layers.Dense(8, "gelu"), keras.layers.LayerNormalization(), keras.layers.RMSNormalization()]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])


def batches_of(sizes):
    rng = np.random.default_rng()
    return [tuple(rng.normal(size=(size, width)).astype("float32") for width in (6, 2)) for size in sizes]


def trained(batches, weights):
    """A prepared model after a step on each batch, and the losses."""
    model = keras_mp.prepare(network(), keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.set_weights(weights)
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=tuple(tf.TensorSpec((None, width), tf.float32) for width in (6, 2))
    )
    losses = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    model.fit(data, verbose=0, callbacks=[callback])
    return model, losses


@pytest.fixture
def ran(monkeypatch):
    """The batch size of each call that ran as a program."""
    sizes = []
    own = programs._jitted

    def counting(function):
        def program(*arguments, **settings):
            tf.numpy_function(lambda size: sizes.append(int(size)), [tf.shape(arguments[0])[0]], [])
            return own(function)(*arguments, **settings)

        return program

    monkeypatch.setattr(programs, "_jitted", counting)
    programs._jitted_if.cache_clear()
    yield sizes
    programs._jitted_if.cache_clear()


# Programs of a step: GELU forward and backward, and in 16 bits the normalizations.
@pytest.mark.parametrize(
    ("policy", "programs_of_a_step"),
    [pytest.param("float32", 2, marks=pytest.mark.slow), ("mixed_bfloat16", 6)],
)
def test_programs_run_for_the_first_sizes_and_kernels_compute_what_they_do(
    policy, programs_of_a_step, ran, monkeypatch
):
    keras_mp.set_global_policy(policy)
    monkeypatch.setattr(module.BatchSizes.__init__, "__defaults__", (2,))
    sizes = [4, 5, 4, 6, 5, 1, 4]
    weights, batches = network().get_weights(), batches_of(sizes)
    model, losses = trained(batches, weights)
    assert sorted(ran) == sorted([size for size in sizes if size in (4, 5)] * programs_of_a_step)
    if policy == "float32":  # in 16 bits: test_row_normalization.py
        with with_islands(False):
            other, expected = trained(batches, weights)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_the_sizes_of_all_inputs_count_together():
    counted = module.BatchSizes(2)
    spec = tf.TensorSpec((None, 3), tf.float32)

    @tf.function(input_signature=[spec, spec], autograph=False)
    def step(nodes, edges):
        with counted.of_step({"nodes": nodes, "edges": edges, "graph": tf.zeros(())}):
            return programs._condition.get()

    pairs = [(1, 2), (2, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1)]
    compiles = [bool(step(tf.zeros((nodes, 3)), tf.zeros((edges, 3)))) for nodes, edges in pairs]
    assert compiles == [True, True, False, True, True, False, False]


def test_a_new_step_of_the_model_goes_on_counting_and_another_model_counts_anew(ran, monkeypatch):
    monkeypatch.setattr(module.BatchSizes.__init__, "__defaults__", (2,))
    weights = network().get_weights()
    model, _ = trained(batches_of([3, 4]), weights)
    before = len(ran)
    model.make_train_function(force=True)
    model.fit(*batches_of([5])[0], verbose=0)
    model.fit(*batches_of([7])[0], batch_size=4, verbose=0)  # 4 and 3, which are compiled
    after = len(ran)
    assert after - before == 4  # GELU and its gradient
    trained(batches_of([5]), weights)
    assert len(ran) - after == 2


def test_lean_gelu_of_an_unknown_length_is_not_compiled():
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = gelu(x)
        return tape.gradient(y, x)

    for shape, expected in (((None, None, 4), 0), ((None, 4), 2)):
        spec = tf.TensorSpec(shape, tf.bfloat16)
        assert len(jitted(tf.function(step, [spec], autograph=False))) == expected
