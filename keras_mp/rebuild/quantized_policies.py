"""How layers are quantized, and their dtype policies, kept through configs.

KerasHub writes a backbone with quantized layers under one `DTypePolicyMap` without a default policy. Its `get_config()`
erases the names of the live layers' policies, and what it writes takes the global policy of whoever reads it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from keras_mp.rebuild.walk import LIBRARIES, Walk, package_of, precision_of_layer

Policy = keras.dtype_policies.DTypePolicy
PolicyMap = keras.dtype_policies.DTypePolicyMap
# The modes of `quantize` that look at data.
CALIBRATED = ("gptq", "awq")
CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
LAYERS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding, *CONVOLUTIONS)


def policy_of(layer: keras.Layer) -> Any:
    """A layer's own policy, with a name, and no map."""
    policy = layer.dtype_policy
    if isinstance(policy, PolicyMap):
        policy = _entry(policy, layer.path)
    if policy._name is None:  # private, as the public name of such a policy is None, too
        policy = with_source(policy, _source(policy.compute_dtype, policy.variable_dtype))
    return policy


def _entry(policies: Any, path: str | None) -> Any:
    """What a map says of a layer, through inner maps.

    KerasHub saves a map in a map, and Keras writes a map into itself where a layer is given the map as its new policy.
    """
    policy = policies[path] if path else policies.default_policy
    if policy is policies:
        policy = policies.default_policy
    return _entry(policy, path) if isinstance(policy, PolicyMap) else policy


def with_source(policy: Any, source: str) -> Any:
    """Policy of the same quantization that computes as `source`."""
    if policy.quantization_mode is None:
        return Policy(source)
    return type(policy)(**{**policy.get_config(), "source_name": source})


def group_count(layer: Any) -> int:
    """Counts groups of an int4 layer's weights; 0 without."""
    size = getattr(layer, "_int4_block_size", None) or -1
    return math.ceil(layer.g_idx.shape[0] / size) if layer.quantization_mode == "int4" and size > 0 else 0


def logits_stop_gradients(layer: Any) -> bool:
    """Whether logits give their rounded inputs no gradient."""
    if not isinstance(layer, keras.layers.ReversibleEmbedding) or layer.quantization_mode not in ("int8", "int4"):
        return False
    return bool(layer.inputs_quantizer)


def to_compute_in_float32(layer: keras.Layer) -> None:
    """Lets a layer compute in float32; integer weights stay so."""
    policy = policy_of(layer)
    # Private: the public setter would write into a map that other layers share, or quantize.
    layer._dtype_policy = Policy("float32") if policy.quantization_mode == "float8" else with_source(policy, "float32")


def keep_statistics_as_computed(layer: Any) -> None:
    """Makes a Normalization's statistics anew: Keras keeps them as computed."""
    if not isinstance(layer, keras.layers.Normalization) or not layer.built:
        return
    if layer.input_mean is None:
        layer.finalize_state()
    else:
        layer.build(layer._build_input_shape)  # private, and what the layer was built for


def settle_policies(layer: keras.Layer) -> list[tuple[Any, Any]]:
    """Gives built layers own policies; returns the replaced maps."""
    shared = [
        (part, part._dtype_policy)
        for part in Walk(layer).every
        if part.built and isinstance(part._dtype_policy, PolicyMap)
    ]
    for part, _ in shared:
        part._dtype_policy = policy_of(part)
    return shared


@contextlib.contextmanager
def maps_with_defaults(model: keras.Layer) -> Iterator[None]:
    """Lets backbones with quantized layers be serialized under their policy.

    KerasHub writes the map's entry for a layer from that layer's policy, which is the whole map where the backbone was
    made with one, as from a quantized preset.
    """
    before = settle_policies(model)
    for layer in Walk(model).every:
        if _writes_its_policy(layer):
            policies = {
                part.path: with_source(policy_of(part), _source(precision_of_layer(part), part.variable_dtype))
                for part in Walk(layer).every
                if part.quantization_mode is not None
            }
            if policies:
                before.append((layer, layer._dtype_policy))
                layer._dtype_policy = PolicyMap(source_of(layer), policies)
    try:
        yield
    finally:
        for layer, policy in reversed(before):
            layer._dtype_policy = policy


def _writes_its_policy(layer: keras.Layer) -> bool:
    """Whether a model writes its policy, as KerasHub's backbones do."""
    definer = next(base for base in type(layer).__mro__ if "get_config" in vars(base))
    named = getattr(layer.dtype_policy, "_default_policy_arg", None) is not None  # what a map without one erases
    return isinstance(layer, keras.Model) and package_of(definer) not in LIBRARIES and not named


def source_of(layer: keras.Layer) -> str:
    """Name of a layer's policy, without quantization."""
    return _source(layer.compute_dtype, layer.variable_dtype)


def _source(compute_dtype: str, variable_dtype: str) -> str:
    return compute_dtype if compute_dtype == variable_dtype else f"mixed_{compute_dtype}"


# How a layer is quantized, and its LoRA, given to another.


def adaptation_of(layer: Any) -> dict[str, Any]:
    """How a layer is quantized to integers, and its LoRA.

    Empty of a layer with neither. A layer's own config shows less than all: not how the inputs are quantized, and
    Keras's Dense reads no `lora_alpha`. No config of a model shows any of it where a layer's code creates the layer.
    """
    mode = getattr(layer, "quantization_mode", None)
    adaptation: dict[str, Any] = {}
    if mode is not None and mode != "float8":  # whose layers may become this kit's, or plain ones
        names = ("quantization_config", "inputs_quantizer")
        attributes = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
        adaptation |= {"mode": mode, "config": _quantization_config(layer), "attributes": attributes}
    if isinstance(layer, LAYERS) and layer.lora_enabled:
        adaptation |= {"rank": layer.lora_rank, "alpha": layer.lora_alpha}
    return adaptation


def adapt(layer: Any, adaptation: Mapping[str, Any]) -> None:
    """Quantizes a layer and adds LoRA, as `adaptation_of` says."""
    mode = adaptation.get("mode")
    if mode is not None and layer.quantization_mode is None:
        layer.quantize(mode, type_check=False, config=adaptation["config"])
    if mode in CALIBRATED:
        setattr(layer, f"is_{mode}_calibrated", True)
        if hasattr(layer, "_kernel"):
            del layer._kernel  # as Keras does once it has calibrated a layer
    for name, value in adaptation.get("attributes", {}).items():
        setattr(layer, name, value)
    if "rank" in adaptation:
        if not layer.lora_enabled:
            layer.enable_lora(adaptation["rank"], lora_alpha=adaptation["alpha"])
        layer.lora_alpha = adaptation["alpha"]


def _quantization_config(layer: Any) -> Any:
    """Config that a layer was quantized with."""
    config, policy = getattr(layer, "quantization_config", None), policy_of(layer)
    if config is None and hasattr(layer, "_int4_block_size"):  # private: without a config Keras makes groups of 128
        return keras.quantizers.Int4QuantizationConfig(block_size=layer._int4_block_size or -1)
    if config is None and policy.quantization_mode in CALIBRATED:
        made = {"gptq": keras.quantizers.GPTQConfig, "awq": keras.quantizers.AWQConfig}[policy.quantization_mode]
        return made(None, None, weight_bits=policy.weight_bits, group_size=policy.group_size)
    return config
