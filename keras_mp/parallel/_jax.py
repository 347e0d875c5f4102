"""Several devices on JAX: a step of explicit collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec

from keras_mp.backend.common.keras_patches import Make, patched
from keras_mp.backend.jax.tensors import active, inside, reading_parts
from keras_mp.parallel._jax_part import AXIS, VariablePart
from keras_mp.parallel._jax_placement import in_parts
from keras_mp.parallel._jax_workers import ENGINE_ERRORS as ENGINE_ERRORS
from keras_mp.parallel._jax_workers import connect as connect
from keras_mp.parallel._jax_workers import disconnect as disconnect
from keras_mp.parallel._jax_workers import is_engine_error as is_engine_error
from keras_mp.parallel._jax_workers import shards_input
from keras_mp.parallel._jax_workers import silent_processes as silent_processes
from keras_mp.parallel._jax_workers import stops_after as stops_after
from keras_mp.parallel._jax_workers import store_get as store_get
from keras_mp.parallel._jax_workers import store_put as store_put

HOW_TO_HAVE_MORE_DEVICES = "start with XLA_FLAGS=--xla_force_host_platform_device_count=8"


class _Active(NamedTuple):
    """Plan in force, and its mesh."""

    plan: Any
    mesh: Any


class Layout(keras.distribution.ModelParallel):
    """Keras's distribution by a plan with devices."""

    def __init__(self, plan: Any) -> None:
        mesh = keras.distribution.DeviceMesh(plan.shape, list(plan.axes), list(plan.devices))
        super().__init__(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name=AXIS, auto_shard_dataset=False)
        self.plan = plan
        self._matched = False

    def get_variable_layout(self, variable: keras.Variable) -> Any:
        # Private: where Keras keeps the layout that it was given.
        if getattr(variable, "_layout", None) is not None:
            return variable._layout
        axes = self.plan.axes_of(variable.path, tuple(variable.shape), str(variable.dtype))
        self._matched = self._matched or any(axes)
        return keras.distribution.TensorLayout(axes, self.device_mesh)

    def get_data_layout(self, data_shape: Any) -> Any:
        self.plan.check_rows(data_shape[0] * (jax.process_count() if shards_input() else 1))
        self.plan.check_matched(self._matched)
        return keras.distribution.TensorLayout([AXIS] + [None] * (len(data_shape) - 1), self.device_mesh)

    def get_tensor_layout(self, path: Any) -> None:
        """Leaves activations to the compiler."""


def is_spread(model: keras.Model) -> bool:
    """Whether a model was built on several devices or processes."""
    return any(len(variable.value.sharding.device_set) > 1 for variable in model.variables)


def tpu_coordinates(names: Sequence[str]) -> tuple[str, list[tuple[int, ...]]] | None:
    """Returns the kind of TPUs and their coordinates.

    None for other devices. The names are Keras's.
    """
    devices = {f"{device.platform}:{device.id}": device for device in jax.devices()}
    coordinates = [tuple(getattr(devices.get(name), "coords", None) or ()) for name in names]
    return (devices[names[0]].device_kind, coordinates) if all(coordinates) else None


@contextmanager
def parallel_scope(plan: Any) -> Iterator[Any]:
    """Scope in which a model trains over a plan's devices."""
    layout = Layout(plan)
    replacements = in_parts() | {"keras.src.backend.jax.distribution_lib.distribute_data_input": _dividing(plan)}
    with layout.scope(), patched(replacements), _in_force(plan, layout.device_mesh.backend_mesh):
        yield layout


@contextmanager
def lowering_scope(plan: Any) -> Iterator[Any]:
    """Scope that traces a step for devices that are absent."""
    mesh = jax.sharding.AbstractMesh(tuple(plan.shape), tuple(plan.axes))
    with _in_force(plan, mesh):
        yield mesh


@contextmanager
def _in_force(plan: Any, mesh: Any) -> Iterator[None]:
    step = {} if plan.by_compiler else {"keras.Model.compute_loss_and_updates": _loss_and_updates}
    active.append(_Active(plan, mesh))
    try:
        with patched(step):
            yield
    finally:
        active.pop()


def _dividing(plan: Any) -> Make:
    """Gives every device the whole of an indivisible last batch.

    Keras would lay it out as the batches before it, which fails.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def distribute(batch: Any, layout: Any, batch_dim_name: Any) -> Any:
            if batch is None or shards_input():
                return original(batch, layout, batch_dim_name)
            layout = getattr(layout, "backend_layout", layout)
            if batch.shape[0] % plan.replicas:
                layout = jax.sharding.NamedSharding(layout.mesh, PartitionSpec())
            if jax.process_count() > 1:
                return jax.make_array_from_callback(batch.shape, layout, np.asarray(batch).__getitem__)
            return original(batch, layout, batch_dim_name)

        return distribute

    return make


def _loss_and_updates(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sums the gradients of Keras's loss by explicit collectives."""

    def compute(
        model: keras.Model, trainable: Any, passive: Any, metrics: Any, x: Any, y: Any, sample_weight: Any,
        training: bool = False, optimizer_variables: Any = None,
    ) -> Any:  # fmt: skip
        if not training:
            return original(model, trainable, passive, metrics, x, y, sample_weight, training=False)
        active[-1].plan.check_dtypes(layer.compute_dtype for layer in model._flatten_layers())
        mapping = list(zip(model.optimizer.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            factor = model.optimizer.scale_loss(jnp.ones(()))
        others = (passive, metrics, factor, (x, y, sample_weight))

        @jax.custom_vjp
        def loss_and_updates(trainable: Any, others: Any) -> Any:
            return _on_each_device(model, original, trainable, *others)[0]

        # The gradients are there with the loss, because the loss of a device says nothing without its collectives.
        def forward(trainable: Any, others: Any) -> Any:
            return _on_each_device(model, original, trainable, *others)

        def backward(gradients: Any, upstream: Any) -> Any:
            return [gradient * upstream[0].astype(gradient.dtype) for gradient in gradients], None

        loss_and_updates.defvjp(forward, backward)
        return loss_and_updates(trainable, others)

    return compute


def _on_each_device(
    model: keras.Model, original: Callable[..., Any], trainable: Any, passive: Any, metrics: Any, factor: Any, data: Any
) -> Any:
    """Adds up the devices' losses and gradients of their rows.

    Returns what Keras's `compute_loss_and_updates` does, and the gradients, each with the layout of its variable.
    """
    plan, mesh = active[-1]
    dtypes = _compute_dtypes(model)
    own = [_part(plan, v, dtypes) for v in model.trainable_variables]
    fixed = [_part(plan, v, dtypes) for v in model.non_trainable_variables]
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    split = {id(v): part for v, part in zip(variables, own + fixed, strict=True) if part.axis is not None}
    rows = next(leaf.shape[0] for leaf in jax.tree.leaves(data))
    # A ragged last batch: each device has all of it, and the mean over the devices is that of one.
    by_row = PartitionSpec(AXIS) if rows % plan.replicas == 0 else PartitionSpec()
    whole = PartitionSpec()

    def on_one(trainable: Any, passive: Any, metrics: Any, factor: Any, data: Any) -> Any:
        kept: dict[str, list[bool]] = {}

        def loss_of(trainable: Any) -> Any:
            with _scaled_by(model.optimizer, factor / plan.replicas), _one_of_several(split):
                loss, (unscaled, y_pred, new, new_metrics) = original(
                    model, trainable, passive, metrics, *data, training=True, optimizer_variables=[]
                )
            kept["passive"] = [after is before for after, before in zip(new, passive, strict=True)]
            kept["metrics"] = [after is before for after, before in zip(new_metrics, metrics, strict=True)]
            return loss, (unscaled, y_pred, new, new_metrics)

        (loss, (unscaled, y_pred, new, new_metrics)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        gradients = [part.summed(gradient) for part, gradient in zip(own, gradients, strict=True)]
        new = [
            before if same else part.of_whole(_mean(after))
            for part, before, after, same in zip(fixed, passive, new, kept["passive"], strict=True)
        ]
        new_metrics = [
            before if same else before + jax.lax.psum(after - before, AXIS)
            for before, after, same in zip(metrics, new_metrics, kept["metrics"], strict=True)
        ]
        loss, unscaled = jax.lax.psum(loss, AXIS), _mean(unscaled)
        return (loss, (unscaled, y_pred, new, new_metrics)), gradients

    trainable_specs, passive_specs = [part.spec for part in own], [part.spec for part in fixed]
    return jax.shard_map(
        on_one,
        mesh=mesh,
        in_specs=(trainable_specs, passive_specs, whole, whole, by_row),
        out_specs=((whole, (whole, by_row, passive_specs, whole)), trainable_specs),
        check_vma=False,
    )(trainable, passive, metrics, factor, data)


def _part(plan: Any, variable: keras.Variable, dtypes: dict[int, str]) -> VariablePart:
    shape, dtype = tuple(variable.shape), str(variable.dtype)
    axes = plan.axes_of(variable.path, shape, dtype)
    axis = axes.index(AXIS) if AXIS in axes else None
    overwritten = bool(getattr(variable, "overwrite_with_gradient", False))
    groups = [] if axis is None else plan.groups(axis)
    # Private: whether a layer reads the variable in its own dtype, which it does where that matters.
    in_8_bits = variable._autocast and not overwritten and plan.in_8_bits(shape, dtype)
    compute_dtype = dtypes.get(id(variable), dtype)
    return VariablePart(
        axis, compute_dtype, plan.reduce_dtype, groups, overwritten, PartitionSpec(*axes), shape, in_8_bits
    )


def _compute_dtypes(model: keras.Model) -> dict[int, str]:
    """Lists 16-bit dtypes that layers read variables in."""
    return {
        id(variable): layer.compute_dtype
        for layer in model._flatten_layers()
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
        if variable._autocast and variable.dtype == "float32" and layer.compute_dtype in ("float16", "bfloat16")
    }


def _mean(value: Any) -> Any:
    """Takes the mean over the devices; integers are alike."""
    return jax.lax.pmean(value, AXIS) if jnp.issubdtype(value.dtype, jnp.floating) else value


@contextmanager
def _scaled_by(optimizer: keras.optimizers.Optimizer, factor: Any) -> Iterator[None]:
    """Has an optimizer scale a loss by a number."""
    # Not by its variables, whose values are those outside of this device's part.
    vars(optimizer)["scale_loss"] = lambda loss: loss * factor
    try:
        yield
    finally:
        del vars(optimizer)["scale_loss"]


@contextmanager
def _one_of_several(split: dict[int, VariablePart]) -> Iterator[None]:
    """A scope for one device's part of a step.

    Variables that are split are gathered where they are read: a block that `keras_mp.lean.remat` recomputes gathers its
    weights anew, and they are not kept. Random numbers are this device's own, from seeds that are the same on all.
    """

    def gathering(read: Callable[..., Any]) -> Callable[..., Any]:
        def gathered(variable: keras.Variable, value: Any) -> Any:
            part = split.get(id(variable))
            if part is not None and tuple(value.shape) != part.shape and not reading_parts:
                value = part.gathered(value)
            return read(variable, value)

        return gathered

    def with_parts(begin: Callable[..., None]) -> Callable[..., None]:
        def begin_with_parts(scope: Any, state_mapping: Any = None, **arguments: Any) -> None:
            mapping = list(state_mapping or ())
            begin(scope, [(variable, value) for variable, value in mapping if id(variable) not in split], **arguments)
            scope.state_mapping |= {id(variable): value for variable, value in mapping if id(variable) in split}

        return begin_with_parts

    replacements = {
        "keras.random.SeedGenerator.next": _own_draw,
        "keras.Variable._maybe_autocast": gathering,
        "keras.StatelessScope.__init__": with_parts,
    }
    inside.append(split)
    try:
        with patched(replacements):
            yield
    finally:
        inside.pop()


def _own_draw(draw: Callable[..., Any]) -> Callable[..., Any]:
    def following(generator: Any, ordered: bool = True) -> Any:
        return jax.random.fold_in(draw(generator, ordered), jax.lax.axis_index(AXIS))

    return following
