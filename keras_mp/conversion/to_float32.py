"""Float32 models: the rule that rewrites a config, and what quantized and adapted models stand for."""

from __future__ import annotations

from typing import Any

import keras

from keras_mp.conversion.own_policy import keep_own_policies
from keras_mp.fp8.convert import plain_node as without_fp8
from keras_mp.lean.lean_model import plain_node as without_lean
from keras_mp.rebuild import Config, RebuildError, layers_by_path, rebuild
from keras_mp.rebuild.arguments import REGISTERED_NAME
from keras_mp.rebuild.merged import is_adapted

LOW_PRECISION_NAMES = frozenset({"float16", "half", "bfloat16", "mixed_float16", "mixed_bfloat16"})
# What a dtype-like string must never be mistaken for: how a thing is called.
NAMING_KEYS = frozenset({"name", "class_name", "registered_name", "module"})
# Policies that are low precision whatever their config says.
LOW_POLICY_CLASSES = frozenset({"QuantizedFloat8DTypePolicy"})
# Policies of weights that are integers: what they are dequantized to is their "source_name".
INTEGER_POLICY_CLASSES = frozenset({"AWQDTypePolicy", "GPTQDTypePolicy", "Int4DTypePolicy", "QuantizedDTypePolicy"})
# What a layer's config says of LoRA and of how it was quantized, beside its policy.
ADAPTED_KEYS = frozenset({"lora_rank", "lora_alpha", "quantization_config", "gptq_unpacked_column_size"})
FLOAT32_POLICY: Config = {
    "module": "keras",
    "class_name": "DTypePolicy",
    "config": {"name": "float32"},
    "registered_name": None,
}


def to_float32(node: Config, layer: Any) -> Config:
    """The rebuild rule of a float32 model: every dtype policy and every 16-bit dtype string becomes float32.

    FP8 layers and lean ones become plain ones. Weights that are quantized to integers stay so, and are dequantized to
    float32.
    """
    node = without_fp8(without_lean(node))
    kind = node.get("class_name")
    if kind in LOW_POLICY_CLASSES or (kind == "DTypePolicy" and _is_low(node["config"]["name"])):
        return FLOAT32_POLICY
    if kind == "DTypePolicyMap":
        policies = node["config"]["policy_map"]
        integers = any(policy.get("class_name") in INTEGER_POLICY_CLASSES for policy in policies.values())
        return {**node, "config": {**node["config"], "default_policy": "float32"}} if integers else FLOAT32_POLICY
    return {key: _value_to_float32(key, value) for key, value in node.items()}


def to_merged_float32(node: Config, layer: Any) -> Config:
    """The same without quantization and LoRA, for `rebuild(..., merge=True)`."""
    node = to_float32(node, layer)
    if node.get("class_name") in INTEGER_POLICY_CLASSES | {"DTypePolicyMap"}:
        return FLOAT32_POLICY
    return _plain(node) if isinstance(layer, keras.layers.Layer) and is_adapted(layer) else node


def _plain(node: Config) -> Config:
    """A layer's config without LoRA and quantization; also where the config stands in another that builds the layer."""
    config = {key: value for key, value in node["config"].items() if key not in ADAPTED_KEYS}
    if node.get("registered_name") == REGISTERED_NAME:
        config["layer"] = _plain(config["layer"])
    return {**node, "config": config}


def _value_to_float32(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return "float32" if key not in NAMING_KEYS and _is_low(value) else value
    if isinstance(value, (list, tuple)) and (key == "args" or "dtype" in key):
        return type(value)(_value_to_float32(key, item) for item in value)
    return value


def _is_low(name: Any) -> bool:
    return isinstance(name, str) and (name in LOW_PRECISION_NAMES or name.startswith("float8"))


# The float32 model without quantization and LoRA that a quantized or adapted model stands for.


def is_merged(model: keras.Model) -> bool:
    """Whether no layer of a model is quantized to integers or has LoRA."""
    return not any(map(is_adapted, layers_by_path(model).values()))


def merged_float32(model: keras.Model, sample: Any = None) -> keras.Model:
    """A new model in float32 whose layers have one matrix of floats each: dequantized, with LoRA's product added.

    Returns:
        The new model, not compiled.

    Raises:
        RebuildError: as `rebuild`; a layer is quantized in a mode that is not known; or a weight is not carried over.
    """
    return _whole(
        model, rebuild(model, to_merged_float32, policy="float32", sample=sample, carry_compile=False, merge=True)
    )


def unmerged_float32(model: keras.Model, sample: Any = None) -> keras.Model:
    """The same with quantization and LoRA as they are, computed by Keras in float32 from inputs that are not quantized.

    What it computes differs from `merged_float32` by rounding in float32 alone.
    """
    new = _whole(model, rebuild(model, to_float32, policy="float32", sample=sample, carry_compile=False))
    for layer in layers_by_path(new).values():
        if getattr(layer, "inputs_quantizer", None) is not None:
            layer.inputs_quantizer = None
    return new


def _whole(model: keras.Model, rebuilt: Any) -> keras.Model:
    if rebuilt.unreached:
        raise RebuildError(f"model {model.name!r} could not be carried over to float32: {'; '.join(rebuilt.unreached)}")
    return keep_own_policies(rebuilt.model)
