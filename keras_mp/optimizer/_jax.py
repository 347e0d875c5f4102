"""A step's update, or none, on JAX, and arrays that lie in the host's memory until they are used.

The arguments are those of `_tensorflow`, which describes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import SingleDeviceSharding

from keras_mp.backend.jax.devices import traced_chip
from keras_mp.backend.jax.tensors import barrier


def all_finite(tensors: list[Any]) -> Any:
    """Tells whether all values are finite, in one boolean tensor."""
    return jnp.stack([jnp.all(jnp.isfinite(tensor)) for tensor in tensors]).all()


def conditional(
    condition: Any,
    then: Callable[[Any], None],
    otherwise: Callable[[Any], None] | None,
    argument: Any,
    variables: list[keras.Variable],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Calls one of two functions, which assign to given variables."""

    def prepared(argument: Any) -> None:
        # Within the branch XLA makes it part of the loops; before, it would be one of its own, over all of memory.
        then(argument if prepare is None else prepare(argument))

    if not isinstance(condition, jax.core.Tracer):
        function = prepared if condition else otherwise
        if function is not None:
            function(argument)  # eagerly, as without a condition
        return

    def values_after(function: Callable[[Any], None], before: list[Any]) -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(variables, before, strict=True))) as scope:
            function(argument)
        return [scope.get_current_value(variable) for variable in variables]

    after = [variable.value for variable in variables]
    if _is_for_cpu():
        branches = [partial(values_after, function) for function in (prepared, otherwise or (lambda _: None))]
        after = jax.lax.cond(condition, *branches, after)
    else:
        # XLA writes the results of a branch beside its arguments, a copy of all weights and slots, and those of a loop
        # in their place. On a CPU it moves parts of the update out of the loop, which are then rounded otherwise.
        for runs, function in ((condition, prepared), (jnp.logical_not(condition), otherwise)):
            if function is not None:
                body = partial(values_after, function)
                after = jax.lax.fori_loop(0, runs.astype("int32"), lambda _, before, body=body: body(before), after)
    for variable, value in zip(variables, after, strict=True):
        variable.assign(value)


def _is_for_cpu() -> bool:
    return traced_chip().platform == "cpu"


def update_if(
    condition: Any,
    update: Callable[[Any], None],
    argument: Any,
    variables: list[keras.Variable],
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Makes an update, or leaves the variables as they were."""
    if _is_for_cpu() or not isinstance(condition, jax.core.Tracer):
        conditional(condition, update, None, argument, variables, prepare)
        return
    with keras.StatelessScope(state_mapping=[(variable, variable.value) for variable in variables]) as scope:
        update(argument if prepare is None else prepare(argument))
    for variable in variables:
        old, new = variable.value, scope.get_current_value(variable)
        if new is not old:
            variable.assign(jnp.where(condition, new, old))


def overwrite(variables: list[keras.Variable], values: list[Any]) -> None:
    """Assigns each variable a value, or that of another variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value.value if isinstance(value, keras.Variable) else value)


def sum_repeated_rows(gradient: Any) -> Any:
    """Returns the gradient: on JAX, Keras's gradients are dense."""
    return gradient


def replica_count() -> int:
    """Counts the devices over which the distribution splits a batch."""
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.batch_dim_name is None:
        return 1
    mesh = distribution.device_mesh
    return int(mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)])


def any_replica(flag: Any) -> Any:
    """Returns the flag: JAX sees all devices as one."""
    return flag


def sum_over_replicas(tensors: list[Any]) -> list[Any]:
    """Returns the tensors, which the backward pass has summed."""
    return tensors


def max_over_replicas(tensor: Any) -> Any:
    """Returns the tensor: it is that of all devices."""
    return tensor


def reduce_dtype() -> str:
    """Returns "float32": JAX has summed the gradients by then."""
    return "float32"


ON_HOST = "pinned_host"


def check_host_memory() -> None:
    """Checks that a step can use the host's memory.

    Raises:
        ValueError: If it cannot.
    """
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    if ON_HOST not in kinds:
        raise ValueError(
            f"state_memory='host' needs memory of kind {ON_HOST!r}, and {jax.devices()[0]} has only {', '.join(kinds)}"
        )


def keep_on_host(variable: keras.Variable) -> None:
    """Moves a variable, and later values, to the host's memory.

    A step then reads its values by `fetched` and assigns them by `stored`.
    """
    layout = getattr(variable._layout, "backend_layout", variable._layout)
    if layout is None:
        layout = SingleDeviceSharding(jax.devices()[0])
    variable._layout = layout.with_memory_kind(ON_HOST)
    if variable._value is not None:
        variable._direct_assign(variable._value)


def fetched(array: Any, after: list[Any]) -> Any:
    """Copies an array to the device, after others are there."""
    if after and isinstance(array, jax.core.Tracer):
        array = barrier([array], after)[0]
    return jax.device_put(array, jax.memory.Space.Device)


def fetches_early() -> bool:
    """Tells whether the compiler starts copies from hosts early.

    libtpu starts them as soon as their source is there, whatever `fetched` has them wait for. In a loop it cannot.
    """
    return traced_chip().platform == "tpu"


def stored(array: Any) -> Any:
    """Copies an array from the device to the host's memory."""
    return jax.device_put(array, jax.memory.Space.Host)


def update_in_one_program(
    update: Callable[[list[Any]], None], gradients: list[Any], keeps_rows: bool, beside: Any
) -> None:
    """Calls a function with gradients."""
    del keeps_rows, beside
    update(gradients)


HAS_SPARSE_GRADIENTS = False


# A Keras optimizer that accumulates makes its update in every step, and then chooses between old and new values.
ACCUMULATING_COPIES = True
