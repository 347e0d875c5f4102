"""Lowers a step of a Keras model on JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from keras_mp.backend.common.device import TracedChip
from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.jax.devices import traced_for
from keras_mp.lowering.lowered import Argument, CompileError, Lowered, named_calls
from keras_mp.optimizer._jax import ON_HOST
from keras_mp.parallel._jax import lowering_scope

_ASKS_FOR_DEVICES = "jax._src.dispatch.jaxpr_has_prim_requiring_devices"


def lower(
    model: keras.Model,
    batch: Any,
    layers: Mapping[str, Any],
    *,
    training: bool,
    chip: TracedChip,
    plan: Any,
) -> Lowered:
    """Lowers one step of a model to StableHLO; nothing runs.

    The arguments are those of `keras_mp.lowering.lower_step`; the batch holds instances of `keras.KerasTensor`, and the
    layers, by path, name the operations.

    Raises:
        CompileError: If JAX cannot trace the step.
    """
    with nullcontext() if plan is None else lowering_scope(plan) as mesh:
        return _lower(model, batch, layers, training, chip, plan, mesh)


def _lower(
    model: keras.Model, batch: Any, layers: Mapping[str, Any], training: bool, chip: TracedChip, plan: Any, mesh: Any
) -> Lowered:
    def lies(path: str, shape: tuple[int, ...], dtype: str) -> NamedSharding | None:
        return None if mesh is None else NamedSharding(mesh, PartitionSpec(*plan.axes_of(path, shape, dtype)))

    def laid_out(variable: keras.Variable) -> jax.ShapeDtypeStruct:
        shape, dtype = tuple(variable.shape), str(variable.dtype)
        sharding: Sharding | None = lies(variable.path, shape, dtype)
        if getattr(variable._layout, "memory_kind", None) == ON_HOST:
            sharding = (sharding or SingleDeviceSharding(jax.devices()[0])).with_memory_kind(ON_HOST)
        return jax.ShapeDtypeStruct(shape, variable.dtype, sharding=sharding)

    def argument(kind: str, path: str, leaf: jax.ShapeDtypeStruct) -> Argument:
        split = [axis for axis in getattr(leaf.sharding, "spec", ()) if axis is not None]
        parts = math.prod(plan.shape[plan.axes.index(axis)] for axis in split)
        on_host = getattr(leaf.sharding, "memory_kind", None) == ON_HOST
        return Argument(kind, path, leaf.shape, str(leaf.dtype), parts, on_host=on_host)

    by_row = None if mesh is None else NamedSharding(mesh, PartitionSpec("batch"))
    leaves, structure = jax.tree.flatten(batch, is_leaf=lambda x: isinstance(x, keras.KerasTensor))
    leaves = [jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, sharding=by_row) for leaf in leaves]
    shapes = jax.tree.unflatten(structure, leaves)
    trainable, passive = model.trainable_variables, model.non_trainable_variables
    groups = [("parameters", trainable), ("state", passive)]
    if training:
        groups += [("optimizer", model.optimizer.variables), ("metrics", model.metrics_variables)]
    state = [[laid_out(v) for v in variables] for _, variables in groups]
    arguments = [
        argument(kind, v.path, leaf)
        for (kind, variables), leaves in zip(groups, state, strict=True)
        for v, leaf in zip(variables, leaves, strict=True)
    ]
    places = jax.tree_util.tree_leaves_with_path(shapes)
    arguments += [argument("batch", jax.tree_util.keystr(path), leaf) for path, leaf in places]

    # Private, as Keras's trainer asks so: a model whose `call()` has no argument `training` takes none here.
    phase = {"training": False} if model._call_has_training_arg else {}

    def inference_step(state: Any, x: Any) -> Any:
        return model.stateless_call(*state, x, **phase)[0]

    # A function of its own: JAX keeps the trace that `fit` made of `model.train_step`, and that is for this machine.
    def train_step(state: Any, batch: Any) -> Any:
        return model.train_step(state, batch)

    step = train_step if training else inference_step
    if plan is not None and plan.by_compiler:
        chip = chip._replace(capability=None)  # to divide cuDNN's attention the compiler asks for the devices
    # cuDNN's attention asks for them although each device's own part of a step needs none.
    own_parts = plan is not None and not plan.by_compiler and chip.platform == "gpu"
    without_devices = patched({_ASKS_FOR_DEVICES: _no} if own_parts else {})
    platform = {"gpu": "cuda"}.get(chip.platform, chip.platform)
    try:
        with traced_for(chip), without_devices, _without_tracebacks(), named_calls(layers, jax.named_scope) as calls:
            # As Keras's trainer does; keep_unused, so that the arguments are those above.
            out = None
            if mesh is not None and training:
                out = (None, jax.tree.map(lambda leaf: leaf.sharding, tuple(state)))
            compiled = jax.jit(step, donate_argnums=0 if training else (), keep_unused=True, out_shardings=out)
            lowered = compiled.trace(tuple(state), shapes).lower(lowering_platforms=(platform,))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CompileError(f"JAX cannot trace the step of model {model.name!r}: {error}") from error
    module = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
    return Lowered(module.encode(), tuple(arguments), tuple(calls), "jax", model.name)


def _no(original: Any) -> Any:
    del original
    return lambda jaxpr: False


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Leaves the lines of the program out of the module."""
    # It then depends on the step alone.
    limit = getattr(jax.config, "jax_traceback_in_locations_limit")  # noqa: B009 (mypy does not know it)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
