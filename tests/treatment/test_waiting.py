"""Changes of a model that is not built wait for its first batch, and are then those of a built one, bit for bit."""

import pickle

import keras
import numpy as np
import pytest
from keras import layers

import keras_mp

LOSS = "sparse_categorical_crossentropy"
EAGERLY = {"run_eagerly": keras.backend.backend() == "tensorflow"}  # which takes less time than to trace a step
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@keras.saving.register_keras_serializable("tests_waiting")
class Net(keras.Model):
    """Makes half of its layers when it is built, and has a step of its own."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.norm, self.drop, self.classes = (
            layers.LayerNormalization(),
            layers.Dropout(0.2),
            layers.Dense(5, "softmax"),
        )

    def build(self, shape):
        self.first = layers.Dense(32, "gelu")
        self.first.build(shape)
        self.norm.build((*shape[:-1], 32))
        self.classes.build((*shape[:-1], 32))

    def call(self, x, training=False):
        return self.classes(self.drop(self.norm(self.first(x)), training=training))

    def train_step(self, *arguments):
        return super().train_step(*arguments)


class Plain(keras.Model):
    """Keras builds it by a call on shapes."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or layers.Dense(16, "gelu")
        self.classes = layers.Dense(5, "softmax")

    def call(self, x):
        return self.classes(self.inner(x))


def sequential():
    return keras.Sequential([layers.Dense(32, "gelu"), layers.BatchNormalization(), layers.Dense(5, "softmax")])


def data():
    x = np.random.default_rng().normal(size=(48, 16)).astype("float32")
    return x, x[:, :5].argmax(1).astype("int32")


def prepared(make, policy, built, **arguments):
    keras.utils.set_random_seed(3)
    keras_mp.set_global_policy(policy)
    model = make()
    if built:
        model(np.zeros((1, 16), "float32"))
    return keras_mp.prepare(model, "adam", LOSS, metrics=["accuracy"], **arguments)


def state(model):
    return [keras.ops.convert_to_numpy(variable) for variable in [*model.variables, *model.optimizer.variables]]


def assert_same(some, others):
    assert [array.dtype for array in some] == [array.dtype for array in others]
    np.testing.assert_equal(some, others)


def fit(model, x, y):
    return model.fit(x, y, batch_size=16, shuffle=False, verbose=0).history


FIRST = {
    "fit": fit,
    "train_on_batch": lambda model, x, y: model.train_on_batch(x, y),
    "evaluate": lambda model, x, y: model.evaluate(x, y, verbose=0),
    "predict": lambda model, x, y: model.predict(x, batch_size=16, verbose=0).tolist(),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch(x).tolist(),
    "call": lambda model, x, y: keras.ops.convert_to_numpy(model(x)).tolist(),
    "build": lambda model, x, y: model.build((None, 16)),
}


@pytest.mark.parametrize(
    ("make", "policy", "first"),
    [
        pytest.param(Net, "mixed_float16", "fit", marks=pytest.mark.jax),
        pytest.param(Net, "mixed_float16", "predict", marks=pytest.mark.jax),
        (Net, "mixed_float16", "call"),
        (sequential, "mixed_bfloat16", "train_on_batch"),
        (sequential, "mixed_bfloat16", "predict_on_batch"),
        pytest.param(sequential, "mixed_bfloat16", "build", marks=pytest.mark.jax),
        (Plain, "bfloat16", "evaluate"),
    ],
)
def test_the_same_bits_as_of_a_built_model(make, policy, first):
    x, y = data()
    ready, waiting = (prepared(make, policy, built, **({} if first == "fit" else EAGERLY)) for built in (True, False))
    assert not keras_mp.report(ready).waiting and keras_mp.report(waiting).waiting == ("prepare",)
    before = None if first == "build" else FIRST[first](ready, x, y)
    assert FIRST[first](waiting, x, y) == before
    assert not keras_mp.report(waiting).waiting
    if first != "fit":
        assert fit(ready, x, y) == fit(waiting, x, y)
    assert_same(state(ready), state(waiting))
    assert ready.jit_compile == waiting.jit_compile and type(ready.optimizer) is type(waiting.optimizer)


@pytest.mark.parametrize(
    "change",
    [
        keras_mp.stabilize,
        lambda model: keras_mp.convert(model, "delayed", select=lambda path, layer: True),
        keras_mp.lean.make_lean,
    ],
)
def test_each_change_by_itself_waits(change, capsys):
    x, y = data()
    models = []
    for built in (True, False):
        keras.utils.set_random_seed(3)
        keras_mp.set_global_policy("mixed_bfloat16")
        model = Plain()
        if built:
            model(x)
        models.append(change(model))
        model.compile("adam", LOSS, **EAGERLY)
        fit(model, x, y)
    assert_same(*map(state, models))
    assert f"model {model.name!r} is not built yet. fit builds it" in capsys.readouterr().out


def test_saved_loaded_pickled_and_cloned_it_still_waits(tmp_path):
    x, y = data()
    model = prepared(Net, "mixed_float16", False, state_dtype="bfloat16", **EAGERLY)
    model.save(tmp_path / "model.keras")
    clone, pickled = keras.models.clone_model(model), pickle.loads(pickle.dumps(model))
    keras.config.set_dtype_policy("float32")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    clone.compile(keras_mp.LossScaleOptimizer(keras.optimizers.Adam()), LOSS, **EAGERLY)
    for other in (loaded, pickled, clone):
        assert keras_mp.report(other).waiting == ("prepare",)
        fit(other, x, y)
        dtypes = {layer.name.rstrip("_0123456789"): layer.compute_dtype for layer in other.layers}
        assert dtypes["layer_normalization"] == "float32" and dtypes["dropout"] == "float16"
        assert type(other.optimizer) is keras_mp.LossScaleOptimizer
    assert loaded.optimizer.state_dtype == pickled.optimizer.state_dtype == "bfloat16"
    assert {loaded.first.compute_dtype, pickled.first.compute_dtype} == {"float16"}


def test_a_sequential_model_that_waits_is_not_cloned_into_one_that_does_not():
    model = prepared(sequential, "mixed_bfloat16", False)
    with pytest.raises(ValueError, match="clone_model makes a plain Sequential"):
        keras.models.clone_model(model)
    assert keras_mp.report(type(model).from_config(model.get_config())).waiting == ("prepare",)


def test_what_waits_is_reverted_before_the_first_batch():
    x, y = data()
    model = keras_mp.revert(prepared(sequential, "mixed_bfloat16", False, **EAGERLY))
    assert type(model) is keras.Sequential and not fit(model, x, y)["loss"][0] > 9
    assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}
    model = keras_mp.revert(prepared(sequential, "mixed_bfloat16", False, **EAGERLY), "stabilize")
    fit(model, x, y)
    assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}


def test_it_is_prepared_with_what_it_is_compiled_with_by_then():
    model = prepared(sequential, "mixed_float16", False)
    model.compile("sgd", LOSS)
    fit(model, *data())
    assert type(model.optimizer) is keras_mp.LossScaleOptimizer
    assert type(model.optimizer.inner_optimizer) is keras.optimizers.SGD


def test_a_model_within_one_that_waits_or_is_called_first():
    x, y = data()
    keras_mp.set_global_policy("mixed_bfloat16")
    model = keras_mp.prepare(Plain(keras_mp.stabilize(sequential())), "adam", LOSS, **EAGERLY)
    fit(model, x, y)
    assert not keras_mp.report(model.inner).waiting
    model = Plain(keras_mp.stabilize(sequential()))
    model(x)
    assert not keras_mp.report(model.inner).waiting


@pytest.mark.jax
def test_never_another_model_without_a_word():
    x, y = data()
    keras_mp.set_global_policy("mixed_bfloat16")
    model = Plain(keras_mp.stabilize(sequential()))
    model.compile("adam", LOSS)
    with pytest.raises(ValueError, match="waits for its first batch, for stabilize, and is called in a program"):
        fit(model, x, y)


@pytest.mark.jax
def test_a_generator_loses_no_batch():
    x, y = data()
    states = []
    for built in (True, False):
        model = prepared(Plain, "mixed_bfloat16", built, **EAGERLY)
        model.fit(((x[at : at + 16], y[at : at + 16]) for at in (0, 16, 32)), verbose=0)
        states.append(state(model))
    assert_same(*states)


def test_a_training_that_resumes(tmp_path):
    x, y = data()
    states = []
    for built, ends in ((True, [2]), (False, [1, 2])):
        for epochs in ends:
            batches = keras_mp.training.ShuffledBatches(x, y, batch_size=24, seed=0)
            model = prepared(Plain, "mixed_bfloat16", built, **EAGERLY)
            checkpoint = keras_mp.TrainingCheckpoint(tmp_path / str(built), batches)
            model.fit(batches, epochs=epochs, shuffle=False, verbose=0, callbacks=[checkpoint])
        states.append(state(model))
    assert_same(*states)


class Fails(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)

    def call(self, x):
        return self.dense(x[: int(keras.ops.convert_to_numpy(keras.ops.sum(x * 0))) + 8])


class OwnCompile(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)

    def compile(self, optimizer, weight):
        super().compile(optimizer, "mse")
        self.twice = 2 * weight

    def call(self, x):
        return self.dense(x)


def test_what_cannot_wait_is_refused():
    x, y = data()
    model = keras_mp.prepare(Fails(), "adam", LOSS)
    with pytest.raises(Exception, match="its call\\(\\) fails on shapes alone"):
        fit(model, x, y)
    with pytest.raises(TypeError, match="compile\\(\\) of OwnCompile does not keep every argument"):
        keras_mp.prepare(OwnCompile(), "adam", weight=2.0)
    with pytest.raises(ValueError, match="has no call\\(\\)"):
        keras_mp.stabilize(keras.Model())
    with pytest.raises(ValueError, match="state_dtype='int3'"):
        keras_mp.prepare(sequential(), "adam", LOSS, state_dtype="int3")
