"""What shapes alone say of a step: the bytes of its weights, its optimizer's slots and its batch on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from keras_mp.advice.figures import Figures
from keras_mp.advice.measures import Measures
from keras_mp.backend.common.lowered import Argument
from keras_mp.parallel.plan import Plan
from keras_mp.xla.memory import size_of


def state_figures(arguments: Sequence[Argument], measures: Measures, plan: Plan | None) -> Figures:
    """The least that a step takes on one device, whatever the compiler does.

    Gradients are not counted: a compiler may use each as soon as it is there.

    Args:
        arguments: of the step on one device; of all measures, only the dtype of the states is in them.
        measures: of these, accumulation and the strategy change the state.
        plan: the strategy's.

    Returns:
        The figures, without temporary memory.
    """
    kinds: dict[str, int] = defaultdict(int)
    for argument in arguments:
        kinds[argument.kind] += size_of(_on_one_device(argument, plan))
    accumulated = kinds["parameters"] if measures.micro_batches > 1 else 0
    weights, optimizer = kinds["parameters"] + kinds["state"], kinds["optimizer"] + accumulated
    other = kinds["metrics"] + kinds["batch"] // (measures.micro_batches * (plan.replicas if plan else 1))
    return Figures(weights, optimizer, other, peak=weights + optimizer + other)


def _on_one_device(argument: Argument, plan: Plan | None) -> Argument:
    if plan is None or argument.kind in ("batch", "metrics"):
        return argument
    split = any(plan.axes_of(argument.path, argument.shape, argument.dtype))
    return replace(argument, parts=plan.replicas if split else 1)
