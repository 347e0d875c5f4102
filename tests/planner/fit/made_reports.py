"""Reports on steps that nobody compiled."""

import dataclasses

from keras_mp.planner.read.memory import Memory
from tests.reporting.report_examples import compiled


def memory(weights, optimizer=0, temporary=0, peak=None, capacity=2**40):
    """The memory of a step whose figures are given."""
    state = weights + optimizer
    peak = state + temporary if peak is None else peak
    return Memory(weights, optimizer, 0, 0, state, 0, 0, temporary, 0, peak, capacity, ())


def report(*figures, **changes):
    """A report of `inspect` with that memory."""
    of, own = ("temporary", "peak", "capacity"), dict(changes)
    made = memory(*figures, **{name: own.pop(name) for name in of if name in own})
    return dataclasses.replace(compiled(compare=False), memory=made, **{"link_time": None} | own)
