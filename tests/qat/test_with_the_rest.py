"""Training for Keras's int8 and int4 beside the rest of the kit: saved, resumed, undone, stable, lean, with LoRA."""

import re

import keras
import numpy as np
import pytest
from random_layers import config_of

import keras_mp
import keras_mp.qat.quantized_model as qat_quantize
from keras_mp.conversion.to_float32 import merged_float32
from keras_mp.qat import quantization_aware
from keras_mp.rebuild.walk import QAT, layers_by_path, treatments_of

pytestmark = pytest.mark.jax
VOCABULARY, LENGTH = 40, 6
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
EAGERLY = {"run_eagerly": keras.backend.backend() == "tensorflow"}  # which takes less time than to trace a step


def language_model(policy="mixed_bfloat16", head="dense", seed=0):
    """A small model of tokens with each of the four classes."""
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(VOCABULARY, 16, name="table")
    x = layers.Add()([table(tokens), layers.Embedding(VOCABULARY, 16, name="second")(tokens)])
    x = layers.EinsumDense("abc,cde->abde", (None, 2, 8), activation="gelu", name="split")(x)
    x = layers.Reshape((LENGTH, 16))(layers.LayerNormalization(dtype=policy)(x))
    x = layers.Dense(16, "gelu", name="inner")(x)
    logits = layers.Dense(VOCABULARY, name="head")(x) if head == "dense" else table(x, reverse=True)
    return keras.Model(tokens, logits)


def data(rows=8):
    tokens = np.random.default_rng().integers(0, VOCABULARY, (rows, LENGTH + 1))
    return tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")


def prepared(**how):
    model = keras_mp.convert(language_model(), config_of("int4", 16))
    return keras_mp.prepare(model, keras.optimizers.Adam(1e-2), LOSS, **how)


def predicted(model, x):
    return np.asarray(model.predict(x, verbose=0)).tobytes()


def weights(model):
    return [np.asarray(keras.ops.convert_to_numpy(v)).tobytes() for v in model.trainable_variables]


def test_what_was_trained_is_what_is_served(tmp_path, capsys):
    x, y = data()
    model = prepared()
    losses = model.fit(x, y, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.5
    trained = predicted(model, x)
    model.save(tmp_path / "trained.keras")
    loaded = keras.saving.load_model(tmp_path / "trained.keras")
    assert predicted(loaded, x) == trained
    keras_mp.quantize(loaded)
    said = capsys.readouterr().out
    assert "5 layers in int4/16" in said and "the same bits as in training" in said
    assert predicted(loaded, x) == trained
    loaded.save(tmp_path / "quantized.keras")
    assert predicted(keras.saving.load_model(tmp_path / "quantized.keras"), x) == trained
    assert not any(QAT in treatments_of(layer) for layer in layers_by_path(loaded).values())
    model.quantize(config=config_of("int4", 16))
    assert predicted(model, x) == trained
    with pytest.raises(ValueError, match="no layer trains for"):
        keras_mp.quantize(model)


def test_an_output_with_other_bits_refuses_and_leaves_the_model(monkeypatch):
    x, y = data()
    model = prepared(**EAGERLY)
    model.fit(x, y, verbose=0)
    before, kernels, names = predicted(model, x), weights(model), [v.path for v in model.variables]
    own = qat_quantize._quantize_layer

    def off(layer):
        own(layer)
        if layer.name == "inner":
            layer.kernel_scale.assign(layer.kernel_scale * 1.1)

    with monkeypatch.context() as scope:
        scope.setattr(qat_quantize, "_quantize_layer", off)
        with pytest.raises(ValueError, match="stays as it was"):
            keras_mp.quantize(model, x)
    assert (predicted(model, x), weights(model), [v.path for v in model.variables]) == (before, kernels, names)
    model.fit(x, y, verbose=0)
    keras_mp.quantize(model, x)


def test_before_and_after_prepare_is_the_same_and_reverts():
    x, y = data()
    first, plain = prepared(**EAGERLY), language_model()
    second = keras_mp.prepare(language_model(), keras.optimizers.Adam(1e-2), LOSS, **EAGERLY)
    second = keras_mp.convert(second, config_of("int4", 16))
    for model in (first, second):
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    assert weights(first) == weights(second)
    plain.set_weights(first.get_weights())
    for model in (first, plain):
        keras_mp.stabilize(keras_mp.revert(model))
    assert predicted(first, x) == predicted(plain, x)


@pytest.mark.slow
def test_steps_that_are_looked_into_are_the_quantized_ones():
    """Where the kit sets methods on layers, a twin must not have those, which are the layer's."""
    x, y = data()
    model = prepared()
    assert keras_mp.numerics.find_nonfinite(model, (x, y)) is None
    trained = predicted(model, x)
    assert not keras_mp.audit(model, (x, y)).quantized
    assert predicted(model, x) == trained
    said = str(keras_mp.audit(keras_mp.revert(model), (x, y)))
    assert "int4: quantized at once, the weights of 5 of 5 layers keep less than 30 dB" in " ".join(said.split())


def test_select_report_and_refusals():
    model = language_model()
    keras_mp.convert(model, "qat_int8", select=lambda path, layer: layer.name in ("inner", "split"))
    assert [layer.name for layer in model.layers if QAT in treatments_of(layer)] == ["split", "inner"]
    parts = {part.layer: part.reason for part in keras_mp.report(model).parts if part.change == "convert"}
    assert parts["inner"] == "it trains for int8" and "int8" not in parts["head"]
    report = keras_mp.report(model, scaling="qat_int4")
    parts = {part.layer: part for part in report.parts if part.change == "convert"}
    assert parts["inner"].done and not parts["inner"].possible and parts["head"].possible
    assert re.match(r"(1\d|2\d) dB SQNR of its weights after plain int4", parts["head"].reason)
    assert "keras_mp.convert(model, scaling='qat_int4')" in str(report)
    parts = keras_mp.report(model, scaling="qat_int8").parts
    assert not any(part.possible for part in parts if part.change == "convert")
    assert "Int4QuantizationConfig(block_size=16))" in str(keras_mp.report(model, scaling=config_of("int4", 16)))
    with pytest.raises(ValueError, match="scaling='qat_litert' must be one of 'qat_int8', 'qat_int4'"):
        keras_mp.report(model, scaling="qat_litert")
    for wrong, right in (("qat_int", "qat_int8"), ("int4", "qat_int4"), ("QAT-int4", "qat_int4")):
        with pytest.raises(ValueError, match=f"scaling='{wrong}' must be .* Did you mean '{right}'"):
            keras_mp.convert(model, wrong)
    with pytest.raises(ValueError, match="select chose none of table, second, split, inner, head"):
        keras_mp.convert(model, "qat_int8", select=lambda path, layer: False)
    convolution = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Conv2D(2, 3)])
    with pytest.raises(ValueError, match="It has no layer that Keras quantizes, .* 'qat_litert' takes"):
        keras_mp.convert(convolution, "qat_int8")
    with pytest.raises(ValueError, match="'split' is converted already: revert"):
        keras_mp.convert(model, "qat_litert")
    keras_mp.convert(convolution, "qat_litert")
    with pytest.raises(ValueError, match="it trains for LiteRT's int8: revert"):
        keras_mp.convert(convolution, "qat_int8")
    with pytest.raises(ValueError, match="it trains for LiteRT's int8, which .*export_litert writes"):
        keras_mp.quantize(convolution)
    narrow = language_model("bfloat16")
    with pytest.raises(ValueError, match="build the model under 'mixed_bfloat16'"):
        keras_mp.convert(narrow, "qat_int4")


@pytest.mark.parametrize("mode, block, levels", [("int8", None, 254), ("int4", 16, 15)])
def test_the_noise_of_quantization_is_that_of_uniform_rounding(mode, block, levels, monkeypatch):
    """Of the whole weights and of a sample of their channels: a step's square over 12."""
    layers = keras.layers
    for layer, shape, reduced in (
        (layers.Dense(96), (None, 32), 0),
        (layers.EinsumDense("abc,cde->abde", (None, 4, 48)), (None, 3, 32), 0),
        (layers.Embedding(96, 32), (None,), 1),
        (layers.ReversibleEmbedding(96, 32, tie_weights=False), (None,), 1),
    ):
        layer.build(shape)
        matrix = keras.ops.convert_to_numpy(layer.trainable_variables[0]).astype("float64")
        parts = np.stack(np.split(matrix, 32 // (block or 32), reduced))
        width = 2 * np.abs(parts).max(reduced + 1) if mode == "int8" else np.ptp(parts, axis=reduced + 1)
        expected = 10 * np.log10(np.square(matrix).mean() * 12 / np.square(width / levels).mean())
        for sample in (2**19, 700):
            monkeypatch.setattr(quantization_aware, "SAMPLE", sample)
            assert quantization_aware.sqnr(layer, config_of(mode, block)) == pytest.approx(expected, abs=1.5)


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("head", ["dense", "tied"])
def test_the_loss_of_a_lean_head_is_that_of_the_quantized_logits(head, mode):
    """Where the loss is made in chunks from features and weights, both are those of the quantized layer."""
    x, y = data(64)
    losses, kernels = [], []
    for lean in (False, True):
        model = keras_mp.convert(language_model("float32", head), config_of(mode, 16 if head == "dense" else None))
        model.compile(keras.optimizers.SGD(0.1), keras_mp.lean.ChunkedCrossEntropy() if lean else LOSS, **EAGERLY)
        if lean:
            keras_mp.lean.make_lean(model)
            assert model._calls is not None
        losses.append(model.train_on_batch(x, y))
        kernels.append(np.concatenate([np.ravel(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
    np.testing.assert_allclose(kernels[1], kernels[0], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("quantized_first", [False, True])
def test_lora_beside_int4_weights(tmp_path, quantized_first):
    """A frozen base whose codes are those of int4, and LoRA's matrices, which train: nothing is merged on the way."""
    x, y = data()
    model = language_model()
    keras_mp.convert(model, config_of("int4", 16), select=lambda path, layer: layer.name != "table")
    for layer in model.layers:
        layer.trainable = False
    for name in ("inner", "split", "second"):
        model.get_layer(name).trainable = True
        model.get_layer(name).enable_lora(2)
    if quantized_first:
        keras_mp.quantize(model, x)
    model = keras_mp.prepare(model, keras.optimizers.Adam(1e-2), LOSS, **EAGERLY)
    base = np.asarray(model.get_layer("inner")._kernel)
    model.fit(x, y, epochs=5, verbose=0)
    assert np.array_equal(base, model.get_layer("inner")._kernel) and np.any(model.get_layer("inner").lora_kernel_b)
    trained = predicted(model, x)
    if not quantized_first:
        model.save(tmp_path / "trained.keras")
        model = keras.saving.load_model(tmp_path / "trained.keras")
        assert predicted(model, x) == trained
        keras_mp.quantize(model, x)
        assert predicted(model, x) == trained
    model.save(tmp_path / "quantized.keras")
    assert predicted(keras.saving.load_model(tmp_path / "quantized.keras"), x) == trained


@keras.saving.register_keras_serializable("tests_qat")
class Block(keras.layers.Layer):
    """Makes its layer itself, as KerasHub's do: no config shows how that is quantized, nor its LoRA."""

    def build(self, shape):
        self.inner = keras.layers.Dense(shape[-1], "gelu", dtype=self.dtype_policy)
        self.inner.build(shape)

    def call(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize("lora", [False, True])
def test_files_hold_what_no_config_shows(tmp_path, lora):
    """Of layers that are made by another's code: LoRA with its scale, and that int8 inputs are not quantized."""
    keras.config.set_dtype_policy("float32")
    x, y = (np.random.default_rng().normal(size=(8, 16)).astype("float32") for _ in range(2))
    block, dense = Block(), keras.layers.Dense(16)
    model = keras.Sequential([keras.Input((16,)), block, dense])
    if lora:
        block.inner.enable_lora(2, lora_alpha=6)
        dense.enable_lora(2, lora_alpha=6)
    keras_mp.convert(model, keras.quantizers.Int8QuantizationConfig(activation_quantizer=None))
    model.compile(keras.optimizers.Adam(1e-2), "mse", **EAGERLY)
    model.fit(x, y, epochs=3, verbose=0)
    trained = predicted(model, x)
    outputs = model.predict(x, verbose=0)
    model.save(tmp_path / "trained.keras")
    keras.config.set_dtype_policy("mixed_bfloat16")
    loaded = keras.saving.load_model(tmp_path / "trained.keras")
    assert predicted(loaded, x) == trained
    if lora:
        np.testing.assert_allclose(merged_float32(loaded)(x), outputs, atol=1e-5 * np.abs(outputs).max())
    keras_mp.quantize(loaded, x)
    assert predicted(loaded, x) == trained
    np.testing.assert_allclose(merged_float32(loaded)(x), outputs, atol=1e-5 * np.abs(outputs).max())
    loaded.save(tmp_path / "quantized.keras")
    again = keras.saving.load_model(tmp_path / "quantized.keras")
    assert predicted(again, x) == trained and again.layers[0].inner.quantization_mode == "int8"
    loaded = keras.saving.load_model(tmp_path / "trained.keras")
    assert loaded.train_on_batch(x, y) == model.train_on_batch(x, y)
    assert weights(loaded) == weights(model)
