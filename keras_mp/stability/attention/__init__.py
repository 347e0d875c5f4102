"""Keras's attention, which on a TPU is another, made right."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from keras_mp import backend
from keras_mp.backend.common.keras_private import compute_output_spec
from keras_mp.rebuild.notes import notes_of, original_class
from keras_mp.rebuild.walk import Walk, inputs_of
from keras_mp.stability.sensitive import names_in
from keras_mp.treatment.treated import Treatment, register_treatments

engine = backend.engine_of(__package__)

ATTENTION = "attention"


class AttentionAsAsked:
    """Attends on a TPU with the mask and scale given."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with engine.attention_as_asked() as used:
            result = super().call(*args, **kwargs)  # type: ignore[misc]
        if used and (notes := notes_of(self)) is not None:
            notes.kept[ATTENTION] = ", ".join(dict.fromkeys(used))
        return result


def attending(walk: Walk) -> list[Any]:
    """Lists what calls `keras.ops.dot_product_attention`, layers and operations.

    The model is saved and loaded for other machines, so these are the same on each; they ask for the chip when called.
    """
    return [part for part in [*walk.every, *walk.operations] if _calls_it(original_class(part))]


def attended_by(walk: Walk) -> dict[str, str]:
    """Says what computes attention on a TPU, by path."""
    parts = attending(walk)
    if not parts or backend.traced_chip().platform != "tpu":
        return {}
    inputs = inputs_of(walk.model)
    if inputs is not None and not any(x.dtype == "string" or None in x.shape[1:] for x in keras.tree.flatten(inputs)):
        shapes = keras.tree.map_structure(lambda x: keras.KerasTensor((x.shape[0] or 1, *x.shape[1:]), x.dtype), inputs)
        compute_output_spec(walk.model, shapes, training=False)  # in which layers note how they attend
    paths = {id(layer): path for path, layer in walk.layers.items()}
    return {paths.get(id(part), part.name): _told(part) for part in parts}


def _told(part: Any) -> str:
    if not isinstance(part, AttentionAsAsked):
        return "Keras's attention, which on a TPU is causal where there is no mask, and does not scale scores"
    notes = notes_of(part)
    lengths = "Splash where lengths are multiples of 128, else the kit's own form"
    return lengths if notes is None else notes.kept.get(ATTENTION, lengths)


@functools.cache
def _calls_it(cls: type) -> bool:
    functions = [
        inspect.unwrap(value) for base in cls.__mro__ for value in vars(base).values() if inspect.isfunction(value)
    ]
    return any("dot_product_attention" in names_in(function.__code__) for function in functions)


register_treatments({ATTENTION: Treatment(lambda original, names: AttentionAsAsked)})
