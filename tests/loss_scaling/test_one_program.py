"""An update as one program on a CPU: the same weights and slots as of TensorFlow's kernels."""

import contextlib
import copy

import keras
import numpy as np
import pytest
from jitted_programs import jitted, jitted_in_step, with_islands
from thirds import thirds

import keras_mp

if keras.backend.backend() != "tensorflow":
    pytest.skip("a step on JAX is one program", allow_module_level=True)

import tensorflow as tf

SHAPES = [(40, 30), (30,), (3, 3, 4, 5), ()]
SLOW = "Adadelta Adafactor Adagrad Adam Adamax Ftrl Lamb Lion Nadam RMSprop".split()
SETTINGS = {
    "clip all, accumulation": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1, gradient_accumulation_steps=2),
    "momentum, decay, averages": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, weight_decay=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
}


def variables_of(dtype="float32"):
    rng = np.random.default_rng(3)
    return [keras.Variable(rng.normal(size=shape), dtype=dtype) for shape in SHAPES]


def stepper(optimizer, variables, islands):
    """A traced step, and the names of its jitted programs."""

    @tf.function(autograph=False)
    def step(*grads):
        optimizer.apply(list(grads), variables)

    specs = [tf.TensorSpec(variable.shape, tf.float32) for variable in variables]
    with with_islands(islands):
        return step, jitted(step.get_concrete_function(*specs))


def train(make, islands, wrap, steps=6, dtype="float32"):
    variables = variables_of(dtype)
    optimizer = wrap(make())
    optimizer.build(variables)
    step, programs = stepper(optimizer, variables, islands)
    assert bool(programs) == islands
    rng = np.random.default_rng(5)
    for _ in range(steps):
        step(*(tf.constant(rng.normal(size=shape), tf.float32) for shape in SHAPES))
    return [np.asarray(variable.numpy(), "float64") for variable in (*variables, *optimizer.variables)]


def agree(one, other, tolerance):
    for left, right in zip(one, other, strict=True):
        largest = np.abs(right).max(initial=1e-6)
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * largest)


def no_scale(optimizer):
    return keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none())


def scaled(optimizer):
    return keras_mp.LossScaleOptimizer(optimizer, initial_scale=4.0)


def as_it_is(optimizer):
    """As `wrap_optimizer` returns an optimizer that needs no wrapper."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    same = keras_mp.loss_scaling.wrap_optimizer(optimizer, model)
    assert same is optimizer
    return same


QUICK = [("AdamW", scaled), ("SGD", as_it_is), ("Muon", no_scale)]


@pytest.mark.parametrize("name, wrap", [*QUICK, *thirds((name, no_scale) for name in SLOW)])
def test_every_optimizer_of_keras(name, wrap):
    make = getattr(keras.optimizers, name)
    one, other = (train(lambda: make(0.01), islands, wrap=wrap) for islands in (True, False))
    # Within a program a product is not rounded before it is added. Newton's iterations of Muon carry that on.
    agree(one, other, 1e-4 if name == "Muon" else 2e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting(name):
    one, other = (train(SETTINGS[name], islands, wrap=no_scale) for islands in (True, False))
    agree(one, other, 2e-6)


def test_slots_in_fewer_bits_and_weights_in_bfloat16():
    def wrap(optimizer):
        return keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none(), state_dtype="float8")

    results = [train(lambda: keras.optimizers.Adam(0.01), islands, wrap, 4, "bfloat16") for islands in (True, False)]
    # Stochastic rounding takes the other neighbour of few values whose last bit differs.
    for one, other in zip(*results, strict=True):
        differ = np.abs(one - other) > 2e-6 * np.abs(other).max()
        assert differ.mean() <= 0.02
        np.testing.assert_allclose(one, other, rtol=2.0**-3, atol=1e-6)


def step_in_16_bits(values, dtype, islands):
    """A step of a weight whose gradient is cast from 16 bits and of one whose is not; what the jitted programs take."""
    weights = [keras.Variable(np.ones(len(values))) for _ in range(2)]
    optimizer = as_it_is(keras.optimizers.SGD(0.5))
    optimizer.build(weights)

    @tf.function(autograph=False)
    def step(gradient):
        optimizer.apply([tf.cast(gradient, tf.float32), tf.constant(values, tf.float32)], weights)

    with with_islands(islands):
        concrete = step.get_concrete_function(tf.TensorSpec(len(values), dtype))
        step(tf.constant(values, dtype))
    library = {function.signature.name: function for function in concrete.graph.as_graph_def().library.function}
    programs = [library[name].signature for name in jitted(concrete)]
    taken = [tf.as_dtype(argument.type).name for program in programs for argument in program.input_arg]
    return [weight.numpy() for weight in weights], taken


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gradient_in_16_bits_is_cast_within(dtype):
    # The largest float16, its smallest subnormal, and what is not a number are cast as outside.
    values = np.array([65504.0, 2.0**-24, 0.0, -1.5, np.inf, np.nan])
    (one, taken), (other, none) = (step_in_16_bits(values, dtype, islands) for islands in (True, False))
    assert taken[:2] == [dtype, "float32"] and not none
    np.testing.assert_array_equal(one, other)


def test_adamw_beside_float64():
    weights = [variable.numpy().astype("float64") for variable in variables_of()]
    rng = np.random.default_rng(5)
    first, second = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step in range(1, 7):
        for place, shape in enumerate(SHAPES):
            gradient = rng.normal(size=shape).astype("float32").astype("float64")
            weights[place] = weights[place] * (1 - 0.01 * 0.004)
            first[place] = 0.9 * first[place] + 0.1 * gradient
            second[place] = 0.999 * second[place] + 0.001 * gradient**2
            rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            weights[place] = weights[place] - rate * first[place] / (np.sqrt(second[place]) + 1e-7)
    trained = train(lambda: keras.optimizers.AdamW(0.01), True, wrap=as_it_is)
    agree(trained[: len(SHAPES)], weights, 2e-6)


def embedding_step(optimizer, islands):
    """One step of a model whose table gets a sparse gradient, and its jitted programs."""
    table, dense = keras.Variable(np.ones((6, 2))), keras.Variable(np.ones((2, 1)))
    optimizer.build([table, dense])

    @tf.function(autograph=False)
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, rows) @ dense.value)
        optimizer.apply(tape.gradient(loss, [table.value, dense.value]), [table, dense])

    rows = tf.constant([1, 3, 3])
    with with_islands(islands):
        programs = jitted(step.get_concrete_function(rows))
        step(rows)
    return [table.numpy(), dense.numpy()], programs


def test_a_sparse_gradient_becomes_dense_first():
    (one, programs), (other, none) = (
        embedding_step(no_scale(keras.optimizers.SGD(0.1, momentum=0.9)), islands) for islands in (True, False)
    )
    assert programs and not none
    agree(one, other, 2e-6)


def test_plain_sgd_keeps_a_gradient_sparse():
    # Dense, it would write the whole table for a few rows.
    (table, _), programs = embedding_step(no_scale(keras.optimizers.SGD(0.1)), True)
    assert not programs
    np.testing.assert_allclose(table, 1 - 0.1 * np.array([0, 1, 0, 2, 0, 0])[:, np.newaxis] * np.ones((1, 2)))


def test_an_own_optimizer_gets_a_sparse_gradient_as_it_is():
    # How an own class treats it is its own; Keras's classes become dense where they would write all rows anyway.
    kinds = []

    class Rows(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            kinds.append(type(gradient).__name__)
            super().update_step(gradient, variable, learning_rate)

    (table, _), programs = embedding_step(no_scale(Rows(0.1, momentum=0.9)), True)
    assert not programs and "IndexedSlices" in kinds
    np.testing.assert_allclose(table, 1 - 0.1 * np.array([0, 1, 0, 2, 0, 0])[:, np.newaxis] * np.ones((1, 2)))


class Printing(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        tf.print("update", output_stream="file:///dev/null")
        super().update_step(gradient, variable, learning_rate)


class Own(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, keras.ops.sign(gradient) * learning_rate)


@pytest.mark.parametrize(("optimizer", "is_program"), [(Printing, False), (Own, True)])
def test_an_optimizer_of_ones_own_is_a_program_where_xla_compiles_it(optimizer, is_program):
    variables = variables_of()
    wrapped = no_scale(optimizer(0.1))
    wrapped.build(variables)
    step, programs = stepper(wrapped, variables, True)
    assert bool(programs) == is_program
    before = variables[0].numpy()
    step(*(tf.ones(shape) for shape in SHAPES))
    np.testing.assert_allclose(variables[0].numpy(), before - 0.1, rtol=1e-6)


def test_an_optimizer_is_saved_as_without():
    optimizer, plain = as_it_is(keras.optimizers.SGD(0.5, name="sgd")), keras.optimizers.SGD(0.5, name="sgd")
    assert keras.saving.serialize_keras_object(optimizer) == keras.saving.serialize_keras_object(plain)
    variable = keras.Variable([1.0])
    twin = copy.deepcopy(optimizer)
    twin.apply([tf.constant([1.0])], [variable])
    assert float(variable[0]) == 0.5 and int(twin.iterations) == 1 and int(optimizer.iterations) == 0


def test_a_prepared_model_has_them_unless_it_is_traced_without():
    programs = []
    for islands in (True, False):
        keras.utils.set_random_seed(0)
        layer = keras.layers.LayerNormalization(dtype="mixed_bfloat16")
        model = keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(1, dtype="mixed_bfloat16")])
        model = keras_mp.prepare(model, "adam", "mse")
        x = np.ones((16, 8), "float32")
        with with_islands(islands):
            programs.append(len(jitted_in_step(model, x, x[:, :1])))
    assert programs == [3, 0]  # a normalization forward and backward, and the update


def test_under_a_strategy_of_one_device_it_is_a_program_too():
    # Even of one, a strategy refuses to sum over its replicas within another program.
    def trained(scope):
        keras.utils.set_random_seed(1)
        with scope:
            model = keras.Sequential([keras.Input((4,)), keras.layers.LayerNormalization(), keras.layers.Dense(2)])
            model = keras_mp.prepare(model, keras.optimizers.AdamW(0.01), "mse")
            model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, verbose=0)
        return model.get_weights()

    ours, alone = trained(keras_mp.parallel.distribute("data", devices=1)), trained(contextlib.nullcontext())
    np.testing.assert_equal(ours, alone)
