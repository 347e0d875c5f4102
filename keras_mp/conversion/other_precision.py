"""The same model in another precision, to compare the two."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras

from keras_mp.conversion.to_float32 import keep_own_policies
from keras_mp.fp8.convert import convert
from keras_mp.fp8.layers import Float8Layer
from keras_mp.precision.policy import PRECISIONS
from keras_mp.rebuild.model import rebuild
from keras_mp.rebuild.quantized_policies import source_of
from keras_mp.rebuild.walk import FLOAT8, Config, Rule, layers_by_path
from keras_mp.stability.stabilized import stabilize
from keras_mp.system.argument_checks import one_of
from keras_mp.treatment.treated import untreated_node

FP8 = "fp8"


def precision_of(model: keras.Model) -> str:
    """Names the precision of most layers with weights, or "fp8"."""
    layers = [layer for layer in layers_by_path(model).values() if layer.weights]
    if any(isinstance(layer, Float8Layer) or layer.quantization_mode == "float8" for layer in layers):
        return FP8
    mixed = Counter(name for layer in layers if (name := source_of(layer)) != "float32")
    return mixed.most_common(1)[0][0] if mixed else "float32"


def in_precision(model: keras.Model, precision: str) -> keras.Model:
    """Rebuilds a model in another precision.

    The original is not changed. Layers that compute in the model's own precision change to the other; from float32, all
    do, and what must be float32 is then made so by `keras_mp.stabilize`.

    Args:
        model: a built Keras model, in any precision.
        precision: "float32", "mixed_float16", "mixed_bfloat16" or "fp8".

    Returns:
        A new model with the same weights, compiled like the old one; the model itself where it is in that precision.

    Raises:
        ValueError: If the precision is none of the four.
        RebuildError: If the model is not built, or has a layer that cannot be rebuilt, or that computes otherwise when
            it is; the message names it.

    Warns:
        UserWarning: If something was not carried over; the message names the weights, optimizer slots and compile
            arguments.
    """
    one_of("precision", precision, PRECISIONS)
    now = precision_of(model)
    if now == precision:
        return model
    old, new = ("mixed_bfloat16" if name == FP8 else name for name in (now, precision))
    rebuilt = rebuild(model, _rule(old, new), policy=new).told(f"in_precision({model.name!r}, {precision!r})")
    keep_own_policies(rebuilt)
    if old == "float32":
        stabilize(rebuilt)
    if precision == FP8:
        convert(rebuilt)
    return rebuilt


def _rule(old: str, new: str) -> Rule:
    policy = keras.saving.serialize_keras_object(keras.DTypePolicy(new))
    # A stabilized layer is float32 by its policy; what it multiplies in is its "precision".
    changes = {("precision", keras.DTypePolicy(old).compute_dtype): keras.DTypePolicy(new).compute_dtype}
    changes |= {(key, old): new for key in ("source_name", "default_policy")}  # of quantized layers
    if old != "float32":  # as text that is a dtype, such as an input's, and no policy
        changes["dtype", old] = new

    def rule(node: Config, layer: Any) -> Config:
        node = untreated_node(node, (FLOAT8,))
        if node.get("class_name") == "DTypePolicy" and node["config"]["name"] == old:
            return policy
        return {
            key: changes.get((key, value), value) if isinstance(value, str) else value for key, value in node.items()
        }

    return rule
