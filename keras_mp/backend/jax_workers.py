"""Several processes on JAX: `jax.distributed`, after which the devices of all are one list."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

COLLECTIVE_ERRORS = (jax.errors.JaxRuntimeError,)
"""What a step raises when another process is gone."""


def connect(addresses: Sequence[str], index: int) -> None:
    """Connects this process with the others.

    Args:
        addresses: `host:port` of each; on the first one JAX's coordinator is to listen.
        index: which of them this process is.

    Raises:
        RuntimeError: JAX has computed something already, and can no longer be connected.
    """
    try:
        jax.distributed.initialize(addresses[0], len(addresses), index)
    except RuntimeError as error:
        raise RuntimeError(
            "JAX can only be connected with other processes before it computes anything: begin the training with this, "
            f"before any model or random seed ({error})"
        ) from error


def steps_of(model: Any) -> Any:
    """Returns None: Keras's own `fit` trains over several processes."""


def workers_scope() -> Any:
    """A scope that does nothing: where a model lies is said by Keras's distribution."""
    return nullcontext()


def parts_of(variable: Any) -> None:
    """Returns None: JAX's arrays are whole, wherever they lie."""


def assign_parts(variable: Any, parts: np.ndarray) -> None:
    """Gives a variable the sum of what replicas on TensorFlow held of it."""
    variable.assign(parts.sum(axis=0))
