"""The rules of tensor parallelism stand with the models, and go with them."""

import keras
import numpy as np
import pytest

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lowering import lower_step
from keras_mp.parallel.plan import Plan
from keras_mp.parallel.split_rules import check_rules, rules_of_layout_map, takes_rules, with_rules_of
from models.gpt import gpt
from models.llama import LlamaSize, llama
from models.resnet import resnet_cifar
from models.text_classifier import text_classifier
from models.transformer import Size
from models.vit import vit

SMALL = Size(2, 16, 2)
BUILDS = {
    "gpt": lambda **options: gpt(SMALL, vocabulary=32, length=8, **options),
    "llama": lambda **options: llama(LlamaSize(2, 16, 2, 1, 24, 32), length=8, **options),
    "text_classifier": lambda **options: text_classifier(SMALL, vocabulary=32, length=8, **options),
    "vit": lambda **options: vit(SMALL, 10, (8, 8, 3), patch=4, **options),
}
PLAN = Plan("tensor", (), (1, 2))


def split(model, plan=PLAN):
    """The paths of the variables that are split, with the axes."""
    plan = with_rules_of(plan, model)
    axes = {v.path: plan.axes_of(v.path, tuple(v.shape), str(v.dtype)) for v in model.variables}
    return {path: each for path, each in axes.items() if any(each)}


def expected(model):
    """What Megatron-LM splits: of a block all kernels and the biases of two, and the embedding of the words."""
    axes = {}
    for variable in model.variables:
        name = "/".join(variable.path.split("/")[-3:])
        if not variable.path.endswith(("kernel", "bias", "embeddings")) or "patches" in name or "logits" in name:
            continue
        if any(part in name for part in ("query_key_value", "dense_1/", "gate/", "up/", "reverse")):
            axes[variable.path] = ("model",) if name.endswith("bias") else (None, "model")
        elif name.endswith("kernel") or "tokens_embedding" in name:
            axes[variable.path] = ("model", None)
    return axes


@pytest.mark.parametrize("name, remat", [("gpt", False), ("text_classifier", False), ("vit", False), ("llama", True)])
def test_the_transformers_of_the_repository_are_split_as_megatron_splits_them(name, remat):
    model = BUILDS[name](remat=remat)
    assert split(model) == expected(model)
    # Of a block six; Llama has five kernels and no bias, and besides the words an output layer of its own.
    assert len(split(model)) == {"vit": 12, "llama": 2 * 5 + 2}.get(name, 12 + 1)


def test_rules_survive_stabilize_convert_and_a_model_around():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = BUILDS["vit"]()
    before = split(model)
    model = keras_mp.convert(keras_mp.stabilize(model), select=lambda path, layer: "dense" in path)
    assert split(model) == before
    around = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Rescaling(0.5), model])
    assert split(around) == before
    assert split(keras_mp.stabilize(around)) == before


def test_a_model_with_rules_is_saved_and_loaded_without_them(tmp_path):
    @keras_mp.parallel.tensor_rules([["hidden[/_]kernel", (None, "model")]])  # lists will do
    def build():
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="hidden")])

    model = build()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    assert split(model) == {model.layers[0].kernel.path: (None, "model")}
    with pytest.raises(
        ValueError, match=r"because no rule says which: pass rules=.* or put @keras_mp.parallel.tensor_rules"
    ):
        split(loaded)


def test_a_model_without_rules_is_told_what_to_give():
    with pytest.raises(ValueError, match="strategy='tensor' splits no weight of this model, because no rule says"):
        split(resnet_cifar(8, 10, (8, 8, 3), 4))
    model = BUILDS["vit"]()
    with pytest.raises(ValueError, match="none has one of the patterns 'hidden' in its path"):
        split(model, Plan("tensor", (), (1, 2), rules=(("hidden", (None, "model")),)))


def test_a_scope_takes_the_rules_of_each_model_once_and_ends():
    plan = Plan("tensor", (), (1, 2))
    with takes_rules(plan):
        BUILDS["vit"]()
        BUILDS["vit"]()
        BUILDS["gpt"]()
    BUILDS["text_classifier"]()
    assert plan.declared == [*dict.fromkeys(BUILDS["gpt"]().tensor_rules)]
    assert plan == Plan("tensor", (), (1, 2)) and PLAN.declared == []


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="TensorFlow has data parallelism only")
@pytest.mark.slow
@pytest.mark.jax
def test_a_step_for_devices_that_are_not_there_is_split_by_the_models_rules():
    def step_of(model):
        model.compile("adamw", "sparse_categorical_crossentropy")
        tensors = keras.KerasTensor((4, 8, 8, 3), "float32"), keras.KerasTensor((4,), "int32")
        return lower_step(model, tensors, training=True, chip=TracedChip("cpu"), plan=PLAN)

    parts = {argument.path: argument.parts for argument in step_of(BUILDS["vit"]()).arguments}
    slots = [count for path, count in parts.items() if "block1_dense_1_kernel" in path]
    assert parts["block1_dense_1/kernel"] == 2 and slots == [2, 2]
    assert parts["block1_dense_2/bias"] == 1
    with pytest.raises(ValueError, match="because no rule says which"):
        step_of(resnet_cifar(8, 10, (8, 8, 3), 4))


@pytest.mark.parametrize(
    "rule", ["kernel", ("(", ("model",)), ("kernel", "model"), ("kernel", ("rows",)), ("kernel", ["model"]), 3]
)
def test_a_rule_that_is_none_is_named(rule):
    for given in ((rule,), [[r"bias", ("model",)], rule]):
        with pytest.raises(ValueError, match="rules holds .* must be a regular expression and, for each dimension"):
            check_rules(given)
    with pytest.raises(ValueError, match="rules holds"):
        keras_mp.parallel.tensor_rules((rule,))


def test_a_function_that_returns_no_layout_map_is_named():
    with pytest.raises(
        ValueError, match="rules=<function .* returned 3, and must return a keras.distribution.LayoutMap"
    ):
        rules_of_layout_map(lambda mesh, **names: 3, Plan("tensor", ("cpu:0", "cpu:1"), (1, 2)))
