"""Optimizer states in 8 and 16 bits: what is stored, that it moves, and that all else of a step is as before."""

import keras
import numpy as np
import pytest
from thirds import thirds
from twins import twin

import keras_mp
from keras_mp.optimizer import inner_optimizer
from keras_mp.optimizer.inner_build import is_small
from keras_mp.optimizer.state_slot import StateSlot
from keras_mp.optimizer.stochastic_rounding import random_bits

TENSORFLOW = keras.backend.backend() == "tensorflow"
SHAPE = (64, 128)
SMALLEST_NORMAL = 2.0**-6  # of E4M3; below it steps are 2**-9
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(1e-2),
    "amsgrad": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(1e-2),
    "Nadam": lambda: keras.optimizers.Nadam(1e-2),
    "Adamax": lambda: keras.optimizers.Adamax(1e-2),
    "SGD": lambda: keras.optimizers.SGD(1e-2, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.9),
    "centered": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Ftrl": lambda: keras.optimizers.Ftrl(1e-2),
    "Lamb": lambda: keras.optimizers.Lamb(1e-2),
    "Lion": lambda: keras.optimizers.Lion(1e-3),
    "Muon": lambda: keras.optimizers.Muon(1e-2),
    "Adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(1e-2),
}


def wrapped(inner, state_dtype="float8", **settings):
    return keras_mp.LossScaleOptimizer(inner, keras_mp.LossScale.none(), state_dtype=state_dtype, **settings)


def weights_of(*shapes, seed=5, dtype="float32"):
    generator = np.random.default_rng(seed)
    return [
        keras.Variable(generator.normal(size=shape).astype("float32"), dtype=dtype, name=f"w{place}")
        for place, shape in enumerate(shapes)
    ]


def make_steps(optimizer, weights, gradients):
    optimizer.build(weights)
    for step in gradients:
        optimizer.apply([gradient if gradient is None else keras.ops.convert_to_tensor(gradient) for gradient in step])
    return [np.asarray(keras.ops.convert_to_numpy(weight)) for weight in weights]


def gradients_of(weights, steps):
    generator = np.random.default_rng()
    spread = [np.exp(generator.normal(size=weight.shape)) for weight in weights]
    return [[(generator.normal(size=s.shape) * s).astype("float32") for s in spread] for _ in range(steps)]


def slots_of(optimizer):
    leaves = inner_optimizer.leaves(optimizer.inner_optimizer)
    return [slot for leaf in leaves for slots in leaf._keras_mp_state_slots for slot in slots]


def bits_of(variables):
    return [np.asarray(keras.ops.convert_to_numpy(variable)).tobytes() for variable in variables]


# Those stored in fewer bits; of those with a star the square root.
SMALL_SLOTS = {
    "Adamax": "momentum norm",
    "RMSprop": "velocity* momentum",
    "centered": "momentum",
    "Adagrad": "accumulator*",
    "Adadelta": "accumulated_grad* accumulated_delta_var*",
    "Ftrl": "accumulator*",
    "amsgrad": "momentum velocity* velocity_hat*",
    **dict.fromkeys(["Adam", "AdamW", "Nadam", "Lamb"], "momentum velocity*"),
    **dict.fromkeys(["SGD", "nesterov", "Lion", "Muon"], "momentum"),
    **dict.fromkeys(["Adafactor", "ScheduleFreeAdamW"], "velocity*"),
}


def test_what_each_optimizer_stores_in_fewer_bits():
    assert SMALL_SLOTS.keys() == OPTIMIZERS.keys()
    for name, make in OPTIMIZERS.items():
        optimizer = wrapped(make())
        optimizer.build(weights_of(SHAPE, (4096,)))
        stored = [slot.name.removeprefix("w0_") + "*" * slot.holds_root for slot in slots_of(optimizer)]
        assert stored == SMALL_SLOTS[name].split(), name


class Keeps(keras.optimizers.SGD):
    """Has a momentum that its steps leave alone."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient)


def test_a_slot_that_a_step_does_not_change_keeps_its_bits():
    weights = weights_of(SHAPE)
    optimizer = wrapped(Keeps(1e-2, momentum=0.9))
    optimizer.build(weights)
    slots_of(optimizer)[0].assign(weights[0].value)
    before = bits_of(slots_of(optimizer)[0].variables)
    optimizer.apply([weights[0].value])
    assert bits_of(slots_of(optimizer)[0].variables) == before


QUICK = [pytest.param("AdamW", "float8", marks=pytest.mark.jax), ("Muon", "bfloat16")]
OTHERS = thirds((name, "float8") for name in OPTIMIZERS if name not in ("Adam", "AdamW"))


@pytest.mark.parametrize("name, state_dtype", [*QUICK, *OTHERS])
def test_weights_stay_near_those_of_float32_states(name, state_dtype):
    weights, others = weights_of(SHAPE, (128,)), weights_of(SHAPE, (128,))
    gradients = gradients_of(weights, 20)
    before = [np.asarray(weight) for weight in weights]
    new = make_steps(wrapped(OPTIMIZERS[name](), state_dtype), weights, gradients)
    exact = make_steps(wrapped(OPTIMIZERS[name](), "float32"), others, gradients)
    np.testing.assert_array_equal(new[1], exact[1])  # a bias has float32 slots
    # Off by less than u of it, in the root mean square by u / sqrt(6), and as often up as down: after 20 steps by
    # at most sqrt(20 / 6) u, where nothing is forgotten, in each of two slots.
    u = {"bfloat16": 2.0**-7, "float8": 2.0**-3}[state_dtype]
    bound = np.sqrt(2 * 20 / 6) * u
    if name == "Lion":  # steps are signs: those turn that are nearer to 0 than the error, at a density of 0.4
        bound = 2 * np.sqrt(0.8 * bound)
    moved = np.linalg.norm(exact[0] - before[0])
    if name == "Ftrl":  # each step makes weights anew from its slots
        moved += np.linalg.norm(before[0])
    assert np.linalg.norm(new[0] - exact[0]) < bound * moved
    if name != "Adafactor":  # its full moment is only written
        assert np.linalg.norm(new[0] - exact[0]) > 0


@pytest.mark.jax
def test_adam_against_numpy_with_the_same_bits():
    seed, weights = 7, weights_of(SHAPE)
    gradients = gradients_of(weights, 6)
    rate, beta_1, beta_2, epsilon = 1e-2, 0.9, 0.99, 1e-7
    optimizer = wrapped(keras.optimizers.Adam(rate, beta_1, beta_2, epsilon), rounding_seed=seed)
    w, m, v = np.asarray(weights[0], "float64"), 0.0, 0.0
    new = make_steps(optimizer, weights, gradients)[0]

    def stored(x, step, index):
        scale = np.max(np.abs(x), -1, keepdims=True) / 448
        scaled = x / scale
        ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(scaled), SMALLEST_NORMAL))) - 3)
        bits = np.asarray(random_bits(SHAPE, seed, step, index)) & (2**20 - 1)
        steps = np.floor(np.abs(scaled) / ulp + bits / 2.0**20)
        return np.sign(x) * steps * ulp * scale

    for step, (gradient,) in enumerate(gradients):
        g = gradient.astype("float64")
        m, v = m + (1 - beta_1) * (g - m), v + (1 - beta_2) * (np.square(g) - v)
        alpha = rate * np.sqrt(1 - beta_2 ** (step + 1)) / (1 - beta_1 ** (step + 1))
        w = w - alpha * m / (np.sqrt(v) + epsilon)
        m, v = stored(m, step, 1), np.square(stored(np.sqrt(v), step, 2))
    # Float32 may fall on the other side of a random word: one step of E4M3 in few values.
    first, second = slots_of(optimizer)
    for slot, reference in ((first, m), (second, v)):
        same = np.isclose(slot.numpy(), reference, rtol=1e-5, atol=1e-7 * np.max(np.abs(reference)))
        assert np.mean(same) > 0.999
    assert np.mean(np.isclose(new, w, rtol=1e-5, atol=1e-6)) > 0.99


def test_odd_shapes_rows_of_zeros_and_gradients_of_none():
    shapes = [(4096, 2), (1, 4096), (3, 1367), (5, 7, 11, 13)]
    weights = weights_of(*shapes, SHAPE)
    gradients = [np.random.default_rng().normal(size=shape).astype("float32") for shape in shapes]
    for gradient in gradients:
        gradient[0] = 0.0
    optimizer = wrapped(keras.optimizers.Adam(1e-2))
    before = np.asarray(weights[-1])
    optimizer.build(weights)
    by_name = {slot.name: slot for slot in slots_of(optimizer)}
    untouched = [v for name in ("w4_momentum", "w4_velocity") for v in by_name[name].variables]
    assert len(untouched) == 4
    stored = bits_of(untouched)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        make_steps(optimizer, weights, [[*gradients, None]] * 3)
    assert bits_of(untouched) == stored
    np.testing.assert_array_equal(np.asarray(weights[-1]), before)
    for place, gradient in enumerate(gradients):
        first, second = (by_name[f"w{place}_{name}"] for name in ("momentum", "velocity"))
        for slot, expected in ((first, (1 - 0.9**3) * gradient), (second, (1 - 0.999**3) * gradient**2)):
            assert tuple(slot.shape) == gradient.shape and np.isfinite(slot.numpy()).all()
            np.testing.assert_array_equal(slot.numpy()[0], 0.0)
            amax = np.max(np.sqrt(np.abs(expected)) if slot.holds_root else np.abs(expected), -1, keepdims=True)
            # Each of three roundings by less than one step of E4M3, and the root twice as far.
            far = np.maximum(2.0**-3 * np.abs(expected), 2.0**-9 / 448 * amax * (amax if slot.holds_root else 1)) * 6
            assert np.all(np.abs(slot.numpy() - expected) <= far)
    optimizer.apply([])


def test_small_slots_and_rows_of_one_value_stay_float32():
    weights = weights_of((63, 65), (64, 64), (4096,), (8192, 1))
    optimizer = wrapped(keras.optimizers.Adam(1e-2))
    optimizer.build(weights)
    assert [tuple(slot.shape) for slot in slots_of(optimizer)] == [(64, 64)] * 2
    assert not is_small(optimizer, "momentum", keras.Variable(np.zeros(SHAPE), dtype="float64"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_skipped_step_leaves_every_bit(dtype):
    weights = weights_of(SHAPE, dtype=dtype)
    optimizer = wrapped(keras.optimizers.AdamW(1e-2))
    gradient = np.random.default_rng().normal(size=SHAPE).astype("float32")
    make_steps(optimizer, weights, [[gradient]] * 2)
    watched = [*weights, *optimizer.inner_optimizer.variables]
    before = bits_of(watched)
    gradient[3, 5] = np.nan
    make_steps(optimizer, weights, [[gradient]])
    assert bits_of(watched) == before
    assert int(optimizer.skipped_steps) == 1


def test_the_seed_is_in_the_config_and_decides_the_bits():
    def stored(**settings):
        optimizer = wrapped(keras.optimizers.Adam(1e-2), **settings)
        again = keras_mp.LossScaleOptimizer.from_config(optimizer.get_config())
        assert (again.state_dtype, again.rounding_seed) == ("float8", settings.get("rounding_seed", 0))
        weights = weights_of(SHAPE)
        make_steps(again, weights, [[np.asarray(weights_of(SHAPE, seed=3)[0])]])
        return bits_of(again.variables)

    assert stored() == stored(rounding_seed=0) != stored(rounding_seed=1)
    assert "state_dtype" not in wrapped(keras.optimizers.Adam(), "float32").get_config()


def test_averaged_weights_and_sums_of_gradients_stay_float32():
    weights, others = weights_of(SHAPE), weights_of(SHAPE)

    def inner():
        return keras.optimizers.Adam(
            1e-2, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2, global_clipnorm=1.0
        )

    gradients = gradients_of(weights, 4)
    optimizer = wrapped(inner())
    new = make_steps(optimizer, weights, gradients)[0]
    exact = make_steps(wrapped(inner(), "float32"), others, gradients)[0]
    kinds = {v.name.rpartition("_")[2]: str(v.dtype) for v in optimizer.variables if tuple(v.shape) == SHAPE}
    assert kinds == {"average": "float32", "sum": "float32", "momentum": "float8_e4m3fn", "velocity": "float8_e4m3fn"}
    assert int(optimizer.inner_optimizer.iterations) == 2
    assert 0 < np.linalg.norm(new - exact) < 2.0**-3 * np.linalg.norm(exact - np.asarray(weights_of(SHAPE)[0]))


def test_every_optimizer_of_several_has_small_states():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("Keras has no MultiOptimizer")
    adam, sgd = keras.optimizers.Adam(1e-2), keras.optimizers.SGD(1e-2, momentum=0.9, gradient_accumulation_steps=None)

    def choose(variable):
        return adam if variable.name == "w0" else sgd

    weights = weights_of(SHAPE, SHAPE)
    optimizer = wrapped(keras.optimizers.MultiOptimizer(choose))
    make_steps(optimizer, weights, gradients_of(weights, 2))
    slots = slots_of(optimizer)
    assert sorted(slot.name for slot in slots) == ["w0_momentum", "w0_velocity", "w1_momentum"]
    assert len({slot.index for slot in slots}) == 3 and min(slot.index for slot in slots) == 2
    assert all(np.any(slot.numpy()) for slot in slots)


def test_an_unknown_optimizers_slots_are_stored_with_their_sign():
    class Own(keras.optimizers.Optimizer):
        def build(self, variables):
            super().build(variables)
            self.trace = self.add_optimizer_variables(variables, "velocity", initializer="ones")

        def update_step(self, gradient, variable, learning_rate):
            trace = self.trace[self._get_variable_index(variable)]
            self.assign_sub(trace, 3.0 * gradient)
            self.assign(variable, abs(-trace * 2.0 + 1.0 - trace / 4.0)[...] - trace**2 * 0.0)

    weights = weights_of(SHAPE)
    optimizer = wrapped(Own(1.0))
    optimizer.build(weights)
    np.testing.assert_array_equal(slots_of(optimizer)[0].numpy(), 1.0)
    new = make_steps(optimizer, weights, [[np.ones(SHAPE, "float32")]])[0]
    np.testing.assert_allclose(slots_of(optimizer)[0].numpy(), -2.0, rtol=1e-6)
    np.testing.assert_allclose(new, 5.5, rtol=1e-6)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="state_dtype='float7' must be one of 'float32', 'bfloat16', 'float8'"):
        wrapped(keras.optimizers.Adam(), "float7")
    with pytest.raises(ValueError, match="rounding_seed=-1"):
        wrapped(keras.optimizers.Adam(), rounding_seed=-1)
    built = keras.optimizers.Adam(name="mine")
    built.build(weights_of(SHAPE))
    with pytest.raises(ValueError, match="state_dtype='float8' needs an optimizer that is not built, and 'mine'"):
        wrapped(built)
    wrapped(built, "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="state_dtype=16"):
        keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.Adam(), model, state_dtype=16)
    mine = wrapped(keras.optimizers.Adam(), "bfloat16", name="own")
    with pytest.raises(ValueError, match=r"state_dtype='float8' and optimizer='own'.*state_dtype='bfloat16'"):
        keras_mp.prepare(model, mine, "mse", state_dtype="float8")


def test_a_built_optimizer_is_wrapped_again_in_its_own_state_dtype():
    optimizer = wrapped(keras.optimizers.Adam(1e-3, name="mine"))
    optimizer.build(weights_of((64, 64)))
    with pytest.raises(ValueError, match="'mine' has its slots in float8 already.*pass state_dtype='float8'"):
        keras_mp.LossScaleOptimizer(optimizer.inner_optimizer, keras_mp.LossScale.none())
    again = wrapped(optimizer.inner_optimizer)
    assert again.get_config()["state_dtype"] == "float8"


@pytest.mark.skipif(not TENSORFLOW, reason="on JAX, Keras's gradients are dense")
def test_sparse_gradients_do_as_dense_ones():
    import tensorflow as tf

    weights, others = weights_of((512, 16)), weights_of((512, 16))
    generator = np.random.default_rng()
    optimizer, dense = wrapped(OPTIMIZERS["Adam"]()), wrapped(OPTIMIZERS["Adam"]())
    optimizer.build(weights)
    dense.build(others)
    for _ in range(3):
        rows, values = generator.integers(0, 512, 64), generator.normal(size=(64, 16)).astype("float32")
        optimizer.apply([tf.IndexedSlices(values, rows, (512, 16))])
        whole = np.zeros((512, 16), "float32")
        np.add.at(whole, rows, values)
        dense.apply([tf.constant(whole)])
    np.testing.assert_allclose(np.asarray(weights[0]), np.asarray(others[0]), rtol=1e-4, atol=1e-6)


def model_of(state_dtype):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(64)])
    return keras_mp.prepare(model, keras.optimizers.AdamW(1e-2), "mse", state_dtype=state_dtype, run_eagerly=True)


def data_of(rows=32):
    generator = np.random.default_rng(8)
    return [generator.normal(size=(rows, 64)).astype("float32") for _ in range(2)]


@pytest.mark.jax
def test_a_saved_model_goes_on_bit_for_bit(tmp_path):
    x, y = data_of()
    model = model_of("float8")
    for _ in range(2):
        model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    saved, loaded = (
        one.optimizer.variables[:-1] for one in (model, again)
    )  # `since_reset` is of an epoch, and in no file
    assert bits_of(loaded) == bits_of(saved)
    for trained in (model, again):
        trained.train_on_batch(x, y)
    assert bits_of(again.variables) == bits_of(model.variables)


@pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow's own checkpoints")
def test_tensorflows_checkpoint_goes_on_bit_for_bit(tmp_path):
    import tensorflow as tf

    x, y = data_of()
    first, second = (model_of("float8") for _ in range(2))
    first.train_on_batch(x, y)
    saved = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(str(tmp_path / "checkpoint"))
    status = tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(saved)
    for model in (first, second):
        model.train_on_batch(x, y)
    status.assert_existing_objects_matched()
    assert bits_of(second.variables) == bits_of(first.variables)
    assert bits_of(second.optimizer.variables) == bits_of(first.optimizer.variables)


def test_weights_files_of_another_state_dtype_are_refused(tmp_path):
    was, now = (model_of("float32") for _ in range(2))
    path = tmp_path / "model.weights.h5"
    for model, dtype in ((was, "float8"), (now, "float32")):
        model.compile(wrapped(keras.optimizers.AdamW(1e-2), dtype), "mse")
        model.optimizer.build(model.trainable_variables)
    was.save_weights(path)
    with pytest.raises(ValueError, match="load the file with the state_dtype that it was saved with"):
        now.load_weights(path)


def test_a_rebuilt_model_keeps_the_stored_bits():
    x, y = data_of()
    model = model_of("float8")
    model.train_on_batch(x, y)
    again = keras_mp.stabilize(twin(model))
    assert isinstance(slots_of(again.optimizer)[0], StateSlot)
    before, after = (bits_of(m.optimizer.inner_optimizer.variables) for m in (model, again))
    assert before == after


@pytest.mark.parametrize("dtypes", ["float8 float32", "float32 float8", "float8 bfloat16"])
def test_a_checkpoint_goes_on_in_another_state_dtype(tmp_path, dtypes):
    was, now = dtypes.split()
    x, y = data_of(16)
    batches = keras_mp.training.ShuffledBatches(x, y, batch_size=8, seed=0)

    def train(state_dtype, epochs):
        model = model_of(state_dtype)
        checkpoint = keras_mp.TrainingCheckpoint(tmp_path, batches)
        model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=[checkpoint])
        inner = model.optimizer if not hasattr(model.optimizer, "inner_optimizer") else model.optimizer.inner_optimizer
        return model, [np.asarray(slot) for slot in [*inner._momentums, *inner._velocities]]

    model, old = train(was, 1)
    again, new = train(now, 1)  # nothing is left to do: the state as it was read
    for before, after in zip(old, new, strict=True):
        if now == "float32" or before.size < 4096:
            np.testing.assert_array_equal(after, before)
        else:
            amax = np.max(np.abs(before), -1, keepdims=True)
            smallest = np.maximum(2.0**-10 / 448 * amax, (2.0**-10 / 448 * np.sqrt(amax)) ** 2 * 4)
            assert np.all(np.abs(after - before) <= np.maximum(2.1 * 2.0**-4 * np.abs(before), smallest))
    assert bits_of(model.variables) == bits_of(again.variables)
    train(now, 2)
