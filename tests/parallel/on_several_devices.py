"""Tests on several devices, which need a process of their own; test_distribute.py starts it."""

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
from arrays import numpy, values
from devices import TENSORFLOW, only_jax, only_tensorflow

import keras_mp
from keras_mp.system.packages import installed
from models.gpt import TENSOR_RULES
from recipes.language_model import Config, batches, build

LAYOUTS = [("data", 2)] if TENSORFLOW else [("data", 4), ("data", 8), ("fully_sharded", 8), ("tensor", 4)]
# Each layout once, each precision once; all of both in tests/long.
PARTS = (
    [("float32", LAYOUTS), ("mixed_float16", LAYOUTS)]
    if TENSORFLOW
    else [("float32", LAYOUTS[3:]), ("mixed_bfloat16", LAYOUTS[2:3]), ("mixed_float16", LAYOUTS[:2])]
)
ALL = 2 if TENSORFLOW else 8
OLD_JAX = not TENSORFLOW and installed(["jax"])["jax"].startswith("0.7.")
MODE = {"jit_compile": not TENSORFLOW}
SPLIT = ["data"] if TENSORFLOW else ["data", "fully_sharded"]
LAYOUT_NAMES = SPLIT if TENSORFLOW else [*SPLIT, "tensor"]
CONFIG = Config(sequence_length=32, layers=1, width=64, heads=2, batch_size=16)


def on_each(variable):
    """The value of a variable on each device, in NumPy."""
    if TENSORFLOW:
        return [value.numpy() for value in variable.value.values]
    return [np.asarray(shard.data) for shard in variable.value.addressable_shards]


def scope_of(layout, devices, **arguments):
    if layout is None:
        return contextlib.nullcontext()
    if layout == "tensor":
        arguments["mesh"] = (devices // 2, 2)
    return keras_mp.parallel.distribute(layout, devices, **arguments)


def language_model(policy, layout=None, devices=1, *, steps, accumulate=None, orders=(None,), scale=2.0**15, **options):
    """Trains the recipe's model from one start for each order of the rows: its weights and the loss.

    The batches are the same, whatever the devices and the order.
    """
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    data = batches(CONFIG)
    pairs = [data[index % len(data)] for index in range(steps)]
    x, y = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    found = []
    with scope_of(layout, devices, **options):
        model = keras_mp.stabilize(build(dataclasses.replace(CONFIG, remat=True)))
        inner = keras.optimizers.AdamW(
            1e-3, beta_2=0.95, weight_decay=0.1, global_clipnorm=1.0, gradient_accumulation_steps=accumulate
        )
        kind = keras_mp.LossScale.none() if policy != "mixed_float16" else keras_mp.LossScale(initial_scale=scale)
        optimizer = keras_mp.LossScaleOptimizer(inner, kind)
        model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy(), **MODE)
        optimizer.build(model.trainable_variables)
        start = [(v, numpy(v)) for v in (*model.variables, *optimizer.variables)]
        for order in orders:
            for variable, value in start:
                variable.assign(value)
            rows = np.arange(16 * steps)
            if order is not None:
                rows = np.concatenate([16 * step + order.permutation(16) for step in range(steps)])
            history = model.fit(x[rows], y[rows], batch_size=16 // (accumulate or 1), shuffle=False, verbose=0)
            assert numpy(optimizer.iterations) == steps and numpy(optimizer.skipped_steps) == 0
            found.append((values(model.trainable_variables), history.history["loss"][0]))
    return found if len(orders) > 1 else found[0]


def distance(weights, others):
    """Root mean square of the differences, over all weights."""
    return np.sqrt(np.mean(np.concatenate([np.square(a - b).ravel() for a, b in zip(weights, others, strict=True)])))


def check_language_model(policy, layouts, steps):
    """Compares with one device, twice.

    With one that takes each global batch in the parts that the devices have, as micro-batches: the order of all sums is
    the same. And with one that takes it whole: there the sums have another order, and how much that makes is what one
    device makes of the same batches with their rows in another order.
    """
    (one, loss), (reordered, _) = language_model(policy, steps=steps, orders=(None, np.random.default_rng()))
    noise = distance(one, reordered)
    for layout, devices in layouts:
        weights, own_loss = language_model(policy, layout, devices, steps=steps)
        far = distance(one, weights)
        print(
            f"{policy} {layout} {devices} {steps} steps: from one {far:.2e}, one from itself reordered {noise:.2e}",
            end="",
        )
        np.testing.assert_allclose(own_loss, loss, rtol=1e-5 if policy == "float32" else 1e-3)
        assert far < 4 * noise
        if layout == "data":
            # The gradients of a micro-batch are larger by the number of devices, which float16 would round otherwise.
            parts, _ = language_model(policy, steps=steps, accumulate=devices, scale=2.0**15 / devices)
            equal = np.mean([np.mean(a == b) for a, b in zip(parts, weights, strict=True)])
            print(f", from one in parts {distance(parts, weights):.2e}, {equal:.1%} equal", end="")
            if (TENSORFLOW and policy == "float32") or (OLD_JAX and policy == "mixed_float16"):
                # oneDNN's float32 products depend on how many threads are free. The compiler of jax 0.7 for CPUs sums
                # in float16 in another order in the two programs.
                assert distance(parts, weights) < 4 * noise
            else:
                np.testing.assert_equal(parts, weights)
        print()


@pytest.mark.parametrize(
    "policy, layouts",
    [pytest.param(*part, id=part[0], marks=[pytest.mark.rare] * (place != 1)) for place, part in enumerate(PARTS)],
)
@pytest.mark.slow
def test_language_model_equals_one_device(policy, layouts):
    check_language_model(policy, layouts, steps=8)


def vector_model(inner, loss_scale, **arguments):
    """A model whose loss is the mean of x . w, so that its gradient is the mean of x; w has 16 values, all 1."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((16,)), dense])
    model.compile(keras_mp.LossScaleOptimizer(inner, loss_scale), loss=lambda _, y: y, **MODE, **arguments)
    return model, dense


@pytest.mark.parametrize("layout", SPLIT)
def test_overflow_on_each_device_in_turn_skips_on_all(layout):
    rng = np.random.default_rng()
    x = rng.integers(-8, 8, ((ALL + 1) * ALL, 16)).astype("float32")
    for bad in range(ALL):
        x[bad * ALL + bad, 3] = np.inf  # a batch for each device, and a good one
    with keras_mp.parallel.distribute(layout, ALL):
        model, dense = vector_model(keras.optimizers.SGD(1.0), keras_mp.LossScale(initial_scale=2.0**ALL))
        model.fit(x, np.zeros((len(x), 1), "float32"), batch_size=ALL, shuffle=False, verbose=0)
        optimizer = model.optimizer
    np.testing.assert_array_equal(numpy(dense.kernel)[:, 0], 1 - x[-ALL:].mean(0))
    assert numpy(optimizer.skipped_steps) == ALL and numpy(optimizer.iterations) == 1
    for value in on_each(optimizer.dynamic_scale):
        assert value == 1.0


def test_clipping_accumulation_and_averages():
    """One clip of the mean over micro-batches and devices, by hand; then with averages, as on one device."""
    x = np.random.default_rng().integers(-8, 8, (8 * ALL, 16)).astype("float32")
    averages = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4}

    def trained(layout, rows, **settings):
        rules = {"rules": ((r"kernel", ("model", None)),)} if layout == "tensor" else {}
        with scope_of(layout, ALL, **rules):
            inner = keras.optimizers.SGD(1.0, global_clipnorm=1.0, gradient_accumulation_steps=2, **settings)
            model, dense = vector_model(inner, keras_mp.LossScale.none())
            model.fit(rows, np.zeros((len(rows), 1), "float32"), batch_size=ALL, shuffle=False, verbose=0)
        return numpy(dense.kernel)[:, 0]

    gradient = x[: 2 * ALL].mean(0)
    clipped = gradient / max(1.0, np.linalg.norm(gradient))
    np.testing.assert_allclose(trained("data", x[: 2 * ALL]), 1 - clipped, rtol=1e-5, atol=1e-6)
    alone = trained(None, x, **averages)
    for layout in LAYOUT_NAMES:
        np.testing.assert_allclose(trained(layout, x, **averages), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", SPLIT)
def test_a_last_ragged_batch_counts_by_its_rows(layout):
    rng = np.random.default_rng()
    rows = 2 * ALL + ALL + 1  # a batch of 2 each, and one that the devices cannot divide
    x = rng.integers(-8, 8, (rows, 16)).astype("float32")
    with keras_mp.parallel.distribute(layout, ALL):
        model, dense = vector_model(
            keras.optimizers.SGD(1.0), keras_mp.LossScale.none(), metrics=[lambda _, y: keras.ops.abs(y)]
        )
        history = model.fit(x, np.zeros((rows, 1), "float32"), batch_size=2 * ALL, shuffle=False, verbose=0).history
    first = 1 - x[: 2 * ALL].mean(0)
    np.testing.assert_allclose(numpy(dense.kernel)[:, 0], first - x[2 * ALL :].mean(0), rtol=1e-5, atol=1e-5)
    outputs = np.concatenate([x[: 2 * ALL].sum(1), x[2 * ALL :] @ first])
    np.testing.assert_allclose(history["loss"][0], outputs.mean(), rtol=1e-4, atol=1e-4)
    measured = next(value for name, value in history.items() if name != "loss")[0]
    np.testing.assert_allclose(measured, np.abs(outputs).mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.rare
def test_targets_that_do_not_count_may_be_more_on_one_device():
    rng = np.random.default_rng()
    tokens = rng.integers(1, 32, (2 * ALL, 8))
    targets = rng.integers(1, 32, (2 * ALL, 8))
    targets[: ALL - 1] = 0  # ignored: most of what the first devices have
    found = []
    for layout in (None, "data"):
        keras.utils.set_random_seed(1)
        with scope_of(layout, ALL):
            inputs = keras.Input((8,), dtype="int32")
            logits = keras.layers.Dense(32)(keras.layers.Embedding(32, 16)(inputs))
            model = keras_mp.lean.make_lean(keras.Model(inputs, logits))
            optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), keras_mp.LossScale.none())
            model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy(ignore_class=0), **MODE)
            history = model.fit(tokens, targets, batch_size=2 * ALL, shuffle=False, verbose=0, epochs=2)
            found.append((values(model.trainable_variables), history.history["loss"]))
    for one, several in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_allclose(one, several, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)


@pytest.mark.parametrize("layout", SPLIT)
def test_a_mean_over_what_weights_leave_is_the_mean_of_the_devices_means(layout):
    x, weights = np.random.default_rng().normal(size=(2, ALL)), np.ones((2, ALL))
    weights[1, 0] = 0  # of the first device's two rows
    with keras_mp.parallel.distribute(layout, ALL):
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), dense])
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(1.0), loss, **MODE)
        rows = x.T.reshape(-1, 1)
        model.fit(rows, 0 * rows, sample_weight=weights.T.ravel(), batch_size=2 * ALL, shuffle=False, verbose=0)
    expected = np.mean((2 * x**2 * weights).sum(axis=0) / weights.sum(axis=0))
    np.testing.assert_allclose(1 - numpy(dense.kernel)[0, 0], expected, rtol=1e-4)


@pytest.mark.parametrize("layout", SPLIT)
def test_dropout_masks_differ_by_device_and_by_step(layout):
    """The gradient of w is the mean of what dropout leaves of ones: equal masks would leave only 0 and 2."""
    with keras_mp.parallel.distribute(layout, ALL):
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1024,)), keras.layers.Dropout(0.5), dense])
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1.0), keras_mp.LossScale.none())
        model.compile(optimizer, loss=lambda _, y: y, **MODE)
        ones = np.ones((ALL, 1024), "float32")
        steps = []
        for _ in range(2):
            before = numpy(dense.kernel)
            model.fit(ones, ones[:, :1], batch_size=ALL, verbose=0)
            steps.append(before - numpy(dense.kernel))
    for step in steps:
        between = np.mean((step > 0.01) & (step < 1.99))
        expected = 1 - 2 * 0.5**ALL
        assert abs(between - expected) < 6 * np.sqrt(0.25 / 1024)
    assert np.mean(steps[0] == steps[1]) < 0.6


def test_several_steps_per_execution():
    x = np.random.default_rng().integers(-8, 8, (14 * ALL, 16)).astype("float32")
    y = np.zeros((14 * ALL, 1), "float32")
    with keras_mp.parallel.distribute("data", ALL):
        # 7 steps: 3, 3 and 1
        model, dense = vector_model(keras.optimizers.SGD(1.0), keras_mp.LossScale.none(), steps_per_execution=3)
        loss = model.fit(x, y, batch_size=2 * ALL, shuffle=False, verbose=0).history["loss"][0]
        tested = model.evaluate(x, y, batch_size=2 * ALL, verbose=0)
    assert numpy(model.optimizer.iterations) == 7
    kernel, outputs = np.ones(16), []
    for rows in np.split(x, 7):
        outputs.append(rows @ kernel)
        kernel = kernel - rows.mean(0)
    np.testing.assert_array_equal(numpy(dense.kernel)[:, 0], kernel)
    np.testing.assert_allclose([loss, tested], [np.mean(outputs), np.mean(x @ kernel)], rtol=1e-6, atol=1e-6)


def test_gradients_summed_in_bfloat16():
    """1 and 2**-10 come to 1 in bfloat16, and to their sum in float32."""
    x = np.zeros((ALL, 16), "float32")
    x[0], x[1] = ALL, ALL * 2.0**-10
    with keras_mp.parallel.distribute("data", ALL, reduce_dtype="bfloat16"):
        model, dense = vector_model(keras.optimizers.SGD(1.0), keras_mp.LossScale.none())
        model.fit(x, np.zeros((ALL, 1), "float32"), batch_size=ALL, verbose=0)
    np.testing.assert_array_equal(numpy(dense.kernel), np.zeros((16, 1)))


@only_jax
def test_fully_sharded_state_is_an_eighth():
    keras.config.set_dtype_policy("mixed_bfloat16")
    with keras_mp.parallel.distribute("fully_sharded", 8):
        layers = [keras.layers.Embedding(64, 16), keras.layers.LayerNormalization(), keras.layers.Dense(64)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        model.compile(keras.optimizers.AdamW(1e-3), keras_mp.lean.ChunkedCrossEntropy())
        model.fit(np.zeros((8, 4), "int32"), np.zeros((8, 4), "int32"), batch_size=8, verbose=0)
        variables = [*model.variables, *model.optimizer.variables]
        whole = sum(variable.value.nbytes for variable in variables)
        for device in range(8):
            own = sum(variable.value.addressable_shards[device].data.nbytes for variable in variables)
            print(f"device {device}: {own} of {whole} bytes, {own / whole:.5f}")
            # What is not divided: counters and the learning rate, 4 bytes each.
            assert whole / 8 <= own <= whole / 8 + 64


@only_jax
def test_frozen_weights_moving_statistics_and_remat_when_fully_sharded():
    rng = np.random.default_rng()
    x, y = rng.normal(size=(16, 8)).astype("float32"), rng.normal(size=(16, 1)).astype("float32")
    found = []
    for layout in (None, "fully_sharded"):
        keras.utils.set_random_seed(5)
        with scope_of(layout, 8):
            frozen = keras.layers.Dense(8, trainable=False)
            block = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8)])
            statistics = keras.layers.BatchNormalization()
            inputs = keras.Input((8,))
            hidden = keras_mp.lean.remat(block)(frozen(inputs))
            statistics(hidden)
            model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
            observed = keras.Model(inputs, [model.output, statistics(hidden)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(x, y, batch_size=16, verbose=0, epochs=3)
            del observed
        found.append(values(model.variables))
    for one, sharded in zip(*found, strict=True):
        np.testing.assert_allclose(one, sharded, rtol=1e-5, atol=1e-6)


def values_of(model):
    return values([*model.variables, *model.optimizer.variables])


@pytest.mark.slow
def test_a_checkpoint_of_each_layout_loads_into_another(tmp_path):
    """Trained on one device, and passed from layout to layout in files."""
    layouts = LAYOUTS if TENSORFLOW else [("data", 4), ("fully_sharded", 8), ("tensor", 4)]
    x, y = batches(CONFIG)[0]
    model, file = build(CONFIG), tmp_path / "model.keras"
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(1e-3))
    model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy(), **MODE)
    model.fit(x, y, batch_size=16, verbose=0)
    model.save(file)
    saved, logits = values_of(model), model.predict(x, verbose=0)
    for layout, devices in [*layouts, (None, 1)]:
        # No builder is called before the file is loaded.
        with scope_of(layout, devices, **({"rules": TENSOR_RULES} if layout == "tensor" else {})):
            model = keras.saving.load_model(file)
            np.testing.assert_equal(values_of(model), saved)
            np.testing.assert_allclose(model.predict(x, verbose=0), logits, rtol=1e-4, atol=1e-5)
            model.save(file)


def test_a_batch_that_the_devices_cannot_divide():
    x = np.zeros((4 * ALL, 16), "float32")
    with keras_mp.parallel.distribute("data", ALL):
        model, _ = vector_model(keras.optimizers.SGD(1.0), keras_mp.LossScale.none())
        with pytest.raises(ValueError, match=f"a batch of {ALL + 1} rows cannot be divided by {ALL} devices"):
            model.fit(x, x[:, :1], batch_size=ALL + 1, verbose=0)
        with pytest.raises(ValueError, match=f"a batch of {ALL + 1} rows cannot be divided by {ALL} devices"):
            model.evaluate(x, x[:, :1], batch_size=ALL + 1, verbose=0)


@only_tensorflow
def test_a_loop_of_ones_own_reduces_numbers_and_arrays_of_unknown_rank():
    import tensorflow as tf

    with keras_mp.parallel.distribute("data"):
        strategy = tf.distribute.get_strategy()

        @tf.function(input_signature=[tf.TensorSpec(None)])
        def total(x):
            return strategy.reduce("SUM", strategy.run(lambda: 2.0 * x), axis=None)

        assert strategy.reduce("MEAN", 2.0, axis=None) == 2.0
        assert total(np.ones(3, "float32")).numpy().tolist() == [4.0] * 3


@only_tensorflow  # on JAX each device has as many rows
def test_predict_takes_a_batch_that_the_replicas_cannot_divide():
    x = np.random.default_rng().integers(-8, 8, (2 * ALL + 1, 16)).astype("float32")
    with keras_mp.parallel.distribute("data", ALL):
        model, _ = vector_model(keras.optimizers.SGD(1.0), keras_mp.LossScale.none())
        answers = model.predict(x, batch_size=ALL + 1, verbose=0)
    np.testing.assert_array_equal(answers[:, 0], x.sum(1))  # the kernel is of ones


def split_over(variable):
    """How many devices have a part of a variable, and not all of it."""
    whole = np.prod(variable.shape)
    return whole // np.prod(variable.value.addressable_shards[0].data.shape)


@only_jax
def test_tensor_rules_of_a_builder_of_ones_own():
    @keras_mp.parallel.tensor_rules(((r"hidden[/_]kernel", (None, "model")),))
    def build_own():
        return keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, name="hidden"), keras.layers.Dense(1)])

    x = np.random.default_rng().normal(size=(8, 16)).astype("float32")
    predicted = {}
    for layout in (None, "tensor"):
        keras.utils.set_random_seed(1)
        with scope_of(layout, 4):
            model = build_own()
            predicted[layout] = model.predict(x, verbose=0)
            assert split_over(model.layers[0].kernel) == (2 if layout else 1)
    np.testing.assert_allclose(predicted["tensor"], predicted[None], rtol=1e-5, atol=1e-6)
    # What its caller gives counts instead.
    with keras_mp.parallel.distribute("tensor", 4, rules=((r"dense\w*[/_]kernel", ("model", None)),)):
        model = build_own()
        assert [split_over(layer.kernel) for layer in model.layers] == [1, 4]


@only_jax
def test_a_mesh_that_does_not_divide_a_weight_and_rules_that_match_nothing():
    with keras_mp.parallel.distribute("tensor", 3, mesh=(1, 3)):
        with pytest.raises(ValueError, match=r"splits .*over 3 devices, which do not divide 256"):
            build(CONFIG)
    with keras_mp.parallel.distribute("tensor", 4, rules=((r"no_such_layer", ("model",)),)):
        model, _ = vector_model(keras.optimizers.SGD(1.0), keras_mp.LossScale.none())
        with pytest.raises(ValueError, match="splits no weight of this model: none has .* 'no_such_layer' in its path"):
            model.fit(np.zeros((4, 16)), np.zeros((4, 1)), verbose=0)


@only_tensorflow  # on JAX every step is jitted
def test_tensorflow_says_that_it_cannot_jit():
    with keras_mp.parallel.distribute("data", 2):
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
        model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.SGD()), "mse", jit_compile=True)
        with pytest.raises(ValueError, match="compile with jit_compile=False"):
            model.fit(np.zeros((4, 16)), np.zeros((4, 1)), verbose=0)


@pytest.mark.parametrize("layout", SPLIT)
def test_fp8_scales_agree_on_all_devices(layout):
    """Delayed scaling: the history is the largest over the devices, and the same on all."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    rng = np.random.default_rng()
    x = rng.normal(size=(4 * ALL, 32)).astype("float32")
    x[0] *= 64  # the largest is on the first device
    with keras_mp.parallel.distribute(layout, ALL):
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16, name="hidden")])
        model = keras_mp.convert(model, "delayed", select=lambda path, layer: True)
        model.compile(keras_mp.LossScaleOptimizer(keras.optimizers.SGD(1e-3), keras_mp.LossScale.none()), "mse", **MODE)
        model.fit(x, x[:, :16], batch_size=4 * ALL, verbose=0, epochs=2)
        slots = model.get_layer("hidden").amax_history.slots
    history = numpy(slots).max(0)
    # The layer sees x as bfloat16 rounds it.
    np.testing.assert_allclose(history[0, 1], np.abs(x).max(), rtol=2.0**-8)
    if layout == "data":
        for value in on_each(slots):
            np.testing.assert_array_equal(value, numpy(slots))


@only_jax
@pytest.mark.parametrize(
    "layouts, memory", [([("fully_sharded", 8), ("tensor", 4)], "device"), ([("fully_sharded", 8)], "host")]
)
def test_small_states_are_split_as_their_weight_and_have_the_same_bits(layouts, memory):
    keras.config.set_dtype_policy("float32")
    # Integers, whose products and sums are exact in any order.
    x, y = np.random.default_rng().integers(-8, 9, (2, 24, 64)).astype("float32")

    def stored(layout, devices):
        with scope_of(layout, devices, **({"rules": (("kernel", (None, "model")),)} if layout == "tensor" else {})):
            dense = keras.layers.Dense(64, use_bias=False, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((64,)), dense])
            inner = keras.optimizers.Adam(0.01)
            optimizer = keras_mp.LossScaleOptimizer(
                inner,
                keras_mp.LossScale.none(),
                release_gradients=memory == "host",
                state_dtype="float8",  # whole copies: tests/loss_scaling/on_replicas.py
                state_memory=memory if layout else "device",
            )
            model.compile(optimizer, lambda y, out: keras.ops.sum(y * out, axis=-1), **MODE)
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        if layout and memory == "host":
            assert inner._velocities[0].values.value.sharding.memory_kind == "pinned_host"
        slot = inner._velocities[0]
        for variable in slot.variables if layout else ():
            assert on_each(dense.kernel)[0].size == 64 * 64 // (devices if layout == "fully_sharded" else 2)
            whole = int(np.prod(variable.shape))
            parts = devices if layout == "fully_sharded" else 2 if variable is slot.values else 1
            assert on_each(variable)[0].size == whole // parts
        return [
            numpy(variable).tobytes() for variable in [dense.kernel, *inner._momentums[0].variables, *slot.variables]
        ]

    one = stored(None, 1)
    for layout, devices in layouts:
        assert stored(layout, devices) == one


@pytest.mark.slow
def test_bfloat16_weights_are_rounded_alike_on_one_and_several_devices():
    draw = np.random.default_rng()
    x = draw.integers(-2, 3, (4 * 16, 16)).astype("float32")  # all sums of gradients are exact
    start = draw.normal(size=(16, 64))

    def trained(layout=None, devices=1):
        keras.config.set_dtype_policy("bfloat16")
        with scope_of(layout, devices):
            dense = keras.layers.Dense(64, use_bias=False)
            model = keras.Sequential([keras.Input((16,)), dense])
            dense.kernel.assign(start)
            optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(1e-3), keras_mp.LossScale.none())
            model.compile(optimizer, loss=lambda _, y: keras.ops.cast(y, "float32"), **MODE)
            model.fit(x, np.zeros((len(x), 64), "float32"), batch_size=16, shuffle=False, verbose=0)
        assert numpy(optimizer.iterations) == 4
        return numpy(keras.ops.cast(dense.kernel, "float32"))

    alone = trained()
    assert (alone != numpy(keras.ops.cast(keras.ops.cast(start, "bfloat16"), "float32"))).mean() > 0.05
    for layout in SPLIT:
        np.testing.assert_array_equal(trained(layout, 2), alone)


@only_jax
@pytest.mark.parametrize("heads", [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.rare]), 2])
def test_the_kernel_of_a_tpu_attends_on_each_device_to_its_rows_and_heads(heads):
    """By Keras's own distributions, whose step XLA divides."""
    from benchmarks.tpu_attention import on_a_tpu

    rng = np.random.default_rng()
    x, y = (rng.normal(size=(8, 128, width)).astype("float32") for width in (16, 2))
    padding = rng.random((8, 128)) < 0.7

    def trained(scope, device):
        with scope, device as given:
            keras.utils.set_random_seed(1)
            inputs, mask = keras.Input((128, 16)), keras.Input((128,), dtype="bool")
            hidden = keras.layers.MultiHeadAttention(4, 8)(inputs, inputs, key_mask=mask, use_causal_mask=True)
            hidden = keras.layers.GroupQueryAttention(8, 4, 2)(hidden, hidden)
            model = keras_mp.stabilize(keras.Model([inputs, mask], keras.layers.Dense(2)(hidden)))
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
            model.fit([x, padding], y, batch_size=4, shuffle=False, verbose=0)
            return [*values(model.weights), model.predict([x, padding], batch_size=4, verbose=0)], given

    distribution = keras.distribution
    mesh = distribution.DeviceMesh((2, heads), ["rows", "heads"], [f"cpu:{index}" for index in range(2 * heads)])
    rules = distribution.LayoutMap(mesh)
    rules["(query|key|value)/kernel"] = (None, "heads", None)
    scope = distribution.ModelParallel(layout_map=rules, batch_dim_name="rows", auto_shard_dataset=False).scope()
    expected, _ = trained(contextlib.nullcontext(), contextlib.nullcontext())
    found, given = trained(scope, on_a_tpu())
    assert set(given) == {"LocalMask(None, 0)", "FullMask"}
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
