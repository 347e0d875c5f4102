"""The protection of a model that cannot be rebuilt: the policies to build it under, and what they cannot do."""

from __future__ import annotations

from collections import Counter

import keras

from keras_mp.rebuild import layers_by_path
from keras_mp.stability.sensitive import LOW_PRECISION, SensitiveLayer

# Treatments that the policy "float32" stands for, on the layer itself.
_BY_POLICY = {"float32", "everywhere", "result", "activation", "regularizer"}


def way_out(model: keras.Model, sensitive: list[SensitiveLayer]) -> str:
    """Describes how to protect a model by policies only.

    Args:
        model: a built Keras model.
        sensitive: its sensitive layers, as `find` returns them.

    Returns:
        A `DTypePolicyMap` as code to paste, and a line about each thing that no policy protects; empty where nothing
        is sensitive.
    """
    if not sensitive:
        return ""
    protected = [
        entry for entry in sensitive if _BY_POLICY & set(entry.treatments) and getattr(entry.layer, "path", None)
    ]
    lines = []
    if protected:
        paths = dict.fromkeys(entry.layer.path for entry in protected)
        lines += [
            "",
            "Policies protect part of it. Build the model under these, in a new program or after "
            "keras.utils.clear_session(), so that its layers are named as they are here:",
            "",
            "    keras.config.set_dtype_policy(",
            "        keras.dtype_policies.DTypePolicyMap(",
            f"            default_policy={_policy_of(model)!r},",
            "            policy_map={",
            *(f'                {path!r}: keras.DTypePolicy("float32"),' for path in paths),
            "            },",
            "        )",
            "    )",
            "",
            "Where such a layer's float32 result meets a 16-bit one, write keras.ops.add(x, y): on TensorFlow x + y "
            "takes one dtype only.",
        ]
    return "\n".join([*lines, *_beyond_policies(sensitive)])


def _beyond_policies(sensitive: list[SensitiveLayer]) -> list[str]:
    def names(treatment: str) -> str:
        return ", ".join(repr(entry.path) for entry in sensitive if treatment in entry.treatments)

    lines = []
    if names("scores"):
        lines.append(
            f"No policy protects the scores inside attention: {names('scores')} (dtype='float32' for the whole layer "
            "does, with its products)."
        )
    if names("result"):
        lines.append(
            f"No policy gives a 16-bit product with a float32 result: {names('result')} will multiply in float32."
        )
    statistics = [repr(entry.path) for entry in sensitive if isinstance(entry.layer, keras.layers.BatchNormalization)]
    if statistics:
        lines.append(
            "No policy takes float32 statistics of 16-bit inputs, as stabilize does: under float32 these copy their "
            f"inputs to float32 first: {', '.join(statistics)}."
        )
    if names("operation"):
        lines.append(f"No policy reaches an operation: cast the input of {names('operation')} to float32.")
    return lines


def _policy_of(model: keras.Model) -> str:
    """The policy of most layers with a 16-bit compute dtype."""
    policies = [layer.dtype_policy for layer in [model, *layers_by_path(model).values()]]
    low = Counter(policy.name for policy in policies if policy.compute_dtype in LOW_PRECISION)
    return low.most_common(1)[0][0]
