"""A model in which what needs float32 runs in float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

from keras_mp.rebuild import Config, RebuildError, own_variables, rebuild, widen
from keras_mp.rebuild.quantized_policies import to_compute_in_float32
from keras_mp.rebuild.treated import (
    Reached,
    Treatment,
    original_class,
    register_treatments,
    treat,
    treated_node,
    treatments_of,
)
from keras_mp.stability.float32_layers import (
    ACTIVATION_ATTRIBUTES,
    FLOAT32_ACTIVATIONS,
    RESULT_MIXINS,
    SCORES_MIXINS,
    Float32BatchNormalization,
    Float32Inside,
    Float32Losses,
    Float32Operation,
    Float32Regularizer,
    Float32RowNormalization,
)
from keras_mp.stability.quantized_product import ExactGroups, StraightThroughLogits
from keras_mp.stability.sensitive import find, output_layers
from keras_mp.stability.way_out import way_out


def stabilize(model: keras.Model) -> keras.Model:
    """Returns a new model in which normalization, softmax, activity regularizers and the output run in float32.

    - Normalization and softmax compute in float32 and return the 16-bit dtype that they returned before.
    - Attention adds up and normalizes its scores in float32; the products keep 16-bit operands.
    - The output layer keeps 16-bit operands and returns float32: bias, activation and the loss are in float32.
    - Regularizers of activations add up in float32; what a layer's own code hands to `add_loss` becomes float32.
    - Of weights that Keras quantized, the numbers of int4 groups are not rounded to 16 bits; and, in any precision, the
      logits of an int8 ReversibleEmbedding layer pass gradients on, which Keras stops.

    Of a model built under the policy "bfloat16", the weights of what computes in float32 become float32: those of
    normalization, moving statistics, a softmax's. Those of the output layer stay 16-bit operands.

    Weights, names, shared layers, compile arguments and optimizer state are carried over; the original is not changed.
    Layers without a `get_config()`, or whose `__init__` takes no `**kwargs`, are rebuilt by the arguments that they
    keep as attributes. What cannot be reached is named in a warning. The result is saved and loaded as usual, wherever
    `keras_mp` is imported.

    Args:
        model: a built Keras model: functional, sequential, subclassed, nested; before or after training.

    Returns:
        The new model. Each layer that was changed is still an instance of its class.

    Raises:
        RebuildError: the model is not built, or has a layer that cannot be rebuilt; the message names it, and prints
            the policies that protect part of such a model.

    Warns:
        UserWarning: names what could not be made float32 or not be carried over, and what to do.
    """
    outputs = output_layers(model)
    sensitive = find(model, outputs)
    needed = {id(entry.layer): entry.treatments for entry in sensitive if entry.treatments}
    reached = Reached()
    left_to_code: set[int] = set()

    def rule(node: Config, layer: Any) -> Config:
        if layer is None:
            return node
        left_to_code.discard(id(layer))
        hidden = reached.hidden_below(layer, needed)
        left_to_code.update(hidden)
        treatments = [*needed.get(id(layer), ())]
        if layer is model and (hidden or left_to_code & outputs.keys()):
            # A layer inside another, such as a backbone's embedding, may compute what is an output of the model alone.
            treatments += ["children", "outputs"]
        elif hidden:
            treatments.append("children")
        return treated_node(node, layer, treatments, _precision(layer))

    try:
        new, unreached, _ = rebuild(model, rule)
    except RebuildError as error:
        raise RebuildError(f"{error}{way_out(model, sensitive) if model.built else ''}") from error
    missed = [f"{entry.path!r}: {entry.reason}" for entry in sensitive if not entry.treatments] + list(unreached)
    if missed:
        warnings.warn(f"stabilize({model.name!r}) could not reach everything: {'; '.join(missed)}", stacklevel=2)
    return new


def _precision(layer: keras.layers.Layer) -> str:
    return layer.compute_dtype if isinstance(layer, keras.layers.Layer) else "float32"  # an operation follows its input


def _stabilize_children(layer: Any) -> None:
    treated = set()
    for entry in find(layer, output_layers(layer) if "outputs" in treatments_of(layer) else {}):
        if entry.layer is not layer and entry.treatments:
            treated.add(id(treat(entry.layer, entry.treatments, entry.layer.compute_dtype)))
    if treated:
        _infer_again(layer, treated)


def _infer_again(model: keras.Model, treated: set[int]) -> None:
    """Gives the tensors of a functional graph that was made before its layers were treated the dtypes of now."""
    changed: set[int] = set()
    # Private, as a graph's tensors have no public way to say that they are wider than when they were made.
    by_depth = getattr(model, "_nodes_by_depth", {})
    for node in (node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]):
        if node.is_input or not (id(node.operation) in treated or changed & {id(x) for x in node.input_tensors}):
            continue
        spec = node.operation.compute_output_spec(*node.arguments.args, **node.arguments.kwargs)
        for old, new in zip(node.output_tensors, keras.tree.flatten(spec), strict=True):
            if old.dtype != new.dtype:
                old._dtype = new.dtype
                changed.add(id(old))


def _to_float32(layer: Any) -> None:
    _policy_float32(layer)
    if _inside(original_class(layer)) is not Float32Inside:
        layer.autocast = False  # its inputs stay in 16 bits: they do not go up to float32 first


def _to_float32_result(layer: Any) -> None:
    # Its weights stay as they are: they are operands, of 16 bits.
    to_compute_in_float32(layer)
    layer.autocast = False  # its inputs go down to 16 bits: not first up to float32


def _activation_in_float32(layer: Any) -> None:
    for name in ACTIVATION_ATTRIBUTES:
        function = getattr(layer, name, None)
        if function in FLOAT32_ACTIVATIONS:
            setattr(layer, name, FLOAT32_ACTIVATIONS[function])


def _regularizer_in_float32(layer: Any) -> None:
    if not isinstance(layer.activity_regularizer, Float32Regularizer):
        layer.activity_regularizer = Float32Regularizer(layer.activity_regularizer)


def _policy_float32(layer: Any) -> None:
    to_compute_in_float32(layer)
    for variable in own_variables(layer):
        widen(variable)


def _by_base(mixins: dict[Any, Any]) -> Callable[[type], type]:
    return lambda original: next(mixin for cls, mixin in mixins.items() if issubclass(original, cls))


def _inside(original: type) -> type:
    own = (Float32BatchNormalization, Float32RowNormalization)
    return next((mixin for mixin in own if mixin.stands_for(original)), Float32Inside)


def _result(original: type) -> type | None:
    return None if getattr(original, "float32_sums", False) else _by_base(RESULT_MIXINS)(original)


register_treatments(
    {
        # Inputs, weights and sums in float32, the result in the layer's precision.
        "float32": Treatment(_inside, _to_float32),
        # The result in float32, too.
        "everywhere": Treatment(prepare=_policy_float32),
        # Products of 16-bit operands, everything after them in float32.
        "result": Treatment(_result, _to_float32_result),
        # Attention's scores in float32.
        "scores": Treatment(_by_base(SCORES_MIXINS)),
        "activation": Treatment(prepare=_activation_in_float32),
        "regularizer": Treatment(prepare=_regularizer_in_float32),
        # The groups of int4 weights by numbers that are exact.
        "groups": Treatment(lambda original: ExactGroups),
        # Logits of inputs that are quantized, with a gradient for these; that of an output layer calls it.
        "input gradient": Treatment(lambda original: StraightThroughLogits, innermost=True),
        "operation": Treatment(lambda original: Float32Operation),
        # Losses that the layer's own code adds, as float32.
        "losses": Treatment(lambda original: Float32Losses),
        # Sublayers that no config shows, each as it needs.
        "children": Treatment(children=_stabilize_children),
        # Those of them that compute the model's outputs.
        "outputs": Treatment(),
    }
)
