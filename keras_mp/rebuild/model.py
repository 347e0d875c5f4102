"""Rebuilds a model from its config, with its state."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import keras

from keras_mp.backend.common.keras_patches import restored_policy
from keras_mp.rebuild.compared import check_same
from keras_mp.rebuild.config import (
    Rewrite,
    custom_objects_of,
    deserialize,
    live_objects,
    rewrite,
    serialize,
    unshare_across_graphs,
)
from keras_mp.rebuild.optimizers import carry_compiled
from keras_mp.rebuild.quantized_policies import settle_policies
from keras_mp.rebuild.state import carry_state
from keras_mp.rebuild.walk import Config, RebuildError, Rule, Walk, is_built


class Rebuilt(NamedTuple):
    """What `rebuild` returns."""

    model: keras.Model  # the new model
    # names of the weights, optimizer slots and compile arguments that were not carried over, a sentence each. Empty
    # when everything arrived
    unreached: tuple[str, ...]
    # names of layers that two functional graphs share and of which the new model has a copy in each: they compute the
    # same but train apart. Keras cannot reload such a model either
    unshared: tuple[str, ...] = ()

    def told(self, function: str) -> keras.Model:
        """Returns the model, and warns of differences."""
        apart = [
            f"layer {name!r} was shared by two graphs, and each now trains a copy of its own" for name in self.unshared
        ]
        if self.unreached or apart:
            otherwise = "; ".join([*self.unreached, *apart])
            warnings.warn(f"{function} could not carry over all of the model: {otherwise}", stacklevel=3)
        return self.model


def rebuild(
    model: keras.Model,
    rule: Rule,
    *,
    policy: Any = None,
    sample: Any = None,
    carry_compile: bool = True,
    merge: bool = False,
) -> Rebuilt:
    """Rebuilds a model from its config, rewritten by a rule.

    A config may say less than all. So a copy that is rebuilt without the rule, in the model's own precision, is run
    beside the model on a batch, and must compute the same; where the rule changes nothing, that is the new model.

    Args:
        model: a built Keras model: functional, sequential, subclassed, nested, with shared layers.
        rule: `rule(node, layer) -> node`, called on every dict of the serialized config, innermost first. `layer` is
            the live layer (or operation of a functional graph) that the node describes, or None where it describes
            something else: a policy, an initializer, a part of a config. Returns the node itself or a replacement;
            must not change its argument.
        policy: the global dtype policy during the rebuild, for layers whose config says nothing of a dtype, and those
            inside custom layers. The model's own policy by default.
        sample: a batch of inputs (any structure of arrays, batch first) to compare on, and that builds a subclassed
            model which cannot be built from its recorded input shapes. Made up where None.
        merge: whether weights that are quantized, or have LoRA's product beside them, become one matrix of floats each,
            in layers without; the rule takes the quantization and LoRA out of their configs.
        carry_compile: whether the new model is compiled, too, with the old one's arguments and its optimizer's state.

    Raises:
        RebuildError: the model is not built, a layer cannot be serialized or deserialized, a weight changed shape, or
            the model that is rebuilt computes something else; the message names the layer.
    """
    if not is_built(model):
        raise RebuildError(
            f"model {model.name!r} is not built, so it has no weights to carry over: call it once on a batch, "
            "or model.build(input_shape)"
        )
    serialized, kept = serialize(model)
    layers = {id(layer): layer for layer in [*Walk(model).every, *Walk(model).operations]}
    config, same = (rewrite(serialized, Rewrite(how, layers, kept)) for how in (rule, unchanged))
    own_policy = model.dtype_policy
    policy = keras.dtype_policies.get(policy or own_policy)
    new, unreached, copied, variables = _made(model, config, policy, sample, merge)
    is_copy = policy.name == own_policy.name and not merge and config == same
    check_same(model, new if is_copy else _made(model, same, own_policy, sample, False)[0], sample)
    if carry_compile and getattr(model, "compiled", False):
        unreached += carry_compiled(model, new, variables)
    return Rebuilt(new, tuple(unreached), tuple(layers[key].name for key in copied))


def unchanged(node: Config, layer: Any) -> Config:
    """The rule of a copy."""
    return node


def _made(
    model: keras.Model, config: Config, policy: Any, sample: Any, merge: bool
) -> tuple[keras.Model, list[str], list[int], dict[int, keras.Variable]]:
    copied: list[int] = []
    config = unshare_across_graphs(config, set(), copied)
    with restored_policy(policy):
        new = deserialize(config, custom_objects_of(model) | live_objects(model), model)
        if sample is not None and not (new.built and len(new.weights) == len(model.weights)):
            new(sample, training=False)
    settle_policies(new)
    variables, unreached = carry_state(model, new, merge)
    return new, unreached, copied, variables
