"""A lowered step: StableHLO, its arguments and its calls."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_mp.backend.common.keras_patches import scopes, wrapped_methods

UNATTRIBUTED = "unattributed"
_CALL = re.compile(r"keras_mp\.call\.(\d+)")


class CompileError(RuntimeError):
    """A step cannot be lowered, or a compiler failed.

    The message names the cause, a remedy, and a compiler's log.
    """


@dataclass(frozen=True)
class Argument:
    """One argument of a lowered step."""

    # "parameters" (weights that train), "state" (weights that do not), "optimizer", "metrics" or "batch"
    kind: str
    path: str  # the variable's path, or the place in the batch
    shape: tuple[int, ...]
    dtype: str  # the element type, as Keras writes it
    parts: int = 1  # the number of devices that it is split over
    holds: str = ""  # the type that its elements stand for, where not their own: "int4" of int8, two weights each
    on_host: bool = False  # whether it lies in the host's memory


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer while the step was traced."""

    path: str  # the layer's path in the model; "" for the model itself
    kind: str  # the layer's class
    number: int  # 1 for its first call in the step


@dataclass(frozen=True)
class Lowered:
    """One step as StableHLO, and what reports say."""

    module: bytes  # the module as text, with locations, or as MLIR bytecode
    arguments: tuple[Argument, ...]  # the arguments of its main function, in order
    calls: tuple[LayerCall, ...]  # the trace's layer calls; operations of call i have keras_mp.call.i in their names
    backend: str  # "tensorflow" or "jax"
    model: str  # the model's name
    precision: str = ""  # the model's precision, as `inspect` names it
    layers: tuple[str, ...] = ()  # the paths of its layers
    flags: Mapping[str, Any] = field(default_factory=dict)  # XLA's options for its training on this machine's CPU

    @property
    def batch(self) -> tuple[str, ...]:
        """Shape and dtype of each array of the batch."""
        given = (argument for argument in self.arguments if argument.kind == "batch")
        return tuple(f"{argument.dtype}{list(argument.shape)}" for argument in given)

    def layer(self, call: int | None) -> str:
        """Returns the path of a call's layer, or "unattributed"."""
        # Of the model itself its name.
        return UNATTRIBUTED if call is None else self.calls[call].path or self.model


def call_of(operation_name: str) -> int | None:
    """Finds an operation's innermost layer call in `Lowered.calls`, or None."""
    numbers = _CALL.findall(operation_name)
    return int(numbers[-1]) if numbers else None


def is_backward(operation_name: str) -> bool:
    """Tells by its name whether an operation is backward.

    So TensorFlow's tape and JAX's transposition name them.
    """
    return "gradient_tape" in operation_name or "transpose(" in operation_name


@contextmanager
def named_calls(layers: Mapping[str, Any], scope: Callable[[str], AbstractContextManager]) -> Iterator[list[LayerCall]]:
    """Names each operation traced within by its layer's call.

    Args:
        layers: the layers, and the operations that are no layers, by path.
        scope: a function that makes the backend's name scope from a name.

    Yields:
        The list of calls, which grows with the trace.
    """
    calls: list[LayerCall] = []
    paths = {id(layer): path for path, layer in layers.items()}
    numbers: Counter[str] = Counter()

    def next_call(layer: Any) -> AbstractContextManager:
        path = paths[id(layer)]
        numbers[path] += 1
        calls.append(LayerCall(path, type(layer).__name__, numbers[path]))
        return scope(f"keras_mp.call.{len(calls) - 1}")

    def named(path: str, layer: keras.Operation, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with next_call(layer):
                return function(*args, **kwargs)

        return call

    before = scopes.set(lambda layer: next_call(layer) if id(layer) in paths else nullcontext())
    try:
        with wrapped_methods(layers.items(), ("call", "quantized_call"), named):
            yield calls
    finally:
        scopes.reset(before)
