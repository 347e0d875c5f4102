import keras
import numpy as np
import pytest
from faults import compiled, healthy, normal
from keras import layers

import keras_mp
from keras_mp import search_policy
from keras_mp.fp8.convert import decisions

FLOAT16 = ("mixed_float16", "float32")


def two_unsafe():
    """Dense layers and normalizations, of which two Dense layers reach some 1e5."""
    inputs = x = keras.Input((8,))
    for index in range(3):
        initializer = keras.initializers.RandomNormal(stddev=1.0 if index == 1 else 1e5)
        x = layers.Dense(16, kernel_initializer=initializer, name=f"dense_{index}")(x)
        x = layers.LayerNormalization(name=f"normalization_{index}")(x)
    return compiled(keras.Model(inputs, layers.Dense(1, name="head")(x)))


def batches(count=3, size=16):
    return [(normal(size, 8), normal(size, 1)) for _ in range(count)]


@pytest.fixture(scope="module")
def searched():
    return search_policy(two_unsafe(), batches(), ("mixed_float16", "mixed_bfloat16", "float32"))


def test_exactly_the_two_unsafe_layers_are_restored(searched):
    search = searched
    assert set(search.restored) == {"dense_0", "dense_2"}
    assert set(search.restored.values()) == {"mixed_bfloat16"} and search.base == "mixed_float16"
    assert search.policy["dense_0"].name == "mixed_bfloat16" and search.policy["dense_1"].name == "mixed_float16"
    assert isinstance(search.policy, keras.dtype_policies.DTypePolicyMap)
    restored = 16 * 8 + 16 + 16 * 16 + 16  # kernels and biases
    others = 16 * 16 + 16 + 3 * 2 * 16 + 17  # of the dense layer between them, three normalizations, and the head
    assert search.shares["mixed_float16"] == pytest.approx(others / (restored + others), rel=1e-12)
    assert sum(search.shares.values()) == pytest.approx(1)
    assert not search.tried[0].passed and search.tried[0].restored == ()


def test_fp8_where_it_passes():
    model, _ = healthy()
    search = search_policy(model, batches(4, 64), tolerance=0.5)
    assert search.fp8_layers == ("first", "second", "head") and search.base == "mixed_bfloat16"
    assert search.shares["fp8"] == 1
    model = search.apply(lambda: healthy()[0])
    assert [each.path for each in decisions(model) if each.float8] == ["first", "second", "head"]


def test_a_tolerance_that_nothing_meets_gives_float32_and_says_so():
    model, _ = healthy()
    search = search_policy(model, batches(), FLOAT16, tolerance=1e-9)
    assert search.base == "float32" and search.restored == {} and search.shares["float32"] == 1
    assert "Nothing below float32 meets a tolerance of 1e-09" in search.message


def test_automatic_names_are_matched_in_order():
    def build():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.LayerNormalization(), layers.Dense(1)])
        model.layers[0].bias.assign(1e5 * np.arange(8))
        return compiled(model)

    first = build()
    search = search_policy(first, batches(), FLOAT16, tolerance=0.2)
    assert list(search.restored) == [first.layers[0].name]
    model = search.apply(build)
    assert model.layers[0].compute_dtype == "float32" and model.layers[0].name not in search.restored


def test_attention_is_one_unit_and_the_model_is_left_alone():
    inputs = keras.Input((6, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    model = compiled(keras.Model(inputs, layers.Dense(1, name="head")(x)))
    before = model.get_weights()
    search = search_policy(model, [(normal(4, 6, 8), normal(4, 6, 1))] * 2, ("mixed_bfloat16", "float32"))
    assert search.layers == ("attention", "head") and search.restored == {}
    assert model.get_layer("attention").compute_dtype == "float32"
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@keras.saving.register_keras_serializable("test_search")
class Residual(layers.Layer):
    """Adds its input, in its own precision, to what a layer inside makes of it."""

    def __init__(self, scale, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale
        initializer = keras.initializers.RandomNormal(stddev=scale)
        self.inner = layers.Dense(8, kernel_initializer=initializer, name="inner", dtype=self.dtype_policy)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return x + self.inner(x)

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}


def residuals():
    inputs = keras.Input((8,))
    x = Residual(0.1, name="small")(inputs)
    x = layers.LayerNormalization(name="normalization")(Residual(1e5, name="large")(x))
    return compiled(keras.Model(inputs, layers.Dense(1, name="head")(x)))


def test_a_layer_whose_code_cannot_mix_precisions_is_searched_as_one():
    search = search_policy(residuals(), batches(), FLOAT16)
    if keras.backend.backend() == "tensorflow":  # on JAX the sum of two dtypes is in the larger one
        assert set(search.restored) == {"large"} and search.closed == (f"{__name__}.Residual",)
        assert search.layers == ("small", "large", "normalization", "head")
        assert "Each Residual has one precision" in str(search) and search.to_dict()["closed"] == list(search.closed)
        assert search.policy["large/inner"].name == "float32" and search.policy["small/inner"].name == "mixed_float16"
    else:
        assert "large/inner" in search.restored and search.closed == ()
    model = search.apply(residuals)
    assert model.get_layer("large").inner.compute_dtype == "float32"
    assert model.get_layer("small").inner.compute_dtype == "float16"
    assert np.isfinite(model(batches()[0][0])).all()


def test_one_candidate_is_what_is_found():
    model, (x, y) = healthy()
    search = search_policy(model, (x, y), ("float32",))
    assert search.base == "float32" and "only candidate" in search.message


def test_a_policy_map_of_a_search_comes_back_as_it_is(searched, tmp_path):
    """Keras's own map without a default policy comes back with live policies turned float32."""
    back = keras.dtype_policies.DTypePolicyMap.from_config(searched.policy.get_config())
    assert back.default_policy.name == searched.policy.default_policy.name == "mixed_float16"
    assert {path: back[path].name for path in back} == {path: searched.policy[path].name for path in searched.policy}
    model = searched.apply(two_unsafe)
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    dtypes = {layer.name: layer.compute_dtype for layer in model.layers}
    assert {layer.name: layer.compute_dtype for layer in loaded.layers} == dtypes
    assert dtypes["dense_0"] == "bfloat16" and dtypes["dense_1"] == "float16"
    keras.config.set_dtype_policy(back)
    by_hand = {layer.name: layer.compute_dtype for layer in two_unsafe().layers[1:]}  # but of the input
    assert by_hand == {name: dtypes[name] for name in by_hand}
