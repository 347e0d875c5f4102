"""Float32 models, also of quantized and adapted ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from keras_mp.backend.common.keras_patches import restored_policy
from keras_mp.fp8.convert import without_float8
from keras_mp.fp8.layers import Float8Layer
from keras_mp.lean.frozen import FROZEN
from keras_mp.lean.lean_model import LEAN
from keras_mp.rebuild.merged import is_adapted
from keras_mp.rebuild.model import rebuild
from keras_mp.rebuild.quantized_policies import (
    keep_statistics_as_computed,
    settle_policies,
    to_compute_in_float32,
)
from keras_mp.rebuild.walk import (
    FLOAT8,
    LIBRARIES,
    LOW_PRECISION,
    QAT,
    Config,
    RebuildError,
    Walk,
    compute_dtypes,
    graph_of,
    layers_by_path,
    notes_of,
    original_class,
    package_of,
    widen,
)
from keras_mp.stability.sensitive import names_in
from keras_mp.treatment.treated import ADAPTED, Treatment, register_treatments, treat, untreated_node

LOW_PRECISION_NAMES = frozenset({"float16", "half", "bfloat16", "mixed_float16", "mixed_bfloat16"})
# What a dtype-like string must never be mistaken for: how a thing is called.
NAMING_KEYS = frozenset({"name", "class_name", "registered_name", "module"})
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
    """Rewrites dtype policies and 16-bit dtype strings to float32.

    It is the rebuild rule of a float32 model. FP8 layers and lean ones become plain ones. Weights that are quantized to
    integers stay so, and are dequantized to float32.
    """
    node = untreated_node(node, (FLOAT8, *LEAN), with_options=(FROZEN,))
    kind = node.get("class_name")
    if kind == "QuantizedFloat8DTypePolicy" or (kind == "DTypePolicy" and _is_low(node["config"]["name"])):
        return FLOAT32_POLICY
    if kind == "DTypePolicyMap":
        policies = node["config"]["policy_map"]
        integers = any(policy.get("class_name") in INTEGER_POLICY_CLASSES for policy in policies.values())
        return {**node, "config": {**node["config"], "default_policy": "float32"}} if integers else FLOAT32_POLICY
    return {key: _value_to_float32(key, value) for key, value in node.items()}


def to_merged_float32(node: Config, layer: Any) -> Config:
    """The same without quantization and LoRA, for `rebuild(..., merge=True)`."""
    node = untreated_node(to_float32(node, layer), ("calibrated", FROZEN, ADAPTED))
    if node.get("class_name") in INTEGER_POLICY_CLASSES | {"DTypePolicyMap"}:
        return FLOAT32_POLICY
    adapted = isinstance(layer, keras.layers.Layer) and is_adapted(layer)
    return _plain(untreated_node(node, (QAT,))) if adapted else node


def _plain(node: Config) -> Config:
    """A config without LoRA and quantization, also within."""
    config = {key: value for key, value in node["config"].items() if key not in ADAPTED_KEYS}
    if isinstance(config.get("layer"), dict):
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
    """Whether no layer is quantized to integers or has LoRA."""
    return not any(map(is_adapted, layers_by_path(model).values()))


def merged_float32(model: keras.Model, sample: Any = None) -> keras.Model:
    """Makes a float32 model: dequantized, with LoRA added.

    It is not compiled. Its layers have one matrix of floats each.
    """
    return _whole(
        model, rebuild(model, to_merged_float32, policy="float32", sample=sample, carry_compile=False, merge=True)
    )


def unmerged_float32(model: keras.Model, sample: Any = None) -> keras.Model:
    """Makes a float32 model, with quantization and LoRA kept.

    Keras computes them in float32, from inputs that are not quantized. What it computes differs from `merged_float32`
    by rounding in float32 alone.
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


# Layers whose call makes layers: these take the policy of the layer that makes them, and not the global one.


OWN_POLICY = "own policy"
_BEFORE_CALL = {"__init__", "build", "get_config", "from_config"}


class CallsUnderOwnPolicy:
    """Lets its call make layers of its own policy."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with restored_policy(self.dtype_policy):  # type: ignore[attr-defined]
            return super().call(*args, **kwargs)  # type: ignore[misc]


def keep_own_policies(model: keras.Model) -> keras.Model:
    """Lets a new model's layers make layers of their policy."""
    for layer in filter(_makes_layers, Walk(model).every):
        treat(layer, {OWN_POLICY: None})
    return model


def _makes_layers(layer: keras.Layer) -> bool:
    """Whether a call's own code names a class of layers."""
    own = [cls for cls in original_class(layer).__mro__ if package_of(cls) not in (*LIBRARIES, "builtins")]
    methods = [value for cls in own for name, value in vars(cls).items() if name not in _BEFORE_CALL]
    calls = [inspect.unwrap(method) for method in methods if inspect.isfunction(method)]
    known = [
        place.get(name)
        for call in calls
        for name in names_in(call.__code__)
        for place in (call.__globals__, vars(keras.layers))
    ]
    return any(isinstance(cls, type) and issubclass(cls, keras.Layer) and cls not in own for cls in known)


register_treatments({OWN_POLICY: Treatment(lambda original, names: CallsUnderOwnPolicy)})


# A model that computes in float32 for a while, in place: what its own precision is judged against.


def computes_in_float32(model: keras.Model) -> bool:
    """Whether every layer of a model computes in float32."""
    return compute_dtypes(model) == {"float32"}


@contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Lets a model compute in float32 throughout, for a while.

    Afterwards it is what it was, bit for bit. Meanwhile dtype policies, what treated layers multiply in, 16-bit
    weights, and the dtypes that functional graphs and Sequential models cast their inputs to are float32, and FP8
    layers compute as plain ones. Steps that were traced before are not affected.
    """
    layers = Walk(model).every
    plain = not any(isinstance(layer, Float8Layer) or _low_inputs(layer) for layer in layers)
    with restored_policy("float32"), ExitStack() as after:  # which layers take that a call makes
        if computes_in_float32(model) and plain:
            yield
            return
        after.enter_context(without_float8(model))
        for layer, policies in settle_policies(model):
            after.callback(setattr, layer, "_dtype_policy", policies)
        for layer in layers:
            after.enter_context(_computing_in_float32(layer))
        for variable in model.variables:
            if keras.backend.standardize_dtype(variable.dtype) in LOW_PRECISION:
                # Private, as in `widen`.
                after.callback(vars(variable).update, {"_dtype": variable._dtype, "_value": variable._value})
                widen(variable)
        yield


@contextmanager
def _computing_in_float32(layer: Any) -> Iterator[None]:
    notes, policy = notes_of(layer), layer._dtype_policy
    precision = "" if notes is None else notes.precision
    inputs = _low_inputs(layer)
    dtypes = [x._dtype for x in inputs]  # private, as neither has a public way to become wider
    try:
        to_compute_in_float32(layer)
        if notes is not None:
            notes.precision = "float32"
        for x in inputs:
            x._dtype = "float32"
        keep_statistics_as_computed(layer)
        yield
    finally:
        layer._dtype_policy = policy
        if notes is not None:
            notes.precision = precision
        for x, dtype in zip(inputs, dtypes, strict=True):
            x._dtype = dtype
        keep_statistics_as_computed(layer)


def _low_inputs(layer: Any) -> list[Any]:
    """Inputs of a layer's graph, cast to 16 bits."""
    inputs = [layer] if isinstance(layer, keras.layers.InputLayer) else getattr(graph_of(layer), "inputs", [])
    return [x for x in inputs if x.dtype in LOW_PRECISION]
