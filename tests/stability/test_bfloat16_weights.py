"""stabilize on models whose weights are bfloat16, too: what it protects has float32 weights."""

import keras
import numpy as np
from arrays import values
from twins import twin

import keras_mp
from keras_mp.conversion.to_float32 import in_float32


def model_with_bfloat16_weights():
    keras.config.set_dtype_policy("bfloat16")
    try:
        ids = keras.Input((4,), dtype="int32")
        x = keras.layers.Embedding(11, 8)(ids)
        x = keras.layers.LayerNormalization(name="normalized")(x)
        x = keras.layers.Dense(8, "softmax", name="middle")(x)
        x = keras.layers.BatchNormalization(name="batch")(x)
        return keras.Model(ids, keras.layers.Dense(5, name="last")(x))
    finally:
        keras.config.set_dtype_policy("float32")


def dtypes(model):
    return {variable.path: keras.backend.standardize_dtype(variable.dtype) for variable in model.weights}


def test_what_is_protected_has_float32_weights(tmp_path):
    model = model_with_bfloat16_weights()
    draw = np.random.default_rng()
    for variable in model.weights:
        variable.assign(draw.uniform(0.5, 1.5, variable.shape))
    stable = keras_mp.stabilize(twin(model))
    before, after = dtypes(model), dtypes(stable)
    assert set(before.values()) == {"bfloat16"} and before.keys() == after.keys()
    wide = {path for path, dtype in after.items() if dtype == "float32"}
    assert wide == {path for path in after if path.startswith(("normalized", "batch"))}
    np.testing.assert_equal(values(stable.weights), values(model.weights))

    ids = draw.integers(0, 11, (3, 4))
    stable.save(tmp_path / "stable.keras")
    loaded = keras.saving.load_model(tmp_path / "stable.keras")
    assert dtypes(loaded) == after
    again = keras_mp.stabilize(twin(stable))
    assert dtypes(again) == after
    result = stable.predict_on_batch(ids)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(loaded.predict_on_batch(ids), result)
    np.testing.assert_array_equal(again.predict_on_batch(ids), result)


def test_all_weights_are_float32_for_a_while_and_then_what_they_were():
    stable = keras_mp.stabilize(model_with_bfloat16_weights())
    ids = np.random.default_rng().integers(0, 11, (3, 4))
    before = (dtypes(stable), [id(weight) for weight in stable.weights], keras.ops.convert_to_numpy(stable(ids)))
    with in_float32(stable):
        assert set(dtypes(stable).values()) == {"float32"}
        wide = keras.ops.convert_to_numpy(stable(ids))
    assert (dtypes(stable), [id(weight) for weight in stable.weights]) == before[:2]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(stable(ids)), before[2])
    np.testing.assert_allclose(wide, before[2], atol=0.05)
    assert np.any(wide != before[2])
