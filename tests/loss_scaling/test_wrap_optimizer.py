import keras
import pytest
from keras import layers

import keras_mp


def tiny(policy):
    return keras.Sequential([keras.Input((2,)), layers.Dense(2), layers.Dense(2, dtype=policy)])


def test_wrap_optimizer_looks_at_every_layer():
    optimizer = keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.SGD(), tiny("mixed_float16"))
    assert isinstance(optimizer, keras_mp.LossScaleOptimizer)
    assert optimizer.loss_scale == keras_mp.LossScale()


def test_wrap_optimizer_sees_what_a_policy_map_decides():
    policies = keras.dtype_policies.DTypePolicyMap()
    policies[".*second"] = keras.DTypePolicy("mixed_float16")
    layer = [layers.Dense(2, dtype=policies, name=name) for name in ("first", "second")]
    model = keras.Sequential([keras.Input((2,)), *layer])
    assert [each.compute_dtype for each in layer] == ["float32", "float16"]
    assert isinstance(keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.SGD(), model), keras_mp.LossScaleOptimizer)


def test_weights_in_bfloat16_are_rounded_by_the_wrapper_and_in_float16_refused():
    optimizer = keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.SGD(), tiny("bfloat16"))
    assert isinstance(optimizer.loss_scale, keras_mp.LossScale.none)
    with pytest.raises(ValueError, match="is stored in float16.*'mixed_float16'"):
        keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.SGD(), tiny("float16"))
