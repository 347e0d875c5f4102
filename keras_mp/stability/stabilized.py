"""A model in which what needs float32 runs in float32."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from keras_mp.rebuild import Config, RebuildError, layers_below, original_config, rebuild
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
)
from keras_mp.stability.sensitive import find, output_layers
from keras_mp.stability.way_out import way_out

REGISTERED_NAME = "keras_mp>Stabilized"


def stabilize(model: keras.Model) -> keras.Model:
    """Returns a new model in which normalization, softmax, activity regularizers and the output run in float32.

    - Normalization and softmax compute in float32 and return the 16-bit dtype that they returned before.
    - Attention adds up and normalizes its scores in float32; the products keep 16-bit operands.
    - The output layer keeps 16-bit operands and returns float32: bias, activation and the loss are in float32.
    - Regularizers of activations add up in float32; what a layer's own code hands to `add_loss` becomes float32.

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
    reached: set[int] = set()
    left_to_code: set[int] = set()

    def rule(node: Config, layer: Any) -> Config:
        if layer is None or node["registered_name"] == REGISTERED_NAME:
            return node
        reached.add(id(layer))
        left_to_code.discard(id(layer))
        hidden = {id(sublayer) for sublayer in layers_below(layer)} & needed.keys() - reached
        reached.update(hidden)
        left_to_code.update(hidden)
        treatments = [*needed.get(id(layer), ())]
        if layer is model and (hidden or left_to_code & outputs.keys()):
            # A layer inside another, such as a backbone's embedding, may compute what is an output of the model alone.
            treatments += ["children", "outputs"]
        elif hidden:
            treatments.append("children")
        if isinstance(layer, Stabilized) or not treatments:
            return node
        inner = {key: value for key, value in node.items() if key not in ("shared_object_id", "inbound_nodes", "name")}
        config = {"layer": inner, "treatments": treatments, "precision": _precision(layer), "name": layer.name}
        kept: Config = {key: node[key] for key in ("shared_object_id", "inbound_nodes", "name") if key in node}
        name = {"module": __name__, "class_name": node["class_name"], "registered_name": REGISTERED_NAME}
        return {**name, "config": config, **kept}

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


class Stabilized:
    """A layer whose sensitive parts run in float32; it is still an instance of its own class.

    Its config holds the original layer's config and the names of the treatments, so that it saves, loads and clones.
    """

    _original: type
    _treatments: tuple[str, ...]
    _precision: str

    def get_config(self) -> Config:
        layer = original_config(self, self._original)
        return {"name": self.name, "layer": layer, "treatments": list(self._treatments), "precision": self._precision}  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: Config) -> Any:
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return stabilize_in_place(layer, config["treatments"], config["precision"])


# One name in saved models for whatever class was extended: Stabilized.from_config reads the class from the config.
_register = keras.saving.register_keras_serializable("keras_mp", "Stabilized")
_register(Stabilized)


class StabilizedChildren:
    """Sublayers that the layer's own code creates, and no config shows, are treated before they first compute."""

    _treatments: tuple[str, ...]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.treat_children()
        return super().call(*args, **kwargs)  # type: ignore[misc]

    def treat_children(self) -> None:
        treated = set()
        for entry in find(self, output_layers(self) if "outputs" in self._treatments else {}):
            if entry.layer is not self and entry.treatments:
                treated.add(id(stabilize_in_place(entry.layer, entry.treatments, entry.layer.compute_dtype)))
        if treated:
            _infer_again(self, treated)


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


def stabilize_in_place(layer: keras.layers.Layer, treatments: Sequence[str], precision: str) -> keras.layers.Layer:
    """Applies treatments to a live layer and returns it.

    Args:
        layer: a Keras layer, built or not, that is part of no compiled function yet.
        treatments: some of
            "float32": inputs, weights and sums in float32, the result in `precision`;
            "everywhere": the result in float32, too;
            "result": products of 16-bit operands, everything after them in float32;
            "scores": of attention, in float32;
            "activation", "regularizer", "operation": those in float32;
            "losses": what `add_loss` is given, as float32;
            "children": sublayers that no config shows, each as it needs;
            "outputs": and those of them that compute the model's outputs.
        precision: "float16" or "bfloat16", what the layer computed in; "float32" after an export.
    """
    if isinstance(layer, Stabilized):
        treatments = tuple(dict.fromkeys([*layer._treatments, *treatments]))
    original = layer._original if isinstance(layer, Stabilized) else type(layer)
    if "activation" in treatments:
        for name in ACTIVATION_ATTRIBUTES:
            function = getattr(layer, name, None)
            if function in FLOAT32_ACTIVATIONS:
                setattr(layer, name, FLOAT32_ACTIVATIONS[function])
    if "regularizer" in treatments and not isinstance(layer.activity_regularizer, Float32Regularizer):
        layer.activity_regularizer = Float32Regularizer(layer.activity_regularizer)
    if {"float32", "result", "everywhere"} & set(treatments):
        layer.dtype_policy = "float32"
    if "result" in treatments or ("float32" in treatments and Float32BatchNormalization.stands_for(original)):
        layer.autocast = False  # its inputs go down to 16 bits, or stay there: not first up to float32
    layer.__class__ = _extended(original, tuple(treatments))
    layer._treatments = tuple(treatments)
    layer._precision = precision
    if "children" in treatments:
        layer.treat_children()
    return layer


@functools.cache
def _extended(original: type, treatments: tuple[str, ...]) -> type:
    mixins: list[type] = [Stabilized]
    for treatment in treatments:
        if treatment == "float32":
            of_batches = Float32BatchNormalization.stands_for(original)
            mixins.append(Float32BatchNormalization if of_batches else Float32Inside)
        elif treatment == "result" and not getattr(original, "float32_sums", False):
            mixins.append(next(mixin for cls, mixin in RESULT_MIXINS.items() if issubclass(original, cls)))
        elif treatment == "scores":
            mixins.append(next(mixin for cls, mixin in SCORES_MIXINS.items() if issubclass(original, cls)))
        elif treatment == "losses":
            mixins.append(Float32Losses)
        elif treatment == "operation":
            mixins.append(Float32Operation)
        elif treatment == "children":
            mixins.append(StabilizedChildren)
    # It keeps the class's name: Keras files weights by it, so they can be loaded into the plain model, and back.
    extended = type(original.__name__, (*mixins, original), {"_original": original, "__module__": __name__})
    _register(extended)
    _register(Stabilized)
    return extended
