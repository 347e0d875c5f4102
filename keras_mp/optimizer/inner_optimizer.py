"""Makes a Keras optimizer clip, decay, update and average once, and nothing else: the rest of a step is done by then.

A Keras optimizer by itself accumulates gradients, and sums them over replicas, after clipping, in branches that a
distribution strategy refuses. So methods are replaced in the `vars` of each optimizer, for one call of `apply`:

```
optimizer.apply                                        Keras's own, which calls
  _overwrite_variables_directly_with_gradients         hides the constraints of bfloat16 weights, too
  _all_reduce_sum_gradients                            nothing: gradients are sums already
  _backend_apply_gradients = _apply_to_leaf            clip, decay, update, average; on a CPU as one program
    update_step                                        one weight: it and its slots are float32, then rounded once;
                                                       released, it is also checked, clipped and decayed here
      _var_key = key_of                                finds the slots of a weight that is float32 for now
      assign, assign_add, assign_sub of _keeping       released: nothing changes where a gradient is not finite
```

An optimizer that is not wrapped keeps `apply_in_one_program` as its `_backend_apply_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mp import backend
from keras_mp.optimizer.gradients import is_finite
from keras_mp.optimizer.inner_build import slots_of
from keras_mp.optimizer.state_slot import (
    SLOTS,
    STATE_DTYPE,
    STATE_MEMORY,
    STORED_AS,
    StateSlot,
    Unconstrained,
    WideWeight,
    updating,
    where_finite,
)
from keras_mp.rebuild.optimizers import leaves, optimizer_slots, stored_variables
from keras_mp.rebuild.walk import is_narrow, is_overwritten, package_of
from keras_mp.system.argument_checks import one_of

engine = backend.engine_of(__package__)


# What an optimizer must be, and how its slots may be stored.


def check_unscaled(name: str, optimizer: keras.optimizers.Optimizer) -> None:
    """Checks that an optimizer does not scale the loss.

    Raises:
        TypeError: If it is not a Keras optimizer.
        ValueError: If it scales the loss already.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{name}={optimizer!r} must be a Keras optimizer, such as keras.optimizers.Adam()")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{name}={optimizer.name!r} is a {type(optimizer).__name__} already, and the loss must be scaled once: use "
            "it as it is, or pass its inner_optimizer"
        )


def check_states(state_dtype: Any, state_memory: Any, releases: bool) -> None:
    """Checks how slots are to be stored, and where.

    Args:
        releases: Whether each weight is updated by itself.

    Raises:
        ValueError: If one is unknown, or the host's memory cannot be used.
    """
    one_of("state_dtype", state_dtype, STORED_AS)
    one_of("state_memory", state_memory, ("device", "host"))
    if state_memory == "host" and not releases:
        raise ValueError(
            "state_memory='host' fetches the slots of a weight when its gradient is there, and needs gradients that "
            "are released: release_gradients=True"
        )
    if state_memory == "host":
        engine.check_host_memory()


def check_built(optimizer: keras.optimizers.Optimizer, state_dtype: str, state_memory: str) -> None:
    """Checks the slots of an optimizer that is built already.

    Raises:
        ValueError: If they are stored in another dtype or memory, or in bfloat16, as Keras makes them.
    """
    anew = "make a new one, for instance by type(optimizer).from_config(optimizer.get_config())"
    for leaf in (leaf for leaf in leaves(optimizer) if leaf.built):
        stored, memory = getattr(leaf, STATE_DTYPE, "float32"), getattr(leaf, STATE_MEMORY, "device")
        if memory != state_memory:
            raise ValueError(
                f"state_memory={state_memory!r} needs an optimizer that is not built, and {leaf.name!r} has its slots "
                f"in memory of the {memory} already: {anew}"
            )
        if stored != state_dtype:
            raise ValueError(
                f"state_dtype={state_dtype!r} needs an optimizer that is not built, and {leaf.name!r} has its slots in "
                f"{stored} already: {anew}, or pass state_dtype={stored!r}"
            )
        narrow = next((variable for variable in leaf.variables if is_narrow(variable)), None)
        if narrow is not None and not hasattr(leaf, SLOTS):
            raise ValueError(
                f"optimizer {leaf.name!r} is built already, and its {narrow.path!r} is in bfloat16, as Keras makes "
                f"it; there small changes would be lost: {anew}"
            )


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


def check_can_release(optimizer: keras.optimizers.Optimizer) -> None:
    """Checks that an optimizer can update each weight by itself.

    Raises:
        ValueError: If it accumulates, clips by the norm of all gradients, or its class defines the update itself.
    """
    for leaf in leaves(optimizer):
        name, refused = f"optimizer {leaf.name!r}", ""
        if leaf.gradient_accumulation_steps:
            refused = (
                f"{name} has gradient_accumulation_steps={leaf.gradient_accumulation_steps}, and keeps the sum of each "
                "gradient: leave out one of the two"
            )
        elif leaf.global_clipnorm:
            refused = (
                f"{name} has global_clipnorm={leaf.global_clipnorm:g}, which needs the norm of all gradients before "
                "any weight is updated: clip each gradient by clipnorm or clipvalue"
            )
        elif package_of(type(leaf).update_step) != "keras":
            refused = (
                f"{name} is a {type(leaf).__name__} with its own update_step, which may write anything: use it without "
                "release_gradients"
            )
        if refused:
            raise ValueError(f"release_gradients=True updates each weight once its gradient is computed. {refused}")


# A step.


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """Counts the micro-batches that an optimizer accumulates.

    Raises:
        ValueError: If several inner optimizers accumulate over different numbers of steps.
    """
    steps = {leaf.gradient_accumulation_steps or 1 for leaf in leaves(optimizer) if leaf.built}
    if len(steps) > 1:
        raise ValueError(
            f"gradient_accumulation_steps is {sorted(steps)} in the optimizers inside {optimizer.name!r}: under one "
            "loss scale it must be the same in all"
        )
    return steps.pop() if steps else 1


def count_step(optimizer: keras.optimizers.Optimizer) -> None:
    """Adds one to the iterations of optimizer and leaves."""
    for counted in {id(counted): counted for counted in (optimizer, *leaves(optimizer))}.values():
        counted._iterations.assign_add(1)


def apply(
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[keras.Variable],
    changing: list[Any],
    how: Update,
) -> None:
    """Makes the update.

    Args:
        grads: the mean gradients of the micro-batches, summed over all replicas.
        changing: all variables that a step may change.
    """
    replacements = {
        "_overwrite_variables_directly_with_gradients": partial(_overwrite_with_gradients, how.releases),
        "_all_reduce_sum_gradients": lambda grads_and_vars: grads_and_vars,
    }
    # Replicas run in threads that take turns, so the last one out takes the replacements away.
    state = vars(optimizer)
    state["_replicas_applying"] = state.get("_replicas_applying", 0) + 1
    # Numbers of weights, before which those of another leaf end.
    first = 0
    written: list[Any] = []
    for leaf in leaves(optimizer):
        vars(leaf).update(
            replacements,
            _backend_apply_gradients=partial(_apply_to_leaf, leaf, changing, how.releases),
            update_step=partial(update_step, leaf, how._replace(first=first, written=written)),
            _var_key=partial(key_of, leaf),
        )
        first += len(leaf._trainable_variables)
    try:
        optimizer.apply(grads, variables)
    finally:
        state["_replicas_applying"] -= 1
        for leaf in leaves(optimizer) if state["_replicas_applying"] == 0 else []:
            for name in (*replacements, "_backend_apply_gradients", "update_step", "_var_key"):
                del vars(leaf)[name]


def finalize(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> None:
    """Sets variables to the moving averages of an optimizer."""
    name = "_model_variables_moving_average"
    for leaf in leaves(optimizer):
        if not leaf.use_ema:
            continue
        averages = vars(leaf)[name]
        averaged = {id(variable): average for variable, average in _averages(leaf)}
        try:
            for variable in variables:
                if id(variable) in averaged:
                    # A copy: on JAX the variable would hold the average's own array, which a step cannot donate twice.
                    vars(leaf)[name] = [ops.copy(_in_dtype_of(variable, averaged[id(variable)]))]
                    leaf.finalize_variable_values([variable])
        finally:
            vars(leaf)[name] = averages


def _apply_to_leaf(
    leaf: keras.optimizers.Optimizer,
    changing: list[Any],
    releases: bool,
    grads: list[Any],
    variables: list[keras.Variable],
) -> None:
    variables = [v.variable if isinstance(v, Unconstrained) else v for v in variables]

    def update(grads: list[Any]) -> None:
        if not releases:  # else both are done in the update of each weight
            grads = leaf._clip_gradients(grads)
            leaf._apply_weight_decay([variable for variable in variables if not is_narrow(variable)])
        # The last weights first, whose gradients are there first: slots on the host are fetched weight by weight.
        order = slice(None, None, -1 if releases else 1)
        leaf._backend_update_step(grads[order], variables[order], leaf.learning_rate)
        if leaf.use_ema:
            leaf._update_model_variables_moving_average(
                [WideWeight(v) if is_narrow(v) else v for v in leaf._trainable_variables]
            )

    if releases:
        update(grads)
    else:
        engine.update_in_one_program(update, grads, _keeps_rows(leaf), leaf._iterations)
    if leaf.use_ema and leaf.ema_overwrite_frequency:
        is_due = ops.equal((leaf.iterations + 1) % leaf.ema_overwrite_frequency, 0)
        engine.conditional(is_due, lambda _: _overwrite_with_averages(leaf), None, [], changing)


def _in_dtype_of(variable: keras.Variable, average: Any) -> Any:
    return ops.cast(average, variable.dtype) if is_narrow(variable) else average


def _overwrite_with_gradients(
    releases: bool, grads: list[Any], variables: list[keras.Variable]
) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(grads, variables, strict=True))
    for gradient, variable in pairs:
        if is_overwritten(variable):
            finite = is_finite(gradient) if releases and gradient is not None else None
            variable.assign(where_finite(finite, gradient, variable))
    rest = [(gradient, variable) for gradient, variable in pairs if not is_overwritten(variable)]
    # The constraint of a bfloat16 weight is a part of its update, which rounds but once.
    stand_in = [Unconstrained(v) if is_narrow(v) and v.constraint is not None else v for _, v in rest]
    return [gradient for gradient, _ in rest], stand_in


def _overwrite_with_averages(optimizer: keras.optimizers.Optimizer) -> None:
    averaged = _averages(optimizer)
    values = [_in_dtype_of(variable, average) for variable, average in averaged]
    engine.overwrite([variable for variable, _ in averaged], values)


def _averages(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """Pairs averaged variables with averages: overwritten ones have none."""
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]


# The update of one weight: slots in fewer bits and a bfloat16 weight are float32 in it, and rounded once.


class Update(NamedTuple):
    """How an optimizer makes an update."""

    seed: int  # of stochastic rounding
    releases: bool = False  # whether each weight is checked, clipped and updated by itself
    first: int = 0  # the number of the optimizer's first weight
    written: Any = None  # values of the slots that were written to the host's memory last; empty before the first


def update_step(
    leaf: keras.optimizers.Optimizer, how: Update, gradient: Any, variable: Any, learning_rate: Any
) -> None:
    """Takes the place of an optimizer's own `update_step`."""
    finite = None
    if how.releases:
        finite, gradient = is_finite(gradient), leaf._clip_gradients([gradient])[0]
    open_slots: list[StateSlot] = [*slots_of(leaf, variable)]
    weight = variable
    if is_narrow(variable):
        place = leaf._get_variable_index(variable)
        weight = WideWeight(leaf._trainable_variables[place], variable, how.first + place)
        open_slots.append(weight)

    def update(gradient: Any, finite: Any = None, written: list[Any] | None = None) -> None:
        with updating(open_slots, how.seed, leaf._iterations, finite, written), _keeping(leaf, finite):
            if how.releases or weight is not variable:
                _decay(leaf, weight, finite)
            type(leaf).update_step(leaf, gradient, weight, learning_rate)
            if weight is not variable and weight.constraint is not None:
                weight.assign(weight.constraint(weight.value))

    on_host = [slot.values for slot in open_slots if slot.on_host]
    if on_host and engine.fetches_early():
        for values in on_host:  # arguments of the step, whose types do not say where they lie
            values.assign(engine.stored(values.value))
        after = _whatever(how.written) if how.written else True
        # Behind a value that the loop changes: else XLA computes before the loop what needs the gradient alone.
        engine.conditional(
            *(ops.logical_and(finite, after), update, None, gradient, _read_by_update(leaf, variable)),
            lambda gradient: backend.barrier([gradient], [backend.as_tensor(variable)])[0],
        )
        how.written[:] = [backend.as_tensor(variable)[(slice(0, 1),) * len(variable.shape)]]
    else:
        update(gradient, finite, how.written)


def _whatever(values: list[Any]) -> Any:
    """Returns True, which compilers cannot know without the values."""
    return ops.all(ops.stack([ops.any(ops.logical_or(x == x, x != x)) for x in values]))  # noqa: PLR0124


def _read_by_update(leaf: keras.optimizers.Optimizer, variable: keras.Variable) -> list[keras.Variable]:
    """Lists a weight, its slots, and variables of no weight."""
    own = [slot.variable for slot in optimizer_slots(leaf) if slot.weight is None or slot.weight is variable]
    return [variable, *(part for slot in own for part in stored_variables(slot))]


@contextmanager
def _keeping(leaf: keras.optimizers.Optimizer, finite: Any) -> Iterator[None]:
    """Scope in which assignments do nothing unless `finite`, or None."""
    if finite is None:
        yield
        return

    def assign(variable: Any, value: Any) -> None:
        if isinstance(variable, StateSlot):  # which is stored when it is closed
            type(leaf).assign(leaf, variable, value)
            return
        rows = backend.values_of(value) is not value
        old = ops.take(variable, value.indices, axis=0) if rows else variable
        type(leaf).assign(leaf, variable, backend.map_values(lambda new: where_finite(finite, new, old), value))

    def relative(name: str) -> Callable[[Any, Any], None]:
        def change(variable: Any, value: Any) -> None:
            if not isinstance(variable, StateSlot):
                value = backend.map_values(
                    lambda new: where_finite(finite, new, ops.zeros_like(backend.as_tensor(new))), value
                )
            getattr(type(leaf), name)(leaf, variable, value)

        return change

    replaced = {"assign": assign, "assign_add": relative("assign_add"), "assign_sub": relative("assign_sub")}
    vars(leaf).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(leaf)[name]


def _decay(leaf: keras.optimizers.Optimizer, weight: Any, finite: Any) -> None:
    """Decays one weight, also within an update on TensorFlow."""
    if type(leaf)._apply_weight_decay is not keras.optimizers.Optimizer._apply_weight_decay:
        if not isinstance(weight, StateSlot):  # Muon asks for its path, which TensorFlow's variable has not
            weight = leaf._trainable_variables[leaf._get_variable_index(weight)]
        before = ops.copy(backend.as_tensor(weight))
        type(leaf)._apply_weight_decay(leaf, [weight])
        if not isinstance(weight, StateSlot):  # which is stored when it is closed
            weight.assign(where_finite(finite, backend.as_tensor(weight), before))
    elif leaf.weight_decay is not None and leaf._use_weight_decay(weight):
        rate = ops.cast(leaf.learning_rate, "float32")
        leaf.assign_sub(weight, weight * leaf.weight_decay * rate)


def key_of(leaf: keras.optimizers.Optimizer, variable: Any) -> Any:
    """Takes the place of `_var_key`, which finds a weight's slots."""
    return type(leaf)._var_key(leaf, variable.values if isinstance(variable, WideWeight) else variable)


# An optimizer's update as one program, on a CPU whose step is not jitted as a whole.
#
# Keras makes an update of some ten kernels a weight, each of which reads and writes memory; one program reads gradient,
# weight and slots once, and writes them once.


def apply_in_one_program(
    optimizer: keras.optimizers.Optimizer, grads: list[Any], trainable_variables: list[keras.Variable]
) -> None:
    """Takes the place of `_backend_apply_gradients`, which it calls."""
    own = type(optimizer)._backend_apply_gradients
    if engine.replica_count() > 1:
        own(optimizer, grads, trainable_variables)  # which sums them over the replicas
        return

    def update(grads: list[Any]) -> None:
        own(optimizer, grads, trainable_variables)

    engine.update_in_one_program(update, grads, _keeps_rows(optimizer), optimizer._iterations)


def _keeps_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether a sparse gradient changes its own rows only."""
    step = type(optimizer).update_step
    if package_of(step) != "keras":
        return True
    return step is keras.optimizers.SGD.update_step and not optimizer.momentum
