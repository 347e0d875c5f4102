import warnings

import keras
import numpy as np
import pytest
from jitted_programs import step_scope
from keras import layers
from twins import twin

import keras_mp
from keras_mp.precision.policy import choose_policy
from keras_mp.rebuild.walk import layers_by_path

JAX = keras.backend.backend() == "jax"
LOSS = "sparse_categorical_crossentropy"
EVERYTHING = {"scaling": "current", "select": lambda path, layer: True}


def set_policy(precision):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not the fastest here
        return keras_mp.set_global_policy(precision)


def build():
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32, "gelu", name="first"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.2, name="dropout"),
            layers.Dense(16, "softmax", name="classes"),
        ]
    )


def data():
    x = np.random.default_rng().normal(size=(48, 16)).astype("float32")
    return x, (x.argmax(axis=1)).astype("int32")


def by_hand(precision):
    choice = set_policy(precision)
    model = keras_mp.stabilize(build())
    if precision == "fp8":
        model = keras_mp.convert(model, **EVERYTHING)
    optimizer = keras_mp.loss_scaling.wrap_optimizer(keras.optimizers.Adam(0.01), model)
    model.compile(optimizer, LOSS, metrics=["accuracy"], jit_compile=choice.jit_compile)
    return keras_mp.loss_scaling.atomic_skip(model) if isinstance(optimizer, keras_mp.LossScaleOptimizer) else model


def by_prepare(precision):
    set_policy(precision)
    fp8 = EVERYTHING if precision == "fp8" else False
    return keras_mp.prepare(build(), keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"], fp8=fp8)


def trained(make, precision, x, y):
    keras.utils.set_random_seed(7)
    model = make(precision)
    history = [model.train_on_batch(x[at : at + 16], y[at : at + 16]) for at in (0, 16, 32)]
    variables = [*model.variables, *model.optimizer.variables]
    return model, history, [keras.ops.convert_to_numpy(variable) for variable in variables]


@pytest.mark.parametrize("precision", ["mixed_float16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_the_same_bits_as_the_calls_that_it_stands_for(precision):
    x, y = data()
    with step_scope():  # which `prepare` alone has
        hand, hand_history, expected = trained(by_hand, precision, x, y)
    model, history, variables = trained(by_prepare, precision, x, y)
    assert history == hand_history
    assert type(model.optimizer) is type(hand.optimizer) and model.jit_compile == hand.jit_compile
    assert len(variables) == len(expected)
    for actual, value in zip(variables, expected, strict=True):
        assert actual.dtype == value.dtype
        np.testing.assert_array_equal(actual, value)


def test_an_optimizer_with_a_loss_scale_of_its_own_is_used_as_it_is():
    set_policy("mixed_float16")
    optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.SGD(), keras_mp.LossScale.static(4.0))
    assert keras_mp.prepare(build(), optimizer, LOSS).optimizer is optimizer


def test_the_arguments_of_compile_are_passed_on_and_win():
    choice = set_policy("float32")
    model = keras_mp.prepare(build(), "sgd", LOSS, steps_per_execution=3, jit_compile=not choice.jit_compile)
    assert model.jit_compile is not choice.jit_compile and model.steps_per_execution == 3
    model = keras_mp.prepare(build(), "sgd", LOSS, run_eagerly=True, weighted_metrics=["accuracy"])
    assert model.jit_compile is False
    assert model.test_on_batch(*data(), return_dict=True).keys() == {"loss", "accuracy"}


def test_fp8_of_a_model_that_computes_in_fp8_already_stays():
    set_policy("fp8")
    model = keras_mp.convert(build(), "delayed", select=lambda path, layer: layer.name == "first")
    prepared = keras_mp.prepare(twin(model), "sgd", LOSS)
    assert [str(layer.scaling) for layer in layers_by_path(prepared).values() if hasattr(layer, "scaling")] == [
        "Scalings.named('delayed')"
    ]


def test_wrong_fp8():
    set_policy("fp8")
    for fp8, error, said in (
        ("fast", ValueError, "fast"),
        (3, TypeError, "fp8=3"),
        ({"recipes": 1}, TypeError, "recipes"),
    ):
        for model in (build(), keras.Sequential([keras.layers.Dense(2)])):  # of one that waits, it is said at once
            with pytest.raises(error, match=said):
                keras_mp.prepare(model, "sgd", LOSS, fp8=fp8)


def said(capsys, model, **arguments):
    keras_mp.prepare(model, keras.optimizers.Adam(), LOSS, verbose=True, **arguments)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 80
    labels = [line.split(maxsplit=1) for line in lines]
    assert [label for label, _ in labels] == ["precision", "float32", "fp8", "optimizer", "jit"]
    return dict(labels)


def test_it_says_in_five_lines_what_it_did(capsys):
    set_policy("mixed_float16")
    lines = said(capsys, build())
    assert lines["precision"] == "computes in float16, trains float32 weights (its layers' policy)"
    assert lines["float32"] == "norm and classes: there float16 is too imprecise"
    assert lines["fp8"] == "not used"
    assert lines["optimizer"] == "Adam, loss scale 32768, for float16; an overflow changes nothing"
    assert lines["jit"].startswith("on: " if choose_policy().jit_compile else "off: ")


def test_it_says_what_it_did_in_bfloat16_float32_and_fp8(capsys):
    set_policy("float32")
    lines = said(capsys, build(), run_eagerly=True)
    assert lines["precision"] == "computes in float32 (its layers' policy)" and lines["float32"] == "everything"
    assert lines["optimizer"] == "Adam, loss not scaled: no layer computes in float16"
    assert lines["jit"] == "off: run_eagerly=True"
    set_policy("mixed_bfloat16")
    lines = said(capsys, build(), fp8=EVERYTHING, state_dtype="float8")
    assert lines["fp8"] == "products of first and classes"
    assert lines["optimizer"] == "Adam, states in float8, loss not scaled"
    keras.config.set_dtype_policy("bfloat16")
    assert "trains bfloat16 weights" in said(capsys, build())["precision"]


def test_a_model_of_long_names_is_told_in_80_columns(capsys):
    set_policy("mixed_bfloat16")
    inputs = x = keras.Input((16,))
    for index in range(12):
        x = layers.LayerNormalization(name=f"a_normalization_with_a_very_long_name_of_its_own_{index}")(x)
    lines = said(capsys, keras.Model(inputs, x))
    assert "12 layers" in lines["float32"]


def test_a_model_built_before_the_policy_was_set_is_named(capsys):
    model = build()
    set_policy("mixed_bfloat16")
    assert "built before" in said(capsys, model)["precision"]


@pytest.mark.jax
@pytest.mark.skipif(not JAX, reason="TensorFlow has no jitted kernels for it")
def test_augmentation_is_jitted_on_jax():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.RandomTranslation(0.1, 0.1),
            layers.RandomRotation(0.1),
            layers.RandomZoom(0.1),
            layers.RandomPerspective(0.1),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    prepared = keras_mp.prepare(twin(model), "sgd", "mse")
    assert prepared.jit_compile is True
    prepared.fit(np.ones((4, 8, 8, 3), "float32"), np.ones((4, 2), "float32"), verbose=0)


def test_metrics_by_output_are_those_of_compile():
    x = keras.Input((3,))
    outputs = {name: keras.layers.Dense(1, name=name)(x) for name in ("left", "mse")}
    model = keras_mp.prepare(keras.Model(x, outputs), "sgd", "mse", metrics={"left": ["mae"]}, run_eagerly=True)
    targets = {name: np.ones((4, 1), "float32") for name in outputs}
    logs = model.test_on_batch(np.ones((4, 3), "float32"), targets, return_dict=True)
    assert "left_mae" in logs and "mse_mae" not in logs


@keras.saving.register_keras_serializable("test_prepare")
class WithoutPolicy(keras.Model):
    """A model whose config says nothing of the policy under which its layers are made."""

    def __init__(self, units=8, **kwargs):
        super().__init__(**kwargs)
        self.units, self.first = units, keras.layers.Dense(units, "relu")

    def build(self, shape):
        self.first.build(shape)
        self.second = keras.layers.Dense(1)
        self.second.build((None, self.units))
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    def get_config(self):
        return {"units": self.units, "name": self.name}


@pytest.mark.filterwarnings("ignore:stabilize")
def test_layers_that_a_models_own_code_makes_are_loaded_in_their_policy(tmp_path):
    with keras_mp.set_global_policy("mixed_float16"):
        model = WithoutPolicy()
        x = np.random.default_rng().normal(size=(8, 4)).astype("float32")
        model(x)
        keras_mp.prepare(model, "adam", "mse").save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert keras.config.dtype_policy().name == "float32"
    for name in ("first", "second"):
        was, now = getattr(model, name).compute_dtype, getattr(loaded, name).compute_dtype
        assert was == now and (name == "second" or now == "float16")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_report_of_many_long_names_shows_the_first_and_counts_the_others():
    set_policy("mixed_float16")
    inputs = x = keras.Input((4,))
    for end in "abcdefghijk":
        x = layers.Dense(4, "softmax", name=f"a_layer_of_a_rather_long_name_{end}")(x)
    said = " ".join(str(keras_mp.report(keras.Model(inputs, x))).split())
    assert "rather_long_name_h and 2 other names: the softmax exponentiates and sums in float16" in said
