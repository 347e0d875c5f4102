import keras
import numpy as np
import pytest
import zoo
from faults import (
    backward_only,
    compiled,
    first_overflow,
    healthy,
    infinite_label,
    large_activations,
    large_logits,
    nan_record,
    nan_weight,
    normal,
    normalized,
    scale_only,
    sequential,
)
from keras import layers, ops

import keras_mp
from keras_mp.numerics import find_nonfinite
from keras_mp.numerics.observe import ObservedStep


def test_activations_past_float16():
    found = find_nonfinite(*large_activations("mixed_float16"))
    assert (found.path, found.tensor, found.kind, found.remedy) == ("large", "output", "Inf", "float32 for this layer")
    assert found.count == 16 and not found.backward and found.fitting_scale is None
    assert found.given["bias"] == (0.0, 70_000.0)
    assert find_nonfinite(*large_activations("float32")) is None


class Sum(layers.Layer):
    """A residual sum in the layer's own code: each term fits float16, and the sum does not."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scaling = layers.Rescaling(-1.0, offset=40_000.0, dtype=self.dtype_policy)

    def call(self, x):
        x = self.scaling(x)
        return x + ops.negative(-x)  # which overflows


@pytest.mark.jax
def test_an_operation_in_a_layer_s_own_code_is_named_with_its_line():
    keras.config.set_dtype_policy("mixed_float16")
    model = sequential(Sum(name="sum"))
    found = find_nonfinite(model, (normal(4, 8), normal(4, 1)))
    assert (found.path, found.tensor) == ("sum", "output")
    operation, _, line = found.operation.partition(" in test_nonfinite.py, line ")
    assert operation in ("AddV2", "add") and line.partition(": ")[2] == "return x + ops.negative(-x)  # which overflows"
    assert f"Operation: {found.operation}" in str(found) and "inputs of that layer" in str(found)


@pytest.mark.parametrize(
    "build, expected",
    [
        (large_logits, {"path": "softmax", "tensor": "input", "remedy": "float32 for this layer"}),
        (
            nan_weight,
            {"path": "second", "tensor": "weight kernel", "kind": "NaN", "count": 1, "remedy": "a bad weight"},
        ),
        (nan_record, {"tensor": "x", "kind": "NaN", "records": [37], "remedy": "a bad input record"}),
        (infinite_label, {"tensor": "y", "kind": "Inf", "records": [3]}),
    ],
)
def test_what_is_planted_is_named(build, expected):
    found = find_nonfinite(*build("mixed_float16"))
    assert {name: getattr(found, name) for name in expected} == expected
    assert build is not nan_weight or "(2, 5)" in found.advice
    assert build is not large_logits or find_nonfinite(*large_logits("float32")) is None


@pytest.mark.jax
@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
def test_a_division_by_zero_in_the_backward_pass_only(dtype):
    found = find_nonfinite(*backward_only(dtype))
    assert (found.path, found.tensor, found.kind, found.backward) == ("norm", "input gradient", "NaN", True)
    assert found.remedy == "the layer's own arithmetic" and "float32 either" in found.advice


def test_an_overflow_that_only_the_loss_scale_causes():
    model, batch = scale_only()
    found = find_nonfinite(model, batch)
    assert found.fitting_scale and found.remedy == "lower the loss scale" and found.backward
    assert found.scale == 2.0**15 and found.fitting_scale < 2.0**15
    assert find_nonfinite(model, batch, found.fitting_scale) is None
    assert find_nonfinite(model, batch, 2 * found.fitting_scale).fitting_scale == found.fitting_scale
    assert find_nonfinite(model, batch, 1.0) is None


def test_an_infinity_that_a_relu_cuts_off_is_not_blamed():
    model = sequential(
        layers.Dense(8, dtype="mixed_float16", name="cut", kernel_initializer="zeros"),
        layers.ReLU(dtype="mixed_float16", name="relu"),
        layers.Dense(8, dtype="mixed_float16", name="large", kernel_initializer="zeros"),
        layers.LayerNormalization(dtype="float32"),
    )
    model.get_layer("cut").bias.assign(np.full(8, -1e5))
    model.get_layer("large").bias.assign(np.full(8, 1e5))
    assert find_nonfinite(model, (normal(4, 8), normal(4, 1))).path == "large"


def test_layers_inside_layers_have_their_whole_path():
    inputs = keras.Input((6, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention", dtype="mixed_float16")(inputs, inputs)
    model = compiled(keras.Model(inputs, layers.Dense(1, dtype="float32")(x)))
    value = model.get_layer("attention")._value_dense
    value.bias.assign(np.full(value.bias.shape, 1e5))
    if keras.backend.backend() == "jax":
        model.get_layer("attention")._flash_attention = False
        model.get_layer("attention")._dropout = 0.1  # float16's fused attention has no kernel on a CPU
    found = find_nonfinite(model, (normal(4, 6, 8), normal(4, 6, 1)))
    assert found.path == "attention/value" and found.remedy == "float32 for this layer"


def test_a_loss_that_is_not_finite_by_itself():
    model, batch = healthy()
    model.compile("sgd", loss=lambda y, prediction: ops.log(ops.zeros_like(prediction)))
    found = find_nonfinite(model, batch)
    assert (found.path, found.tensor, found.remedy) == ("", "loss", "the layer's own arithmetic")


def test_an_overflow_before_a_batch_normalization_is_not_blamed_on_moving_statistics():
    place = int(np.random.default_rng().integers(3))
    model, (x, y) = normalized("mixed_float16", place)
    keras_mp.stabilize(model).compile("sgd", "mse", jit_compile=False)
    assert first_overflow(model, x) == f"dense{place}"
    found = find_nonfinite(model, (x, y))
    assert (found.path, found.tensor, found.remedy) == (f"dense{place}", "output", "float32 for this layer")
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    found = find_nonfinite(model, (1e6 * x, y))
    assert (found.path, found.tensor) == ("dense0", "input")


def test_moving_statistics_that_an_earlier_step_spoiled_are_not_the_culprit_but_are_mentioned():
    model, batch = normalized("mixed_float16", 1)
    for place in (0, 1):
        model.get_layer(f"normalization{place}").moving_mean.assign(np.full(8, np.nan))
    found = find_nonfinite(model, batch)
    assert (found.path, found.tensor) == ("dense1", "output")
    assert "Weight moving_mean of layer 'normalization0' is not finite either" in found.advice
    assert np.isnan(model.get_layer("normalization0").moving_mean).all()  # as they were


def test_a_frozen_weight_that_the_step_reads_is_the_culprit():
    model, batch = normalized("mixed_bfloat16", 2)
    model.get_layer("normalization0").moving_variance.assign(np.full(8, np.inf))  # not read
    model.get_layer("normalization1").trainable = False
    model.get_layer("normalization1").moving_mean.assign(np.full(8, np.nan))
    found = find_nonfinite(model, batch)
    assert (found.path, found.tensor, found.remedy) == ("normalization1", "weight moving_mean", "a bad weight")
    assert found.count == 8


def test_a_frozen_backbone_of_nan_in_float16_is_not_blamed_on_the_precision():
    dense = [layers.Dense(64, use_bias=False, dtype="mixed_float16", name=f"dense{place}") for place in range(4)]
    model = keras.Sequential([keras.Input((64,)), *dense, layers.Dense(1, dtype="float32")])
    for layer in dense:
        layer.trainable = False
        layer.kernel.assign(np.full((64, 64), np.nan))
    model.compile("sgd", "mse")
    found = find_nonfinite(model, (np.full((2, 64), 3e3, "float32"), np.zeros((2, 1))))
    assert (found.path, found.tensor, found.remedy) == ("dense0", "weight kernel", "a bad weight")
    assert np.isnan(dense[0].kernel).all()  # as it was


class Masked(layers.Layer):
    """Scores that overflow, and an attention mask of -inf, which does no harm."""

    def __init__(self, mask, combine, **kwargs):
        super().__init__(**kwargs)
        self.mask, self.combine = mask, combine

    def call(self, x):
        mask = self.mask(x)
        scores = ops.exp(1000.0 * x)  # which overflows
        return ops.softmax(self.combine(mask, scores))


def padding(x):
    return ops.where(ops.cumsum(ops.ones_like(x), -1) < 4, 0.0, -np.inf)


MASKS = {
    "folded": lambda x: ops.where(ops.arange(4) < 3, 0.0, -np.inf),
    "array": lambda x: np.float32([0, 0, 0, -np.inf]),
    "of the input": padding,
    "of the input, in another shape": lambda x: ops.squeeze(ops.expand_dims(padding(x), 1), 1),
}


@pytest.mark.parametrize(
    "name, order",
    [
        ("folded", "mask first"),
        ("array", "scores first"),
        pytest.param("of the input", "scores first", marks=pytest.mark.jax),
        ("of the input, in another shape", "mask first"),
    ],
)
def test_an_overflow_is_named_and_not_the_mask_that_it_meets(name, order):
    combine = {"mask first": lambda mask, scores: mask + scores, "scores first": lambda mask, scores: scores + mask}
    model = sequential(Masked(MASKS[name], combine[order]), features=4)
    found = find_nonfinite(model, (np.full((2, 4), 5.0, "float32"), normal(2, 1)))
    operation, _, line = found.operation.partition(" in test_nonfinite.py, line ")
    assert operation.lower() == "exp" and line.partition(": ")[2] == "scores = ops.exp(1000.0 * x)  # which overflows"


@pytest.mark.jax
@pytest.mark.slow
def test_the_frameworks_searches_stop_at_the_mask_of_a_healthy_model():
    mask = MASKS["folded"]
    if keras.backend.backend() == "jax":
        import jax

        with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
            ops.softmax(ops.ones((2, 4)) + mask(None))
        return
    import tensorflow as tf

    tf.debugging.enable_check_numerics()
    try:
        with pytest.raises(tf.errors.InvalidArgumentError, match="-Inf"):
            ops.softmax(ops.ones((2, 4)) + mask(None))
    finally:
        tf.debugging.disable_check_numerics()


def masked_before(x):
    scores = ops.where(ops.arange(4) < 3, x, -np.inf)
    large = 1000.0 * scores
    return ops.exp(large)  # which overflows


def masked_whole(x):
    masked = ops.where(x > 9.0, x, -np.inf)
    return ops.softmax(masked)  # of nothing


def mixed(x):
    infinity = ops.where(ops.arange(4) < 3, 0.0, np.inf)
    return x + infinity  # which mixes them


def two(x):
    early = ops.exp(1000.0 * x)
    late = 1e38 * x
    return late * x + ops.negative(early)  # the later one goes into the sum first


class Own(layers.Layer):
    """A layer with a function's code."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function, value, operation, line",
    [
        (masked_before, 5.0, "exp", "return ops.exp(large)  # which overflows"),
        (masked_whole, 5.0, "", "return ops.softmax(masked)  # of nothing"),
        pytest.param(mixed, 1.0, "add", "return x + infinity  # which mixes them", marks=pytest.mark.jax),
        (two, 50.0, "exp", "early = ops.exp(1000.0 * x)"),
    ],
)
def test_the_first_operation_that_overflows_or_mixes_a_mask_in_is_named(function, value, operation, line):
    found = find_nonfinite(sequential(Own(function), features=4), (np.full((2, 4), value, "float32"), normal(2, 1)))
    assert found.operation.lower().startswith(operation) and found.operation.endswith(f": {line}")


class Constant(layers.Layer):
    """Puts out a constant infinity beside its input."""

    def call(self, x):
        return x, ops.convert_to_tensor(np.inf, x.dtype)  # a constant


class Product(layers.Layer):
    def call(self, pair):
        return pair[0] * pair[1]


@pytest.mark.jax
def test_a_layer_that_returns_a_constant_infinity_is_named_and_no_code_of_a_library():
    inputs = keras.Input((4,))
    x, infinity = Constant(name="constant")(layers.Dense(4)(inputs))
    model = compiled(keras.Model(inputs, Product()([x, infinity])))
    found = find_nonfinite(model, (normal(2, 4), normal(2, 4)))
    assert (found.path, found.tensor) == ("constant", "output")
    assert not found.operation or found.operation.endswith("# a constant")


@pytest.mark.jax
def test_naming_an_operation_leaves_no_tensor_of_its_trace_behind():
    step = ObservedStep(sequential(Own(mixed, name="mixed"), features=4), lambda record, loss, *others: loss)
    batch = (normal(2, 4), normal(2, 1), None)
    step(batch)
    record = step.record
    assert step.operation(batch, 1.0, next(call for call in record.calls if call.path == "mixed").outputs[0])
    assert step.record is record and not record.tensors


def test_a_loss_in_float16_that_keras_cannot_add_is_named_with_what_mends_it():
    model = sequential(layers.Dense(8, dtype="mixed_float16"), zoo.AddsLoss(deep=False, dtype="mixed_float16"))
    batch = (normal(16, 8), normal(16, 1))
    if keras.backend.backend() == "tensorflow":
        with pytest.raises(ValueError, match=r"keras_mp.stabilize\(model\) may mend it.*plain Keras fails, too"):
            find_nonfinite(model, batch)
    assert find_nonfinite(keras_mp.stabilize(model), batch) is None


def test_each_run_of_an_observed_step_begins_with_the_same_state():
    inputs = layers.Dropout(0.5), layers.Dense(8), layers.BatchNormalization(momentum=0.5)
    model, batch = sequential(*inputs), (normal(16, 8), normal(16, 1), None)
    step = ObservedStep(model, lambda record, loss, *others: loss)
    before = [np.copy(variable.value) for variable in model.variables]
    assert step(batch) == step(batch)  # the same dropout
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, variable.value)
