"""Layers that Keras quantized, stabilized: the numbers of their groups, and quantization after `stabilize`."""

import adapted_models
import keras
import numpy as np
import pytest
from keras import layers
from twins import twin

import keras_mp
from keras_mp.conversion.to_float32 import merged_float32
from keras_mp.precision.policy import set_global_policy
from keras_mp.rebuild.model import rebuild

Int4 = keras.quantizers.Int4QuantizationConfig


def scaled(shape, group, generator):
    """Weights whose groups differ by powers of two, so that a group's scale used for another's weights shows."""
    scales = np.exp2(generator.integers(-6, 7, (shape[0] // group, 1))).repeat(group, axis=0)
    codes = generator.integers(-8, 8, shape)
    codes[::group], codes[1::group] = -8, 7  # the largest and the smallest in each group: int4 hits all of them
    return codes * scales


def grouped(kind, kernel, policy):
    """A model that gives the rows of a kernel in groups of two, as products with unit vectors.

    The grouped layer is not the last, which computes in float32 anyway.
    """
    rows, columns = kernel.shape
    with set_global_policy(policy):
        if kind == "dense":
            layer = layers.Dense(columns, use_bias=False, name="grouped")
        else:
            layer = layers.EinsumDense("ab,bc->ac", columns, name="grouped")
        end = layers.Dense(columns, use_bias=False, name="end")
        model = keras.Sequential([keras.Input((rows,)), layer, end])
    layer.set_weights([kernel])
    end.set_weights([np.eye(columns)])
    layer.quantize("int4", config=Int4(block_size=2))
    return model, np.eye(rows, dtype="float32")


def of_keras(model, x):
    """What Keras computes; where it fails, NaN: TensorFlow checks that an index is one."""
    try:
        return adapted_models.logits(model, x)
    except Exception as error:
        assert "is not in [0, " in str(error)
        return np.nan


@pytest.mark.parametrize(
    ("kind", "policy", "groups"),
    [("dense", "mixed_bfloat16", 600), pytest.param("einsum", "mixed_float16", 2100, marks=pytest.mark.slow)],
)
def test_more_groups_than_16_bits_can_count(kind, policy, groups, tmp_path):
    """Keras rounds 257 to 256 in bfloat16, another group's scale and zero point, and 599 to 600, which there is not."""
    expected = scaled((2 * groups, 4), 2, np.random.default_rng())
    model, x = grouped(kind, expected, policy)
    assert not (abs(of_keras(model, x) - expected) <= 2**-7 * abs(expected)).all()
    stable = keras_mp.stabilize(twin(model))
    assert "groups of int4" in "".join(layer.reason for layer in keras_mp.stability.sensitive.sensitive_layers(model))
    assert not keras_mp.stability.sensitive.sensitive_layers(stable)
    stable.save(tmp_path / "stable.keras")
    for new in (stable, keras.saving.load_model(tmp_path / "stable.keras")):
        np.testing.assert_allclose(adapted_models.logits(new, x), expected, rtol=2**-7)


def test_groups_that_16_bits_can_count_are_left_to_keras():
    expected = scaled((2 * 256, 4), 2, np.random.default_rng())
    model, x = grouped("dense", expected, "mixed_bfloat16")
    assert [layer.path for layer in keras_mp.stability.sensitive.sensitive_layers(model)] == [f"{model.name}/end"]
    np.testing.assert_allclose(adapted_models.logits(keras_mp.stabilize(model), x), expected, rtol=2**-7)


def two_layers(policy):
    with set_global_policy(policy):
        return keras.Sequential([keras.Input((32,)), layers.Dense(32, activation="gelu"), layers.Dense(8, name="head")])


def test_quantized_after_stabilize_is_as_quantized_before(tmp_path):
    """Before, Keras left the output layer as it was, with a warning that Dense has no `quantize` method."""
    mode, model = "int4", two_layers("mixed_bfloat16")
    after, before = keras_mp.stabilize(twin(model)), keras.models.clone_model(model)
    before.set_weights(model.get_weights())
    before.quantize(mode)
    before = keras_mp.stabilize(before)
    after.quantize(mode)
    assert [layer.quantization_mode for layer in after.layers] == [mode, mode]
    x = np.random.default_rng().normal(size=(5, 32)).astype("float32")
    after.save(tmp_path / "after.keras")
    loaded = keras.saving.load_model(tmp_path / "after.keras")
    expected = adapted_models.logits(before, x)
    assert keras.backend.standardize_dtype(after(x).dtype) == "float32"
    for new in (after, loaded, keras_mp.stabilize(after)):
        np.testing.assert_array_equal(adapted_models.logits(new, x), expected)


@pytest.mark.slow
def test_quantized_after_training_prepare_makes_it_ready_again():
    """The optimizer holds the weights that trained before; Keras's message tells nothing else."""
    x, y = np.ones((4, 32), "float32"), np.ones((4, 8), "float32")
    model = keras_mp.prepare(two_layers("mixed_bfloat16"), "adam", "mse")
    model.train_on_batch(x, y)
    model.quantize("int8")
    model = keras_mp.prepare(model, "adam", "mse")
    assert [layer.quantization_mode for layer in model.layers] == ["int8", "int8"]
    assert np.isfinite(model.train_on_batch(x, y))


def head(policy, mode, tied, soft_cap=None, config=None):
    with set_global_policy(policy):
        layer = layers.ReversibleEmbedding(10, 8, tie_weights=tied, logit_soft_cap=soft_cap)
        inputs = keras.Input((4,), dtype="int32")
        hidden = layers.Dense(8, use_bias=False, name="before")(layer(inputs))
        model = keras.Model(inputs, layer(hidden, reverse=True))
    layer.quantize(mode, config=config)
    return model


@pytest.mark.parametrize(
    ("policy", "tied", "soft_cap", "bits"),
    [
        ("float32", True, None, 8),
        pytest.param("mixed_bfloat16", False, 3.0, 8, marks=pytest.mark.slow),
        ("float32", True, None, 4),
    ],
)
def test_quantized_logits_pass_gradients_on(policy, tied, soft_cap, bits, tmp_path):
    """In Keras an int8 vocabulary head gives what comes before it no gradient but of the largest entry of each row."""
    generator = np.random.default_rng()
    per_row = keras.quantizers.AbsMaxQuantizer(axis=-1)
    config = Int4(None, per_row, block_size=-1) if bits == 4 else None
    model = head(policy, f"int{bits}", tied, soft_cap, config)
    x, y = generator.integers(0, 10, (64, 4)), generator.integers(0, 10, (64, 4))
    stable = keras_mp.stabilize(twin(model))
    bound = 2e-6 if policy == "float32" and bits == 8 else 2**-5  # of forward products: Keras's own, but for rounding
    expected = adapted_models.logits(model, x)
    assert abs(adapted_models.logits(stable, x) - expected).max() <= bound * abs(expected).max()
    stable.save(tmp_path / "stable.keras")
    loaded = keras.saving.load_model(tmp_path / "stable.keras")
    # The reference: the same weights as floats, whose gradient differs by the rounding of the inputs alone.
    merged = merged_float32(model)
    true = step_of(merged, x, y)
    for new in (stable, loaded):
        ours = step_of(new, x, y)
        assert np.vdot(ours, true) > 0.995 * np.linalg.norm(ours) * np.linalg.norm(true)
    plain = step_of(model, x, y)
    assert np.vdot(plain, true) < 0.9 * np.linalg.norm(plain) * np.linalg.norm(true)


def step_of(model, x, y):
    """The change of the layer before the head in a step of gradient descent, of a copy of the model."""
    model = rebuild(model, lambda node, layer: node).model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=True)
    kernel = model.get_layer("before").kernel
    before = keras.ops.convert_to_numpy(kernel).astype("float64")
    model.train_on_batch(x, y)
    return before - keras.ops.convert_to_numpy(kernel)


def test_a_quantized_vocabulary_in_16_bits_still_looks_rows_up():
    model, tokens = head("mixed_bfloat16", "int4", tied=True), np.arange(8).reshape(2, 4)
    expected = adapted_models.logits(merged_float32(model), tokens)
    ours = adapted_models.logits(keras_mp.stabilize(model), tokens)
    assert abs(ours - expected).max() <= 2**-5 * abs(expected).max()


def test_lora_beside_int4_is_added_by_its_scale():
    model = two_layers("mixed_bfloat16")
    model.quantize("int4")
    model.layers[1].enable_lora(2, lora_alpha=6)
    x, b = (np.random.default_rng().normal(size=shape).astype("float32") for shape in ((5, 32), (2, 8)))
    model.layers[1].lora_kernel_b.assign(b)
    expected = adapted_models.logits(merged_float32(model), x)
    ours = adapted_models.logits(keras_mp.stabilize(model), x)
    assert abs(ours - expected).max() <= 2**-5 * abs(expected).max()


def test_prepare_says_what_is_quantized_and_what_trains(capsys):
    """Nothing of it was said."""
    model = two_layers("mixed_bfloat16")
    model.quantize("int4")
    model.layers[0].enable_lora(2)
    keras_mp.prepare(model, "adam", "mse", verbose=True)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    trained = 2 * (32 + 32) + 32 + 8  # LoRA's two matrices; the biases of both layers
    assert lines["quantized"] == f"2 layers in int4, 1 layer with LoRA; {trained} weights train"
    keras_mp.prepare(two_layers("mixed_bfloat16"), "adam", "mse", verbose=True)
    assert "quantized" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_audit_offers_quantized_layers_no_fp8():
    """It said that both layers fit, of the ranges of biases alone; convert leaves them out."""
    model = two_layers("mixed_bfloat16")
    model.layers[0].quantize("int4")
    model.compile("sgd", "mse")
    x, y = np.ones((4, 32), "float32"), np.ones((4, 8), "float32")
    report = keras_mp.audit(model, (x, y))
    verdicts = {layer.path: layer.verdicts["fp8"] for layer in report.layers}
    assert verdicts[model.layers[0].name].reason == "it is quantized to int4" and verdicts["head"].ok
    assert "the only Dense or EinsumDense layer fits" in str(report)
    model.layers[1].quantize("int8")
    assert "the Dense and EinsumDense layers are quantized" in str(keras_mp.audit(model, (x, y)))
