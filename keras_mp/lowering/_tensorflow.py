"""Lowers a step of a Keras model on TensorFlow."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_mp.backend.common.device import TracedChip
from keras_mp.backend.tensorflow.devices import traced_for
from keras_mp.lowering.lowered import Argument, CompileError, LayerCall, Lowered, call_of, named_calls

_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


def lower(
    model: keras.Model,
    batch: Any,
    layers: Mapping[str, Any],
    *,
    training: bool,
    chip: TracedChip,
    plan: Any,
) -> Lowered:
    """Lowers one step of a model, as of `_jax`.

    Raises:
        CompileError: If TensorFlow cannot trace the step for XLA.
        ValueError: If there is a plan, which is JAX's alone.
    """
    if plan is not None:
        raise ValueError(
            f"strategy={plan.strategy!r} needs JAX (KERAS_BACKEND=jax): on TensorFlow a step on several devices is not "
            "one program that XLA could compile"
        )
    # Not tf.nest, which takes a KerasTensor for a structure of its own.
    leaves = keras.tree.flatten(batch)
    specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]

    def step(*flat: Any) -> Any:
        data = keras.tree.pack_sequence_as(batch, list(flat))
        return model.train_step(data) if training else model(data, training=False)

    try:
        with traced_for(chip), named_calls(layers, tf.name_scope) as calls:
            function = tf.function(step, jit_compile=True, autograph=False)
            concrete = function.get_concrete_function(*specs)
            with warnings.catch_warnings():
                # Without a device, TensorFlow draws a random number to learn which one it would take.
                warnings.filterwarnings("ignore", "device_name is being deprecated")
                module = function.experimental_get_compiler_ir(*specs)(stage="stablehlo_serialized", device_name=_HOST)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as error:
        raise CompileError(_explain(model, str(error), calls)) from error
    return Lowered(module, tuple(_arguments(model, concrete, leaves)), tuple(calls), "tensorflow", model.name)


def _explain(model: keras.Model, error: str, calls: list[LayerCall]) -> str:
    start = f"TensorFlow cannot compile the step of model {model.name!r} for XLA: "
    unsupported = re.search(r"unsupported operations.*?: (\w+)", error)
    call = call_of(error)
    if unsupported is None or call is None:
        return start + error.split("\n")[0][:1000]
    layer = calls[call]
    return (
        f"{start}layer {layer.path!r} ({layer.kind}) runs {unsupported[1]}, which XLA does not "
        "support. Move augmentation, and operations on strings or on shapes known only at run time, into the data "
        "pipeline."
    )


def _arguments(model: keras.Model, concrete: Any, leaves: list[Any]) -> list[Argument]:
    kinds = [("parameters", model.trainable_variables), ("state", model.non_trainable_variables)]
    if getattr(model, "optimizer", None) is not None:
        kinds += [("optimizer", model.optimizer.variables), ("metrics", model.metrics_variables)]
    known = {id(v.value.handle): (kind, v.path) for kind, variables in kinds for v in variables}
    arguments = [Argument("batch", f"[{i}]", tuple(leaf.shape), leaf.dtype) for i, leaf in enumerate(leaves)]
    values = {id(v.handle): v for v in concrete.variables}
    for captured in concrete.captured_inputs:
        variable = values.get(id(captured))
        kind, path = known.get(id(captured), ("state", getattr(variable, "name", "constant")))
        if variable is None:
            arguments.append(Argument(kind, path, tuple(captured.shape), captured.dtype.name))
        else:
            arguments.append(Argument(kind, path, tuple(variable.shape), variable.dtype.name))
    return arguments
