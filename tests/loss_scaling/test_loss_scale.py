import math

import keras
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_mp.loss_scaling.loss_scale import LossScale, LossScaleState, StaticLossScale


def reference(loss_scale, gradients):
    """The algorithm with branches: the state after each gradient value."""
    scale, clean, left, in_a_row, in_all = loss_scale.initial_scale, 0, loss_scale.hysteresis, 0, 0
    states = []
    for gradient in gradients:
        if math.isfinite(gradient):
            clean += 1
            in_a_row = 0
            if clean == loss_scale.growth_interval:
                scale = min(scale * loss_scale.growth_factor, loss_scale.max_scale)
                clean = 0
                left = loss_scale.hysteresis
        else:
            clean = 0
            in_a_row += 1
            in_all += 1
            if left > 0:
                left -= 1
            if left == 0:
                scale = max(scale * loss_scale.backoff_factor, loss_scale.min_scale)
        states.append((scale, clean, left, in_a_row, in_all))
    return states


@st.composite
def loss_scales(draw):
    exponents = sorted(draw(st.tuples(*[st.integers(-10, 24)] * 3)))
    floor, start, ceiling = (2.0**exponent for exponent in exponents)
    return LossScale(
        initial_scale=start,
        growth_factor=2.0 ** draw(st.integers(0, 3)),
        backoff_factor=2.0 ** draw(st.integers(-3, -1)),
        growth_interval=draw(st.integers(1, 5)),
        min_scale=floor,
        max_scale=ceiling,
        hysteresis=draw(st.integers(1, 4)),
    )


gradients = st.lists(st.sampled_from([1.0, 1.0, math.inf, -math.inf, math.nan]), max_size=25)


@settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(loss_scales(), gradients)
def test_every_sequence_agrees_with_the_reference(loss_scale, gradients):
    state = loss_scale.initial_state()
    for gradient, expected in zip(gradients, reference(loss_scale, gradients), strict=True):
        state = loss_scale.next_state(state, math.isfinite(gradient))
        assert tuple(state) == expected


@settings(max_examples=20, deadline=None)
@given(loss_scales(), gradients)
def test_tensors_give_the_same_as_numpy(loss_scale, gradients):
    numbers = loss_scale.initial_state()
    tensors = LossScaleState(*map(keras.ops.convert_to_tensor, numbers))
    for gradient in gradients:
        numbers = loss_scale.next_state(numbers, math.isfinite(gradient))
        tensors = loss_scale.next_state(tensors, keras.ops.isfinite(keras.ops.convert_to_tensor(gradient, "float32")))
        assert tuple(float(value) for value in tensors) == tuple(float(value) for value in numbers)


def after(loss_scale, *finite):
    state = loss_scale.initial_state()
    for each in finite:
        state = loss_scale.next_state(state, each)
    return state


def test_200_overflows_stop_at_the_floor():
    assert after(LossScale(), *[False] * 200).scale == 1.0
    assert after(LossScale(min_scale=2.0**-8), *[False] * 200).scale == 2.0**-8


def test_growth_stops_at_the_ceiling():
    assert after(LossScale(growth_interval=1), *[True] * 200).scale == 2.0**24


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"initial_scale": 0.0}, "initial_scale=0.0 must be a finite number, positive"),
        ({"initial_scale": -2.0}, "initial_scale=-2.0"),
        ({"initial_scale": math.inf}, "initial_scale=inf"),
        ({"initial_scale": "8"}, "initial_scale='8'"),
        ({"initial_scale": 0.5}, "outside min_scale=1.0"),
        ({"min_scale": math.nan}, "min_scale=nan"),
        ({"max_scale": 2.0**127}, "max_scale=1.7"),
        ({"min_scale": 2.0**-127}, "min_scale=5.8"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "floor must not be above"),
        ({"growth_factor": 0.5}, "growth_factor=0.5 must be a finite number, 1 or more"),
        ({"growth_factor": math.inf}, "growth_factor=inf"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 .* between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"growth_interval": 2.5}, "growth_interval=2.5"),
        ({"hysteresis": True}, "hysteresis=True"),
        *(({"scale": scale}, "scale=") for scale in (0.0, -1.0, math.nan, math.inf, None)),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        (StaticLossScale if "scale" in settings else LossScale)(**settings)


def test_what_is_not_a_power_of_two_is_told_to_cost_rounding():
    with pytest.warns(UserWarning, match="initial_scale=1000.0 is not a power of two.*round"):
        LossScale(initial_scale=1000.0)
    with pytest.warns(UserWarning, match="scale=3.0 is not a power of two"):
        StaticLossScale(3.0)
