import keras
import numpy as np
import pytest
import zoo
from arrays import values
from keras import layers

from keras_mp.conversion.to_float32 import to_float32
from keras_mp.export.verification import relative_difference
from keras_mp.rebuild.model import rebuild
from keras_mp.rebuild.walk import RebuildError, layers_by_path

TENSORFLOW = keras.backend.backend() == "tensorflow"  # where a step runs eagerly: to trace it takes longer


def unchanged(node, layer):
    return node


@pytest.mark.parametrize("name", zoo.names())
def test_unchanged_rebuild_computes_the_same(name):
    model, batch = zoo.build(name, "mixed_bfloat16")
    before = values(model.weights)
    new, unreached, _ = rebuild(model, unchanged)
    assert unreached == ()
    assert new is not model
    assert not {id(w) for w in new.weights} & {id(w) for w in model.weights}
    assert len(new.weights) == len(model.weights)
    assert relative_difference(new(batch, training=False), model(batch, training=False)) == 0.0
    np.testing.assert_equal(values(model.weights), before)  # the original is left alone
    for old, rebuilt in zip(layers_by_path(model).values(), layers_by_path(new).values(), strict=True):
        assert old.compute_dtype == rebuilt.compute_dtype


def test_shared_layer_stays_one_layer():
    model, _ = zoo.build("nested_and_shared", "mixed_float16")
    new = rebuild(model, unchanged).model
    assert new.get_layer("first").get_layer("shared") is new.get_layer("second").get_layer("shared")


def test_layer_shared_by_two_graphs_is_copied_and_named():
    shared = layers.Dense(4, name="shared")
    inner_inputs, inputs = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model(inner_inputs, layers.ReLU()(shared(inner_inputs)), name="inner")
    model = keras.Model(inputs, shared(inner(shared(inputs))))
    new, unreached, unshared = rebuild(model, unchanged)
    assert unreached == () and unshared == ("shared",)
    batch = zoo.normal(3, 4)
    assert relative_difference(new(batch), model(batch)) == 0.0


def test_adapted_state_and_custom_state_arrive():
    model, _ = zoo.build("custom_layers", "mixed_bfloat16")
    counts = next(layer for layer in model.layers if isinstance(layer, zoo.Counts))
    counts.seen = 17
    new = rebuild(model, unchanged).model
    assert next(layer for layer in new.layers if isinstance(layer, zoo.Counts)).seen == 17


class TwoOfOneName(layers.Layer):
    """Two weights of one shape and one name, as layers that add weights in a loop have."""

    def build(self, input_shape):
        self.factors = [self.add_weight(shape=(3,), name="factor", initializer="uniform") for _ in range(2)]

    def call(self, inputs):
        return inputs * self.factors[0] + self.factors[1]


def test_weights_of_one_name_arrive_in_their_order():
    model = keras.Sequential([keras.Input((3,)), TwoOfOneName()])
    new = rebuild(model, unchanged).model
    np.testing.assert_equal(values(new.weights), values(model.weights))


def test_seed_state_arrives():
    model = keras.Sequential([keras.Input((64,)), layers.Dropout(0.5, seed=3)])
    batch = np.ones((4, 64), "float32")
    model(batch, training=True)  # moves the seed
    new = rebuild(model, unchanged).model
    assert relative_difference(new(batch, training=True), model(batch, training=True)) == 0.0


def compiled(policy, **settings):
    model, batch = zoo.build("nested_and_shared", policy)
    metrics = ["mae", keras.metrics.MeanSquaredError()]
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, 100)
    # On JAX, Keras's own second fit() with use_ema donates one buffer twice.
    settings = {"use_ema": TENSORFLOW, **settings}
    model.compile(keras.optimizers.AdamW(schedule, **settings), "mse", metrics=metrics, run_eagerly=TENSORFLOW)
    y = zoo.normal(len(batch), 2)
    for _ in range(3):
        model.train_on_batch(batch, y)
    return model, batch, y


@pytest.mark.jax
def test_training_goes_on_as_if_nothing_had_happened():
    model, x, y = compiled("float32", gradient_accumulation_steps=2, clipnorm=1.0)
    new, unreached, _ = rebuild(model, unchanged)
    assert unreached == ()
    model.reset_metrics()
    for _ in range(4):
        logs = [m.train_on_batch(x, y, return_dict=True) for m in (model, new)]
        assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    for a, b in zip(values(model.weights), values(new.weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_optimizer_state_survives_a_change_of_precision():
    model, _, _ = compiled("mixed_float16")
    new, unreached, _ = rebuild(model, to_float32, policy="float32")
    assert unreached == ()
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert not isinstance(new.optimizer, keras.optimizers.LossScaleOptimizer)
    np.testing.assert_equal(values(new.optimizer.variables), values(model.optimizer.inner_optimizer.variables))


@pytest.mark.parametrize("policy, scales", [("mixed_float16", False), ("float32", True)])
def test_a_loss_in_float16_is_scaled_unless_that_was_turned_off(policy, scales):
    model = zoo.build("functional", policy)[0]
    model.compile("sgd", "mse", auto_scale_loss=scales)
    new = rebuild(model, unchanged, policy="mixed_float16").model
    assert isinstance(new.optimizer, keras.optimizers.LossScaleOptimizer) == scales


@pytest.mark.parametrize("optimizer", ["SGD", "Adafactor", "Nadam", "Muon"])
def test_slots_of_every_kind_of_optimizer_arrive(optimizer):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(4)])
    settings = {"momentum": 0.9} if optimizer == "SGD" else {}
    model.compile(getattr(keras.optimizers, optimizer)(1e-2, **settings), "mse", run_eagerly=TENSORFLOW)
    model.train_on_batch(zoo.normal(16, 8), zoo.normal(16, 4))
    new, unreached, _ = rebuild(model, unchanged)
    assert unreached == ()
    np.testing.assert_equal(values(new.optimizer.variables), values(model.optimizer.variables))


def test_slots_follow_their_weight_into_another_order():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(4, name="b")])
    model.compile("adam", "mse", run_eagerly=TENSORFLOW)
    model.train_on_batch(zoo.normal(16, 4), zoo.normal(16, 4))

    def swap(node, layer):
        if layer is not model:
            return node
        first, a, b = node["config"]["layers"]
        return {**node, "config": {**node["config"], "layers": [first, b, a]}}

    new, unreached, _ = rebuild(model, swap)
    assert unreached == ()
    assert [layer.name for layer in new.layers] == ["b", "a"]

    def tail(weight):
        return "/".join(weight.path.split("/")[-2:])

    moments = {tail(w): m for w, m in zip(model.trainable_variables, model.optimizer._momentums, strict=True)}
    expected = [moments[tail(weight)] for weight in new.trainable_variables]
    np.testing.assert_equal(values(new.optimizer._momentums), values(expected))


def test_rule_can_replace_a_class():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Softmax(name="b")])
    relu = keras.saving.serialize_keras_object(layers.ReLU(name="b"))
    new = rebuild(model, lambda node, layer: relu if isinstance(layer, layers.Softmax) else node).model
    assert isinstance(new.layers[1], layers.ReLU)


def test_what_does_not_arrive_is_named():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(4, name="b")])
    relu = keras.saving.serialize_keras_object(layers.ReLU(name="b"))
    unreached = rebuild(model, lambda node, layer: relu if getattr(layer, "name", "") == "b" else node).unreached
    assert len(unreached) == 2 and "b/kernel" in unreached[0] and "b/bias" in unreached[1]


def test_what_was_left_out_of_weight_decay_stays_out():
    """No config has it."""
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3), layers.Dense(2)])
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
    model.compile(optimizer, "mse")
    new = rebuild(model, to_float32).model
    new.optimizer.build(new.trainable_variables)
    decays = [new.optimizer._use_weight_decay(weight) for weight in new.trainable_variables]
    assert decays == [False, False, True, False]


def test_overridden_compile_is_named():
    class OwnCompile(keras.Sequential):
        def compile(self, rate):
            super().compile(keras.optimizers.SGD(rate), "mse")

    model = OwnCompile([keras.Input((4,)), layers.Dense(2)])
    model.compile(0.1)
    assert "OwnCompile overrides compile()" in rebuild(model, unchanged).unreached[0]


class WeightedLoss(keras.Model):
    """Its compile() hands on what it made of an argument, and keeps the weight as it was given."""

    def call(self, x):
        return x

    def compile(self, optimizer, loss, weight=10.0):
        self.weight = weight
        given = keras.losses.get(loss)
        super().compile(optimizer, loss=lambda y, prediction: weight * given(y, prediction))


def test_a_compile_that_changes_its_arguments_is_not_applied_twice():
    model = WeightedLoss()
    model(np.ones((2, 3), "float32"))
    model.compile("sgd", "mse")
    new, unreached, _ = rebuild(model, unchanged)
    assert not new.compiled
    assert len(unreached) == 1 and "compile the new model yourself" in unreached[0]


@keras.saving.register_keras_serializable("test_rebuild")
class Percent(layers.Layer):
    """Its config has another name and unit for its argument than its __init__."""

    def __init__(self, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def get_config(self):
        return {**super().get_config(), "percent": self.rate * 100}

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        return cls(rate=config.pop("percent") / 100, **config)

    def call(self, x):
        return self.rate * x


def test_a_from_config_that_reads_other_names_than_arguments():
    model = keras.Sequential([layers.Input((3,)), Percent(0.5)])
    assert rebuild(model, unchanged).model.layers[0].rate == 0.5


def test_losses_and_metrics_without_registration_are_carried():
    def own_loss(y, prediction):
        return keras.ops.mean(keras.ops.abs(y - prediction))

    model, batch = zoo.build("functional", "float32")
    model.compile("sgd", loss=own_loss, metrics=[lambda y, p: keras.ops.mean(p)], run_eagerly=TENSORFLOW)
    new, unreached, _ = rebuild(model, unchanged)
    assert unreached == ()
    new.train_on_batch(batch, zoo.normal(5, 3))


def test_lora_weights_arrive_unmerged():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="d")])
    model.get_layer("d").enable_lora(2)
    for weight in model.weights:
        weight.assign(zoo.normal(*weight.shape))
    new, unreached, _ = rebuild(model, unchanged)
    assert unreached == ()
    np.testing.assert_equal(values(new.weights), values(model.weights))


def test_unbuilt_model():
    with pytest.raises(RebuildError, match="'fresh' is not built.*call it once"):
        rebuild(keras.Sequential([layers.Dense(2)], name="fresh"), unchanged)


class WrongConfig(layers.Layer):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def call(self, inputs):
        return inputs

    def get_config(self):
        return {"depth": 3}


@pytest.mark.parametrize("layer", [lambda: zoo.NoConfig(object(), name="odd"), lambda: WrongConfig(3)])
def test_layers_that_cannot_be_rebuilt_are_named(layer):
    inputs = keras.Input((4,))
    odd = layer()
    model = keras.Model(inputs, odd(layers.Dense(4)(inputs)))
    policy = keras.config.dtype_policy()
    with pytest.raises(RebuildError, match=f"(?s)layer '{odd.name}' \\({type(odd).__name__}\\).*get_config"):
        rebuild(model, unchanged, policy="mixed_bfloat16")
    assert keras.config.dtype_policy() == policy


def test_float8_layers_become_plain_ones():
    policy = keras.config.dtype_policy()
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16, name="d", dtype="float8_from_mixed_bfloat16")])
    batch = zoo.normal(4, 16)
    new, unreached, _ = rebuild(model, to_float32, policy="float32")
    assert unreached == ()
    kernel = keras.ops.convert_to_numpy(model.get_layer("d").kernel)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(new(batch)), batch @ kernel, rtol=1e-5, atol=1e-5)
    assert keras.config.dtype_policy() == policy
