"""Which measures are tried of a model: frozen weights in 16 bits, weights in bfloat16, and their lines."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import Source
from keras_mp.planner.chips.place import find_place
from keras_mp.planner.fit.measures import MEASURES, Measures, lines, stages
from keras_mp.planner.fit.step import Step

pytestmark = pytest.mark.jax
ROWS, WIDTH = 8, 64
BATCH = keras.KerasTensor((ROWS, WIDTH)), keras.KerasTensor((ROWS, WIDTH))
FROZEN, STATES, NARROW = "frozen in 16 bits", "float8 states", "bfloat16 weights"
RELEASED, ON_HOST = "gradients released", "states on the host"
KERNEL = WIDTH * WIDTH


def build(frozen=True, optimizer=None):
    layers = [keras.layers.Dense(WIDTH, "relu", name="base"), keras.layers.Dense(WIDTH, name="head")]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers], name="small")
    model.get_layer("base").trainable = not frozen
    model.compile(optimizer or keras.optimizers.Adam(), "mse")
    return model


def step(build, **options):
    return Step(Source(build, **options), BATCH, TracedChip("gpu"))


def helps(step, name, precision="mixed_bfloat16", taken=()):
    (measure,) = (one for one in MEASURES if one.name == name)
    return step.helps(Measures(precision, taken), measure)


def stored_so():
    with keras_mp.set_global_policy("mixed_bfloat16"):
        return keras_mp.lean.narrow_frozen(build())


@pytest.mark.parametrize(
    "given, precision, expected",
    [
        (build, "mixed_bfloat16", True),
        (build(), "mixed_float16", True),
        (build, "float32", False),
        (lambda: build(frozen=False), "mixed_bfloat16", False),
        (stored_so, "mixed_bfloat16", False),
    ],
    ids=["a function", "a model", "read in 32 bits", "nothing is frozen", "stored so already"],
)
def test_frozen_weights_are_stored_in_16_bits_where_there_are_any(given, precision, expected):
    made = step(given)
    assert helps(made, FROZEN, precision) is expected
    if expected:
        place = find_place("h100")
        plain, small = (made.state(place, Measures(precision, names)) for names in ((), (FROZEN,)))
        assert plain.parameters - small.parameters == 2 * (KERNEL + WIDTH)
        assert (plain.optimizer, plain.other) == (small.optimizer, small.other)


def own_dtypes():
    """Code that is not made for weights in bfloat16."""
    model = build()
    if model.get_layer("head").kernel.dtype != "float32":
        raise KeyError(model.get_layer("head").kernel.dtype)
    return model


def trained_in_sgd():
    return build(optimizer=keras.optimizers.SGD(0.1))


@pytest.mark.parametrize(
    "given, precision, expected",
    [
        (build, "mixed_bfloat16", True),
        (trained_in_sgd, "mixed_bfloat16", True),
        (build, "mixed_float16", False),
        (build, "float32", False),
        (build(), "mixed_bfloat16", False),
        (own_dtypes, "mixed_bfloat16", False),
    ],
    ids=["a function", "no slots", "no bfloat16 on the chip", "float32", "a model", "code that refuses the policy"],
)
def test_weights_in_bfloat16_need_a_function_and_a_chip_that_has_it(given, precision, expected):
    made = step(given)
    taken = (STATES,) if helps(made, STATES, precision) else ()
    assert helps(made, NARROW, precision, taken) is expected
    assert bool(taken) == (given is not trained_in_sgd)
    if expected:
        small = made.state(find_place("h100"), Measures(precision, (*taken, NARROW)))
        assert small.parameters == 2 * 2 * (KERNEL + WIDTH)
        assert not helps(made, FROZEN, precision, (*taken, NARROW))


@pytest.mark.parametrize("names", [(FROZEN,), (STATES, NARROW), (NARROW,)], ids=" ".join)
def test_their_lines_run_and_leave_what_shapes_say(names):
    measures = Measures("mixed_bfloat16", names)
    made, place = step(build), find_place("h100")
    state = made.state(place, measures)
    x = np.random.default_rng().normal(size=(ROWS, WIDTH)).astype("float32")
    program = {"keras_mp": keras_mp, "build": build, "x": x, "y": x}
    exec("\n".join(lines(measures, Source(build), 1, ROWS)), program)
    model, policy = program["model"], measures.policy
    assert keras.config.dtype_policy().name == policy
    assert sum(w.dtype == "bfloat16" for w in model.weights) == (4 if NARROW in names else 2)
    for figure, variables in ((state.parameters, model.weights), (state.optimizer, model.optimizer.variables)):
        assert figure == sum(np.asarray(keras.ops.convert_to_numpy(one)).nbytes for one in variables)
    if NARROW in names:  # it rounds updates stochastically, and stores its slots in 8 bits
        assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer) and model.optimizer.state_dtype == "float8"


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="memory of the host is for JAX alone")
def test_states_on_the_host_come_last_and_their_line_runs():
    made, place = step(build), find_place("h100")
    names = (FROZEN, STATES, NARROW, RELEASED)
    small, host = (Measures("mixed_bfloat16", taken) for taken in (names, (*names, ON_HOST)))
    assert helps(made, RELEASED, "mixed_bfloat16", names[:-1])
    assert helps(made, ON_HOST, "mixed_bfloat16", names)
    moments = made.state(place, small).optimizer - made.state(place, host).optimizer
    assert moments == made.state(place, host).host == 2 * KERNEL  # in 8 bits
    assert [measure.name for measure in host.applied] == [FROZEN, ON_HOST]
    x = np.random.default_rng().normal(size=(ROWS, WIDTH)).astype("float32")
    program = {"keras_mp": keras_mp, "build": build, "x": x, "y": x}
    exec("\n".join(lines(host, Source(build), 1, ROWS)), program)
    kinds = [variable.value.sharding.memory_kind for variable in program["model"].optimizer.variables]
    assert kinds.count("pinned_host") == 2
    assert all(len(stage) == 1 for stage in stages(host, 8, made.helps))  # no micro-batches


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX has them")
def test_states_on_the_host_are_not_for_tensorflow():
    assert not helps(step(build), ON_HOST, "mixed_bfloat16", (STATES, NARROW, RELEASED))


def test_gradients_are_released_only_where_they_wait_and_need_not():
    assert not helps(step(build), RELEASED, "mixed_bfloat16")  # Keras's optimizer does not check
    clipped = step(lambda: build(optimizer=keras.optimizers.Adam(global_clipnorm=1.0)))
    assert not helps(clipped, RELEASED, "mixed_bfloat16", (STATES,))
    assert not helps(clipped, ON_HOST, "mixed_bfloat16", (STATES,))


def test_in_another_precision_what_does_nothing_there_is_left_out():
    made = step(build)
    measures = Measures("mixed_bfloat16", (FROZEN, STATES, NARROW), micro_batches=2)
    assert made.in_precision(measures, "float32") == Measures("float32", (STATES,), micro_batches=2)
    assert made.in_precision(measures, "mixed_float16") == Measures("mixed_float16", (FROZEN, STATES), micro_batches=2)
