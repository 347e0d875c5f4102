"""Training steps in one precision, as workloads of a benchmark."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import keras

from keras_mp import backend
from keras_mp.bench.workloads import CannotRunError, Workload
from keras_mp.conversion.model_file import model_of_file, step_of_file
from keras_mp.conversion.other_precision import in_precision
from keras_mp.fp8.selection import decide
from keras_mp.numerics.data import random_batches
from keras_mp.precision import hardware
from keras_mp.precision.hardware import Device
from keras_mp.precision.policy import COMPUTES_IN, GAINS_FROM, pays, set_global_policy
from keras_mp.rebuild.walk import Walk
from keras_mp.system.packages import installed

engine = backend.engine_of(__package__)


def file(
    path: str,
    precision: str,
    batch_size: int | None = None,
    length: int | None = None,
    data: str | None = None,
    imports: Sequence[str] = (),
    unsafe: bool = False,
) -> Workload:
    """A step of a model in a .keras file.

    Args:
        batch_size: the number of samples of a step without `data`, by default 8.
        length: the size of each other axis that the model leaves open, without `data`.
        data: a pickled batch `(x, y)` or `(x, y, sample_weight)` of numpy arrays; by default random numbers.
    """
    check_can_run(precision)
    if data is None:
        size = 8 if batch_size is None else batch_size
        model, shapes, trains = step_of_file(Path(path), size, length, imports, unsafe=unsafe)
        batch = random_batches(model, shapes, 1)[0]
    else:
        model, trains = model_of_file(Path(path), imports, unsafe=unsafe)
        batch = pickle.loads(Path(data).read_bytes())
    if not trains:
        raise CannotRunError(f"the model in {path!r} is not compiled for training: compile it with a loss, and save it")
    choice = set_global_policy(precision)
    model = in_precision(model, precision)
    model.jit_compile = choice.jit_compile
    return of_model(model, batch, precision)


def of_model(model: keras.Model, batch: tuple, precision: str) -> Workload:
    """A step of a compiled model.

    Args:
        model: a model, compiled for training, in the precision.
        batch: `(x, y)` or `(x, y, sample_weight)` of numpy arrays.
    """
    device = hardware.current_device()
    shape = keras.tree.flatten(batch)[0].shape
    first = keras.tree.flatten(model.inputs)[0] if getattr(model, "inputs", None) else None
    tokens = first is not None and len(shape) == 2 and not keras.backend.is_float_dtype(first.dtype)
    details = {
        "backend": keras.backend.backend(),
        "device": device.name,
        "kind": device.kind,
        "jit": bool(model.jit_compile),
        "batch": shape[0],
        "unit": "tokens" if tokens else "samples",
        "units": shape[0] * shape[1] if tokens else shape[0],
        "why_not": _why_not(model, device, precision),
        "versions": installed(("keras", "tensorflow", "jax", "numpy")),
    }
    accelerator = device.kind != "cpu"
    return Workload(engine.timed_steps(model, batch), details, backend.peak_memory_bytes if accelerator else None)


def check_can_run(precision: str) -> None:
    """Raises a `CannotRunError` without units for a precision."""
    device = hardware.current_device()
    dtype = COMPUTES_IN[precision]
    # On a CPU float16 is slow, and runs; a TPU has none. FP8 without units for it is computed in other dtypes.
    if dtype == "fp8" or (dtype == "float16" and device.kind == "tpu"):
        served = hardware.support(dtype, device)
        if not served.ok:
            raise CannotRunError(served.reason)


def _why_not(model: keras.Model, device: Device, precision: str) -> str:
    """Why a precision need not gain here; "" if unknown."""
    served = pays(precision, device)
    if not served.ok:
        return served.reason
    walk = Walk(model)
    convolutions = any("Conv" in type(layer).__name__ for layer in walk.every)
    sizes = [decision.sizes for decision in decide(walk) if decision.sizes is not None]
    if device.kind != "cpu" or precision != "mixed_bfloat16" or convolutions or not sizes:
        return ""
    inputs, outputs = max(sizes, key=min)
    if min(inputs, outputs) >= GAINS_FROM:
        return ""
    return (
        f"the products are too small to gain. The largest has {inputs} inputs and {outputs} outputs; on a CPU "
        f"bfloat16 gains from about {GAINS_FROM} of each on."
    )
