"""A bfloat16 weight whose update is computed in float32 and rounded once, so that small updates are not lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.loss_scaling.state_slot import StateSlot

WEIGHT_ROUNDINGS = ("stochastic", "nearest")


def check_weight_rounding(weight_rounding: Any) -> None:
    """Checks the name of a rounding.

    Raises:
        ValueError: If it is not one of the two.
    """
    if weight_rounding not in WEIGHT_ROUNDINGS:
        raise ValueError(f"weight_rounding={weight_rounding!r} must be 'stochastic' or 'nearest'")


def check_weights(variables: Iterable[keras.Variable]) -> None:
    """Checks that no weight is stored in float16.

    Raises:
        ValueError: If one is.
    """
    for variable in variables:
        if keras.backend.standardize_dtype(variable.dtype) == "float16":
            raise ValueError(
                f"weight {variable.path!r} is stored in float16, whose steps are 6e-8 for all values below 6e-5, so "
                "that small updates would be lost or mostly noise, and whose largest value is 65504: build the model "
                "under 'mixed_float16', which keeps weights in float32, or under 'bfloat16'"
            )


def is_narrow(variable: Any) -> bool:
    """Tells whether a weight is stored in bfloat16, of which an update needs a float32 view."""
    return bool(keras.backend.standardize_dtype(variable.dtype) == "bfloat16")


class WideWeight(StateSlot):
    """What an optimizer reads and assigns within `updating` as it does a float32 weight.

    Other attributes are those of the Keras variable.

    Args:
        variable: the Keras variable.
        values: what is read and assigned to: the variable, or on TensorFlow the replica's own.
        index: tells its random bits from those of other weights and slots.
        rounding: "stochastic" or "nearest".
    """

    def __init__(
        self, variable: keras.Variable, values: Any = None, index: int = 0, rounding: str = "stochastic"
    ) -> None:
        super().__init__(variable if values is None else values, None, "bfloat16", False, index)
        self.variable, self.rounding = variable, rounding

    @property
    def name(self) -> str:
        """The name that Keras gives an update: on TensorFlow the path, which patterns of names are compared with."""
        return str(self.values.name)

    @property
    def path(self) -> str:
        """The path of the variable."""
        return str(self.variable.path)

    @property
    def value(self) -> Any:
        """The float32 tensor."""
        if self._working is not None:
            return self._working
        read = ops.cast(backend.as_tensor(self.values), "float32")
        if self._is_open:
            self._working = read
        return read

    def _round(self, seed: int, step: Any) -> None:
        if self.rounding == "stochastic":
            super()._round(seed, step)
        elif self._is_changed:
            self._store(self._working, None)

    def __getattr__(self, name: str) -> Any:
        if name == "variable":
            raise AttributeError(name)
        return getattr(self.variable, name)


class Unconstrained:
    """Stands for a weight whose constraint its update applies, so that Keras does not apply it again.

    Args:
        variable: the weight.
    """

    constraint = None

    def __init__(self, variable: keras.Variable) -> None:
        self.variable = variable
