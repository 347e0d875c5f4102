"""The row of a chip, made of what its search found."""

from __future__ import annotations

import math

from keras_mp.advice.advice_report import COMPILED, FROM_SHAPES, ChipAdvice
from keras_mp.advice.figures import Figures
from keras_mp.advice.measures import Measures
from keras_mp.advice.place import Place
from keras_mp.advice.schedule import UNCONSTRAINED, Asked
from keras_mp.advice.source import Source, lines
from keras_mp.advice.step import Step
from keras_mp.reporting.text import byte_size

# A GPU's runtime takes memory that its compiler does not count; a TPU's compiler refuses what leaves it too little.
NEARLY_FULL = 0.9


def compiled_row(one: Asked, step: Step, source: Source) -> ChipAdvice:
    """The row of a chip that was searched."""
    measures = one.nearest
    if measures is None:
        return shapes_row(one.place, step, source, one.failure)
    place, figures = one.place, one.tried[measures]
    origin = one.origins[measures]
    time = figures.time if origin.chip is place.chip else None
    fits = True if one.best is not None else None if one.failure else False
    return ChipAdvice(
        target=place.name,
        title=place.title,
        devices=place.devices,
        capacity=place.capacity,
        fits=fits,
        measures=measures,
        figures=figures,
        roofline=figures.roofline(place.chip),
        how=COMPILED if origin.chip is place.chip else f"a compile for {origin.title}, of the same architecture",
        reason=one.failure if fits is None else "" if fits else _reason(figures),
        code=lines(measures, source, place, step.rows) if fits else (),
        compiles=len(one.tried),
        shared=sum(origin.chip is not place.chip for origin in one.origins.values()),
        notes=(*_room(figures, place, fits), *figures.notes, *(_notes(measures, step, place) if fits else ())),
        time=None if time is None else time * measures.micro_batches,
    )


def shapes_row(place: Place, step: Step, source: Source, reason: str) -> ChipAdvice:
    """The row of a chip for which nothing was compiled.

    Args:
        place, step, source: the chip, the model and where it comes from.
        reason: why, where it is not that the state alone is larger than the memory.
    """
    least, state_dtype = _least(place, step, source)
    too_large = least.peak > place.capacity
    return ChipAdvice(
        target=place.name,
        title=place.title,
        devices=place.devices,
        capacity=place.capacity,
        fits=False if too_large else None,
        measures=None,
        figures=least,
        roofline=None,
        how=FROM_SHAPES,
        reason=_larger_state(least, place, state_dtype) if too_large else reason,
    )


def _least(place: Place, step: Step, source: Source) -> tuple[Figures, str]:
    """The smallest state of all strategies, and the dtype of its slots: "" where they are small enough as they are."""

    def least(state_dtype: str) -> Figures:
        sets = (Measures(source.precision, strategy=name, state_dtype=state_dtype) for name in place.strategies)
        return min((step.state(place, measures) for measures in sets), key=lambda state: state.peak)

    plain = least("")
    is_enough = plain.peak <= place.capacity or not step.has_smaller_states
    return (plain, "") if is_enough else (least("float8"), "float8")


def _larger_state(least: Figures, place: Place, state_dtype: str) -> str:
    state = least.state
    states = f", with {state_dtype} states" if state_dtype else ""
    text = f"Weights, optimizer and batch alone take {byte_size(state)} a device{states}."
    number = math.ceil(state * place.devices / place.capacity)
    return f"{text} Fully sharded they are smaller than the memory of {number} such devices or more."


def _reason(figures: Figures) -> str:
    """What takes the memory, the most first."""
    kinds = {
        "weights": figures.weights,
        "the optimizer": figures.optimizer,
        "activations kept for the backward pass": figures.activations,
        "gradients and other temporary arrays": figures.rest,
    }
    ordered = sorted((kind for kind in kinds.items() if kind[1]), key=lambda kind: -kind[1])
    text = ", ".join(f"{name} {byte_size(size)}" for name, size in ordered)
    text = f"Memory goes to {text}."
    if figures.largest:
        first = figures.largest[0]
        array = f"{first.dtype}{list(first.shape)} of {first.layer}"
        text += f" The largest temporary array: {array}, {byte_size(first.bytes)}."
    return text


def _room(figures: Figures, place: Place, fits: bool | None) -> list[str]:
    """How far a figure is to be trusted, by how it was found and by what it leaves of the memory."""
    share = figures.peak / place.capacity if place.platform == "cuda" else 0.0
    notes = []
    if figures.extrapolated:
        notes.append(
            f"Extrapolated from {figures.extrapolated}, which were compiled: weights and optimizer are exact, "
            "temporary memory is on the line through both."
        )
        if share > UNCONSTRAINED:
            notes.append(
                "The compiler saves memory where a step comes near to what a GPU has, and did not with few blocks: "
                "with all of them the step may need less, and fewer measures may be enough."
            )
    elif fits and share > NEARLY_FULL:
        notes.append(
            f"It needs {share:.0%} of the memory, of which a GPU's runtime takes a part: expect that it does not fit."
        )
    return notes


def _notes(measures: Measures, step: Step, place: Place) -> list[str]:
    notes = []
    if measures.micro_batches > 1 and step.sees_batch:
        notes.append(
            f"BatchNormalization ({step.sees_batch[0]} and others) computes its statistics over a micro-batch of "
            f"{step.rows // (measures.micro_batches * place.devices)} rows, so the training differs."
        )
    if measures.micro_batches > 1:
        notes.append(f"The bound is that of one micro-batch, the time that of all {measures.micro_batches}.")
    if measures.state_dtype:
        notes.append(
            f"The optimizer's states are rounded to {measures.state_dtype} after each step, stochastically: the "
            "training is slightly another than with float32 states."
        )
    if measures.remat:
        notes.append("Remat computes the forward pass of each block again: about a third more operations.")
    if place.devices == 1 and place.chip.devices > 1:
        notes.append(f"On one of the {place.chip.devices} devices that the runtime makes of one {place.chip.title}.")
    return notes
