"""What `stabilize`, `convert`, `make_lean` and `prepare` do to the model that they are given, and how it is undone."""

import copy
import pickle
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import zoo
from arrays import numpy, values
from keras import layers
from twins import twin

import keras_mp
from keras_mp.rebuild.walk import layers_by_path, notes_of, treatments_of
from keras_mp.treatment.treated import Treatment, register_treatments, treat

JAX = keras.backend.backend() == "jax"


def build(policy="mixed_bfloat16"):
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((6, 16))
    x = zoo.Block(16, name="block")(layers.Dense(16, name="first")(inputs))
    x = layers.Dense(16, activation="gelu", name="second")(layers.BatchNormalization(name="norm")(x))
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="head")(x))


def batch():
    random = np.random.default_rng()
    return random.normal(size=(8, 6, 16)).astype("float32"), random.integers(0, 3, (8, 6))


def compiled(model):
    # Eagerly, which is faster than to trace so small a step.
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", run_eagerly=True)
    return model


CHANGES = {
    "stabilize": (keras_mp.stabilize, keras_mp.revert),
    "fp8": (lambda model: keras_mp.convert(model, "delayed", select=lambda path, layer: True), keras_mp.revert),
    "lean": (lambda model: keras_mp.lean.make_lean(model, remat=("block",)), keras_mp.revert),
}


def classes(model):
    return {path: type(layer) for path, layer in layers_by_path(model).items()}


@pytest.mark.jax
@pytest.mark.filterwarnings("ignore:convert")
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_the_same_model_with_the_same_weights_and_twice_is_as_once(name):
    change, _ = CHANGES[name]
    model = build()
    weights = list(model.weights)
    before = values(weights)
    assert change(model) is model
    kept = {id(weight) for weight in model.weights}
    assert {id(weight) for weight in weights} <= kept
    np.testing.assert_equal(values(weights), before)
    once = (classes(model), [id(weight) for weight in model.weights])
    assert change(model) is model
    assert (classes(model), [id(weight) for weight in model.weights]) == once


@pytest.mark.filterwarnings("ignore:convert")
@pytest.mark.parametrize("name", CHANGES)
def test_trained_changed_and_undone_it_goes_on_as_if_nothing_had_been(name):
    """Bit for bit: weights, optimizer state, and the step after."""
    change, undo = CHANGES[name]
    x, y = batch()
    model = compiled(build())
    model.train_on_batch(x, y)
    other = twin(model)
    before = (classes(model), [weight.path for weight in model.weights], vars(model.get_layer("block")).keys())
    change(model)
    assert any(notes_of(layer) for layer in layers_by_path(model).values())
    undo(model)
    assert (classes(model), [weight.path for weight in model.weights], vars(model.get_layer("block")).keys()) == before
    assert type(model) is type(other) and not any(notes_of(layer) for layer in layers_by_path(model).values())
    assert [weight.dtype for weight in model.weights] == [weight.dtype for weight in other.weights]
    np.testing.assert_equal(values(model.weights), values(other.weights))
    np.testing.assert_equal(values(model.optimizer.variables), values(other.optimizer.variables))
    assert model.train_on_batch(x, y) == other.train_on_batch(x, y)
    np.testing.assert_equal(values(model.weights), values(other.weights))


@pytest.mark.jax
def test_a_compiled_model_drops_the_step_that_it_has_traced():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((4,)), layers.LayerNormalization(), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=JAX)
    x = np.random.default_rng().normal(size=(4, 4)).astype("float32")
    model.fit(x, x[:, :2], verbose=0)
    assert model.train_function is not None
    keras_mp.stabilize(model)
    assert model.train_function is None and model.optimizer.built
    model.fit(x, x[:, :2], verbose=0)
    assert model.predict(x, verbose=0).dtype == np.float32


@pytest.mark.filterwarnings("ignore:convert")
def test_what_prepare_changes_is_settled_once_and_nothing_where_a_plan_fails(monkeypatch):
    settled, infer = [], keras_mp.treatment.change.infer_again
    monkeypatch.setattr(keras_mp.treatment.change, "infer_again", lambda *given: settled.append(infer(*given)))
    for fp8, fails in (({"select": lambda path, layer: True}, False), ({"target": "no chip"}, True)):
        model = build()
        with pytest.raises(ValueError, match="no chip") if fails else nullcontext():
            keras_mp.prepare(model, "sgd", "mse", fp8=fp8)
        assert (len(settled), model.outputs[0].dtype) == ((0, "bfloat16") if fails else (1, "float32"))
        assert fails == (not any(notes_of(layer) for layer in layers_by_path(model).values()))
        settled.clear()


@pytest.mark.filterwarnings("ignore:convert")
def test_an_optimizer_keeps_its_state_where_weights_are_added():
    x, y = batch()
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = compiled(keras.Sequential([keras.Input((6, 16)), layers.Dense(16), layers.Dense(3, "softmax")]))
    model.train_on_batch(x, y)
    old = model.optimizer
    slots = {weight.path: numpy(old._momentums[i]) for i, weight in enumerate(old._trainable_variables)}
    keras_mp.convert(model, "delayed", select=lambda path, layer: True)
    new = model.optimizer
    assert new is not old and int(new.iterations) == 1
    assert {weight.path for weight in new._trainable_variables} > slots.keys()
    for i, weight in enumerate(new._trainable_variables):
        if new._momentums[i] is not None:  # of an amax history
            np.testing.assert_array_equal(numpy(new._momentums[i]), slots.pop(weight.path))
    assert not slots
    model.train_on_batch(x, y)
    assert any(np.any(numpy(w)) for w in model.weights if "amax_history" in w.path)


def test_weights_that_become_float32_keep_their_bits_and_their_slots():
    x, y = batch()
    model = compiled(build("bfloat16"))
    model.train_on_batch(x, y)
    norm = model.get_layer("norm")
    gamma, place = norm.gamma, [v.path for v in model.optimizer._trainable_variables].index(norm.gamma.path)
    value, momentum = numpy(gamma), numpy(model.optimizer._momentums[place])
    keras_mp.stabilize(model)
    assert norm.gamma is gamma and gamma.dtype == "float32"
    np.testing.assert_array_equal(numpy(gamma), value)
    np.testing.assert_array_equal(numpy(model.optimizer._momentums[place]), momentum)
    model.train_on_batch(x, y)


def test_a_nested_model_takes_a_float32_tensor_as_it_is():
    """Its input was made for float16, in which 70016 is infinite."""
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    head = keras.Model(inputs, layers.Dense(1, use_bias=False, kernel_initializer="ones", name="large")(inputs))
    outer = keras.Input((4,))
    inner = keras.Input((1,), dtype="float16")
    tail = keras.Model(inner, layers.Identity(dtype="float32")(inner))
    model = keras.Model(outer, tail(head(outer)))
    keras_mp.treatment.change.change(model, [(head.get_layer("large"), {"result": None})])
    x = np.full((2, 4), 17504, "float32")
    np.testing.assert_array_equal(numpy(model(x)), 70016)
    assert model.outputs[0].dtype == "float32"


@pytest.fixture(scope="module")
def changed():
    """A model with every change at once, a batch, and what the model makes of it; nothing trains it."""
    model = build()
    for change, _ in CHANGES.values():
        change(model)
    x, _ = batch()
    return model, x, numpy(model(x))


@pytest.mark.filterwarnings("ignore:convert")
@pytest.mark.parametrize("way", ["copied", "pickled", "cloned"])
def test_it_comes_back(way, changed):
    """What the block's code makes is shown by no config, and is written by its place."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, x, expected = changed
    if way == "cloned":
        other = keras.models.clone_model(model)
        other.set_weights(model.get_weights())
    else:
        other = copy.deepcopy(model) if way == "copied" else pickle.loads(pickle.dumps(model))
    names = [list(getattr(notes_of(layer), "treatments", ())) for layer in layers_by_path(model).values()]
    assert [list(getattr(notes_of(layer), "treatments", ())) for layer in layers_by_path(other).values()] == names
    np.testing.assert_array_equal(numpy(other(x)), expected)


@pytest.mark.jax
def test_what_prepare_does_to_a_step_comes_back(tmp_path):
    """An overflowing batch leaves a model that was saved and loaded as it was, BatchNormalization too."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(1)])
    how = {"jit_compile": True} if JAX else {"run_eagerly": True}  # whichever takes less time
    assert keras_mp.prepare(model, "adam", "mse", **how) is model
    x = np.random.default_rng().normal(size=(8, 6)).astype("float32")
    model.fit(x, x[:, :1], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    before = values(loaded.weights)
    x[3] = 7e4  # past float16
    with pytest.warns(UserWarning, match="all steps were skipped"):
        loaded.fit(x, x[:, :1], verbose=0)
    assert int(loaded.optimizer.skipped_steps) == int(model.optimizer.skipped_steps) + 1
    np.testing.assert_equal(values(loaded.weights), before)


def test_a_name_that_is_not_known_says_so():
    model = build()
    register_treatments({"of tomorrow": Treatment()})
    treat(model.get_layer("first"), {"of tomorrow": None})
    config = model.get_config()
    from keras_mp.treatment import treated

    del treated._TREATMENTS["of tomorrow"]
    with pytest.raises(ValueError, match=r"'of tomorrow', which keras_mp [0-9.]+ does not know: load it with"):
        type(model).from_config(config)


def test_a_prepared_graph_writes_each_part_once_and_its_clone_is_prepared():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(layers.LayerNormalization()(inputs)))
    plain = type(model)
    keras_mp.prepare(model, "sgd", "mse")
    # Each part is in the layer's own config, and so are the policies.
    assert model.get_config().keys() == {"name", "layer", "treatments", "precision"}
    clone = keras.models.clone_model(model)
    assert treatments_of(clone) == treatments_of(model) != {}
    assert type(keras_mp.revert(clone)) is plain


def test_keras_quantizes_a_layer_with_treatments():
    head = keras_mp.stabilize(build()).get_layer("head")
    has = treatments_of(head)
    head.quantize("int8")
    assert head.quantization_mode == "int8" and treatments_of(head) == has != {}


def test_a_layer_that_two_models_share_is_changed_in_both():
    keras.config.set_dtype_policy("mixed_float16")
    shared = layers.LayerNormalization(name="norm")
    inputs = keras.Input((4,))
    one, two = (keras.Model(inputs, layers.Dense(2)(shared(inputs))) for _ in range(2))
    keras_mp.stabilize(one)
    assert keras_mp.stability.sensitive.sensitive_layers(one) == []
    assert [each.path.split("/")[-1] for each in keras_mp.stability.sensitive.sensitive_layers(two)] == [
        two.layers[-1].name
    ]


@pytest.mark.parametrize(
    "function",
    [
        keras_mp.stabilize,
        keras_mp.convert,
        keras_mp.lean.make_lean,
        keras_mp.revert,
        keras_mp.report,
        lambda model: keras_mp.prepare(model, "adam", "mse"),
    ],
)
def test_what_is_no_model_is_refused(function):
    given = [(layers.Dense(2), "of type Dense"), (keras.Sequential, "the class Sequential"), (None, "of type NoneType")]
    for wrong, said in given:
        with pytest.raises(TypeError, match=f"model must be a keras.Model, and is {said}"):
            function(wrong)


@pytest.mark.jax
def test_a_step_by_hand_that_does_not_scale_its_loss_is_named_in_float16():
    """Keras says nothing, and makes updates that are smaller by the loss scale."""
    model, x = zoo.build("own_step", "mixed_float16")
    keras_mp.prepare(model, "sgd", "mse")
    with pytest.warns(UserWarning, match=r"never multiplied a loss by it.*take the gradients of optimizer"):
        model.train_on_batch(x, x[:, :2])


def test_a_compile_of_its_own_that_cannot_be_called_leaves_the_model_as_it_is():
    model, _ = zoo.build("distilled", "float32")
    with pytest.raises(TypeError, match="compile.. of Student cannot be called .*'hard_loss'.*call keras_mp.stabilize"):
        keras_mp.prepare(model, "adam", "mse")
    assert not model.compiled


def test_a_class_that_is_not_registered_is_cloned_as_by_plain_keras():
    class Plain(layers.Layer):
        def __init__(self, width):
            super().__init__()
            self.norm, self.dense = layers.LayerNormalization(), layers.Dense(width)

        def call(self, x):
            return self.dense(self.norm(x))

    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((8,))
    model = keras_mp.stabilize(keras.Model(inputs, layers.Dense(2)(Plain(8)(inputs))))
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    x = np.random.default_rng().normal(size=(4, 8)).astype("float32")
    np.testing.assert_array_equal(numpy(other(x)), numpy(model(x)))
