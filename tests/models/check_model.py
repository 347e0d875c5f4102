"""What every model must do in every precision: one function, called by the test of each model."""

import importlib.util

import keras
import numpy as np
from twins import twin

import keras_mp
from keras_mp.stability.sensitive import sensitive_layers

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def check_model(build, batch, precision, folder, export=ON_TENSORFLOW):
    """Builds, stabilizes, trains for a step, saves, loads and exports a model, and asserts what must hold throughout.

    Args:
        build: a function that makes the model, under the global policy, with `Add` layers on its residual path.
        batch: one input batch.
        precision: the dtype policy.
        folder: the folder to write to.
        export: whether to export; on JAX that starts TensorFlow in a process of its own, 10 seconds.
    """
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
    model.save(folder / "model.keras")
    loaded = keras.saving.load_model(folder / "model.keras", compile=False)
    for ours, theirs in zip(keras.tree.flatten(run(loaded, batch)), [*hidden, logits], strict=True):
        np.testing.assert_array_equal(ours, theirs)

    if export and importlib.util.find_spec("tensorflow"):
        report = keras_mp.export_float32(model, folder / "saved_model", verify=batch)
        assert report.low_precision_ops == 0


def run(model, batch):
    """What each residual addition gave, and the output, as NumPy arrays."""
    hidden = [layer.output for layer in model.layers if isinstance(layer, keras.layers.Add)]
    both = keras.Model(model.inputs, [hidden, model.output])
    if ON_TENSORFLOW:  # a graph would take longer to build than it saves
        return keras.tree.map_structure(keras.ops.convert_to_numpy, both(batch, training=False))
    both.jit_compile = True
    return both.predict(batch, verbose=0)
