"""Notes on a layer that the kit has changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

# The way from a layer to one inside it: at each level the index among the sublayers, or "o" and the index among the
# operations of a graph that are no layers.
Place = tuple[int | str, ...]
_NAME = "_keras_mp"
# The treatments of a layer that `keras_mp.convert` changed: rooms ask for them that know no more of it. The options of
# one are its scalings, those of the other Keras's config of the quantization that the layer trains for, serialized.
FLOAT8, QAT = "fp8", "qat"


@dataclasses.dataclass
class Notes:
    """The notes on one layer."""

    treatments: dict[str, Any]  # the options of each treatment that is applied to the layer, by the treatment's name
    precision: str  # dtype that it computes in without any
    policy: Any = None  # dtype policy of the layer without any, where its weights are of 16 bits; else None
    # the treatments of sublayers that the layer's own code has yet to create
    waiting: dict[Place, tuple[dict[str, Any], str]] = dataclasses.field(default_factory=dict)
    # the things that a treatment keeps from one step to the next, by its name
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)


class Changed:
    """Marks the class of a layer that has treatments.

    Attributes:
        _original: the class without them; none of the class that all such classes have as a base.
    """

    _original: type | None = None


def notes_of(layer: Any) -> Notes | None:
    """Notes on a layer or operation, or None."""
    return vars(layer).get(_NAME)


def existing_notes(layer: Any) -> Notes:
    """Returns the notes on a layer that has some."""
    notes = notes_of(layer)
    assert notes is not None, layer  # a layer has its notes before it is treated, and until it has no treatment
    return notes


def write_notes(layer: Any, notes: Notes | None) -> None:
    """Writes notes past Keras's tracking; None takes them away."""
    if notes is None:
        vars(layer).pop(_NAME, None)
    else:
        vars(layer)[_NAME] = notes


def treatments_of(layer: Any) -> dict[str, Any]:
    """Treatments of a layer by name, with their options."""
    notes = notes_of(layer)
    return {} if notes is None else notes.treatments


def quantization_trained_for(layer: Any) -> Any:
    """Keras's config of the quantization trained for, or None."""
    options = treatments_of(layer).get(QAT) if getattr(layer, "quantization_mode", None) is None else None
    return None if options is None else keras.saving.deserialize_keras_object(options)


def original_class(layer: Any) -> Any:
    """The class of a layer without its treatments."""
    return isinstance(layer, Changed) and layer._original or type(layer)


def precision_of_layer(layer: Any) -> str:
    """Dtype that a layer computes in without treatments."""
    notes = notes_of(layer)
    if notes is not None:
        return notes.precision
    return layer.compute_dtype if isinstance(layer, keras.layers.Layer) else "float32"
