"""A plan: devices, and how arrays are split over them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from keras_mp.parallel.hops import Hops, groups_of, hops_of
from keras_mp.system.argument_checks import one_of

LEAST_LENGTH = 32
"""Shorter rows are not gathered in 8 bits: the scale of a row has four bytes."""

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]

STRATEGIES = ("data", "fully_sharded", "tensor")
REDUCE_DTYPES = ("float32", "bfloat16")
GATHER_DTYPES = ("compute", "float8")
AXES = ("batch", "model")
"""Names of a mesh's axes: over the first a batch is split."""
_WIDE_FLOATS = ("float64", "float32", "float16", "bfloat16")
_FLOATS = (*_WIDE_FLOATS, "float8_e4m3fn")
_CODES = ("int8", "uint8")  # of quantized weights


@dataclass(frozen=True)
class Plan:
    """How a model lies on devices."""

    strategy: str  # the way in which weights and batches lie: "data", "fully_sharded" or "tensor"
    devices: tuple[str, ...]  # their names, as the backend writes them; empty where a step is only compiled
    shape: tuple[int, ...]  # the mesh: the devices that share a batch, and with "tensor" those that share a weight
    reduce_dtype: str = "float32"  # the dtype in which gradients are summed over the devices
    # the axis of a weight that "tensor" splits, by patterns of its path; None for those of models built in its scope
    rules: Rules | None = None
    # the rules of the models built in its scope, as they come
    declared: list[tuple[str, tuple[str | None, ...]]] = field(default_factory=list, compare=False, repr=False)
    # the numbers of devices over which "fully_sharded" sums gradients, one after the other; `keras_mp.parallel.hops`
    # says which slices need it, and in which order the devices are then
    hops: Hops = Hops()
    gather_dtype: str = "compute"  # as "fully_sharded" gathers weights: "compute", for their layers' own, or "float8"

    def in_8_bits(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Tells whether such a weight is gathered in E4M3."""
        long = len(shape) > 1 and shape[-1] >= LEAST_LENGTH
        return self.gather_dtype == "float8" and long and dtype in _WIDE_FLOATS

    def groups(self, axis: int) -> list[list[list[int]]]:
        """Groups the devices of each sum of a gradient."""
        return groups_of(self.hops.first if axis == 0 else self.hops.other)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh's axes."""
        return AXES[: len(self.shape)]

    @property
    def replicas(self) -> int:
        """Number of devices over which a batch is split."""
        return self.shape[0]

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def by_compiler(self) -> bool:
        """Whether XLA places the collectives, and not the kit."""
        return self.strategy == "tensor"

    @property
    def rules_in_force(self) -> Rules:
        """Its own rules, or those of models in its scope."""
        return tuple(self.declared) if self.rules is None else self.rules

    def axes_of(self, path: str, shape: tuple[int, ...], dtype: str) -> tuple[str | None, ...]:
        """Says which axes of a variable are split.

        "fully_sharded" splits the first axis that the devices divide; "tensor" follows the rules. A slot of an
        optimizer lies as its variable does, because its shape is the same and its path holds the variable's; the scales
        of a slot in 8 bits lie with the rows, whose own axis has length 1 there and is not split.

        Floats are split, and by "fully_sharded" quantized weights. Returned is, for each dimension, the name of a mesh
        axis or None.

        Raises:
            ValueError: If a rule splits an axis that the devices do not divide.
        """
        axes: list[str | None] = [None] * len(shape)
        if dtype not in (*_FLOATS, *(_CODES if self.strategy == "fully_sharded" else ())):
            return tuple(axes)
        if self.strategy == "fully_sharded":
            divisible = [place for place, size in enumerate(shape) if size and size % self.replicas == 0]
            if divisible and self.replicas > 1:
                axes[divisible[0]] = "batch"
        for pattern, split in self.rules_in_force if self.strategy == "tensor" else ():
            if len(split) == len(shape) and re.search(pattern, path):
                if path.endswith("_scale"):
                    split = tuple(None if size == 1 else axis for size, axis in zip(shape, split, strict=True))
                self._check_split(path, shape, split)
                return split
        return tuple(axes)

    def check_rows(self, rows: int) -> None:
        """Raises a ValueError where devices do not divide a batch."""
        if rows % self.replicas:
            raise ValueError(
                f"a batch of {rows} rows cannot be divided by {self.replicas} devices: make its rows (batch_size in "
                f"fit; the prompts of generate) a multiple of {self.replicas}. Only the last batch of an epoch may "
                "hold fewer rows."
            )

    def check_matched(self, matched: bool) -> None:
        """Raises a ValueError where "tensor" splits no weight."""
        if self.strategy != "tensor" or matched:
            return
        if not self.rules_in_force:
            raise ValueError(
                "strategy='tensor' splits no weight of this model, because no rule says which: pass rules=((pattern of "
                "a weight's path, (None, 'model')), ...), or rules=Backbone.get_layout_map where KerasHub's backbone "
                "has one, or put @keras_mp.parallel.tensor_rules(rules) on the function that builds the model, and "
                "call it within the scope"
            )
        patterns = ", ".join(repr(pattern) for pattern, _ in self.rules_in_force)
        raise ValueError(
            f"strategy='tensor' splits no weight of this model: none has one of the patterns {patterns} in its path, "
            "and as many dimensions as the rule has axes"
        )

    def check_dtypes(self, dtypes: Iterable[str]) -> None:
        """Raises a ValueError for float16 on a TPU."""
        if "float16" in set(dtypes) and any(name.lower().startswith("tpu") for name in self.devices):
            raise ValueError(FLOAT16_ON_TPU)

    def _check_split(self, path: str, shape: tuple[int, ...], split: tuple[str | None, ...]) -> None:
        for size, axis in zip(shape, split, strict=True):
            if axis is not None and size % self.shape[self.axes.index(axis)]:
                raise ValueError(
                    f"mesh={self.shape} splits {path!r} of shape {shape} over {self.shape[self.axes.index(axis)]} "
                    f"devices, which do not divide {size}: choose a mesh whose second number does"
                )


def plan_of(strategy: str | Plan, devices: int, topology: str = "") -> Plan:
    """Makes a plan for devices that are not there.

    For "tensor" the devices all share each weight, and the rules are the model's.

    Args:
        strategy: a strategy, or a plan.
        topology: the name that libtpu has for a slice of TPUs.

    Raises:
        ValueError: If the strategy is unknown, or the plan is for another number of devices.
    """
    if isinstance(strategy, Plan):
        if strategy.size != devices:
            raise ValueError(
                f"strategy has a mesh of {strategy.shape}, which takes {strategy.size} devices, not {devices}"
            )
        return strategy
    one_of("strategy", strategy, STRATEGIES)
    if strategy == "tensor":
        return Plan(strategy, (), (1, devices))
    return Plan(strategy, (), (devices,), hops=hops_of(topology if strategy == "fully_sharded" else ""))


FLOAT16_ON_TPU = (
    "the model computes in float16, and a TPU has no float16 hardware: use mixed_bfloat16, which needs no loss scaling"
)
