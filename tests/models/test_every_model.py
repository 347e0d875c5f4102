"""What every model must do: stabilized, trained for a step, saved, loaded and exported."""

import keras
import numpy as np
import pytest
from twins import twin

import keras_mp
from keras_mp.stability.sensitive import sensitive_layers
from models.gpt import gpt
from models.llama import LlamaSize, llama
from models.resnet import resnet_cifar
from models.text_classifier import PADDING, text_classifier
from models.transformer import Size
from models.vit import vit

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
TINY, TINY_LLAMA = Size(1, 128, 2), LlamaSize(1, 128, 4, 2, 256, 100)
TOKENS = np.arange(32, dtype="int32").reshape(2, 16)
TEXTS = np.array([[5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 7, PADDING, PADDING, PADDING, PADDING, PADDING]], "int32")
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
# Each has `Add` layers on its residual path.
MODELS = {
    "gpt": (lambda: gpt(TINY, 100, 16, dropout=0.1), TOKENS),
    "llama": (lambda: llama(TINY_LLAMA, 16), TOKENS),
    "resnet": (lambda: resnet_cifar(8, 5, (8, 8, 3), 4), IMAGES),
    "vit": (lambda: vit(TINY, 5, (8, 8, 3), 4, dropout=0.1), IMAGES),
    "text classifier": (lambda: text_classifier(TINY, 3, 100, 8), TEXTS),
}


def run(model, batch):
    """What each residual addition gave, and the output, as NumPy arrays."""
    hidden = [layer.output for layer in model.layers if isinstance(layer, keras.layers.Add)]
    both = keras.Model(model.inputs, [hidden, model.output])
    if ON_TENSORFLOW:  # a graph would take longer to build than it saves
        return keras.tree.map_structure(keras.ops.convert_to_numpy, both(batch, training=False))
    both.jit_compile = True
    return both.predict(batch, verbose=0)


@pytest.mark.parametrize(
    "name, precision",
    [
        pytest.param("gpt", "mixed_float16", marks=pytest.mark.jax),
        pytest.param("gpt", "mixed_bfloat16", marks=pytest.mark.slow),
        pytest.param("llama", "mixed_bfloat16", marks=pytest.mark.slow),
        pytest.param("resnet", "mixed_float16", marks=pytest.mark.slow),
        pytest.param("vit", "mixed_bfloat16", marks=pytest.mark.slow),
        pytest.param("text classifier", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_model_in_a_precision(name, precision, tmp_path):
    build, batch = MODELS[name]
    compute = precision.removeprefix("mixed_")
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(0)
    plain = build()
    model = keras_mp.stabilize(twin(plain))
    if compute != "float32":
        assert sensitive_layers(plain)
    assert not sensitive_layers(model)

    before = [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]
    optimizer = keras.optimizers.AdamW(1e-3)
    if compute == "float16":
        # The scale that Keras starts from, 2**15, can overflow, and a step that overflows is skipped.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2**8)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=not ON_TENSORFLOW,
    )
    # Not train_on_batch: in fit, TensorFlow knows no batch size.
    model.fit(batch, np.ones((len(batch), *model.output_shape[1:-1]), "int32"), verbose=0)
    after = [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]
    # A bias of the keys shifts all scores of a query alike, which softmax does not see: its gradient is 0.
    still = [v.path for v, b, a in zip(model.trainable_variables, before, after, strict=True) if np.array_equal(a, b)]
    assert not [path for path in still if not path.endswith("key/bias")]
    variables = [*model.weights, *model.optimizer.variables]
    floats = {v.dtype for v in variables if keras.backend.is_float_dtype(v.dtype)}
    assert floats == {"float32"}

    hidden, logits = run(model, batch)
    assert {array.dtype.name for array in hidden} == {compute}
    assert logits.dtype == "float32"
    assert all(np.isfinite(array.astype("float32")).all() for array in [*hidden, logits])

    keras.config.set_dtype_policy("float32")  # the file must know the policy, not the process
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_equal(keras.tree.flatten(run(loaded, batch)), [*hidden, logits])

    if precision in ("float32", "mixed_bfloat16") and ON_TENSORFLOW:  # on JAX that starts TensorFlow
        report = keras_mp.export_float32(model, tmp_path / "saved_model", verify=batch)
        assert report.low_precision_ops == 0
