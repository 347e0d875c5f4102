"""What a training holds in variables, by names that do not depend on the precision it runs in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_mp import backend
from keras_mp.backend.common.keras_private import GLOBAL_SEED_GENERATOR, global_seed_generator, global_state
from keras_mp.loss_scaling.compiled_optimizer import scales_loss
from keras_mp.loss_scaling.optimizer import LossScaleOptimizer
from keras_mp.optimizer.state_slot import StateSlot
from keras_mp.rebuild.optimizers import Slot, optimizer_slots, unwrapped
from keras_mp.rebuild.walk import is_overwritten
from keras_mp.training.checkpoint_file import CheckpointError, Reader

engine = backend.engine_of(__package__)

WEIGHT, SEED, FP8 = "weight", "seed", "fp8"
SHOWN = 5
REPLICA_VALUES = "|parts"
# Of a slot that is stored in 8 or 16 bits: its values, or their square roots, and the scales of its rows.
STORED, STORED_ROOT, SCALE = "|stored", "|stored_root", "|scale"
_SINCE_RESET = "optimizer/loss_scale.since_reset"


def build_state(model: keras.Model, batch: Any = None) -> None:
    """Creates the variables that a first training step would.

    They are the optimizer's and, given a batch, those of the metrics.

    Raises:
        ValueError: the model is not built, and there is no batch.
    """
    if batch is not None:
        model._symbolic_build(
            data_batch=keras.tree.map_structure(
                lambda leaf: keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype)),
                tuple(batch),
            )
        )
    elif not model.built:
        raise ValueError(f"model {model.name!r} is not built: call it on a batch of inputs before it is resumed")
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def describe(model: keras.Model) -> dict[str, Any]:
    """Describes for `restore` variables and optimizer, in JSON's values."""
    return {
        "model": model.name,
        "weights": [
            {"path": v.path, "shape": list(v.shape), "dtype": str(v.dtype), "kind": _kind(v)} for v in model.variables
        ],
        "optimizer": type(unwrapped(model.optimizer)).__name__,
        "scales_loss": scales_loss(model.optimizer),
        "metrics": [v.path for v in model.metrics_variables],
    }


def arrays(model: keras.Model, metrics: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Reads a training's variables by name; metrics within an epoch."""
    weights = list(model.variables)
    place = {id(variable): index for index, variable in enumerate(weights)}
    for index, variable in enumerate(weights):
        yield _named(f"weights/{index}", variable)
    for slot in _slots(model.optimizer):
        of_weight = "" if slot.weight is None else f"@{place[id(slot.weight)]}"
        for suffix, variable in _stored(slot.variable).items():
            yield _named(f"optimizer/{slot.name}{of_weight}{suffix}", variable)
    for index, variable in enumerate(model.metrics_variables if metrics else ()):
        yield _named(f"metrics/{index}", variable)
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is not None:  # it is used
        yield _named("global_seed", generator.state)


def byte_count(model: keras.Model) -> int:
    """Counts the bytes of what `arrays` reads without metrics."""
    slots = [_stored(slot.variable).values() for slot in _slots(model.optimizer)]
    variables = [*model.variables, *itertools.chain.from_iterable(slots)]
    return sum(int(np.prod(v.shape)) * np.dtype(str(v.dtype)).itemsize for v in variables)


def restore(model: keras.Model, reader: Reader, force: bool = False) -> list[str]:
    """Gives model and optimizer the values of a checkpoint.

    Nothing is assigned unless everything fits. The model is built and compiled, in the checkpoint's precision or
    another.

    Args:
        force: whether to leave out the variables that the optimizers do not share.

    Returns:
        A sentence for each thing that is not carried over.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer.
    """
    saved = reader.manifest["state"]
    pairs, notes = _pairs(saved, list(model.variables), model.name)
    if (was := saved["optimizer"]) != (now := type(unwrapped(model.optimizer)).__name__) and not force:
        raise CheckpointError(
            f"the checkpoint was trained with {was}, and the model is compiled with {now}. Pass force=True "
            "(--force) to go on all the same"
        )
    assignments = [(variable, f"weights/{index}") for index, variable in pairs.items()]
    slots, more = _matched_slots(reader, model.optimizer, pairs, force)
    assignments += slots
    if "global_seed" in reader.names:
        assignments.append((global_seed_generator().state, "global_seed"))
    for variable, name in assignments:
        _assign(variable, reader, name)
    return notes + more


def restore_metrics(model: keras.Model, reader: Reader) -> None:
    """Gives metrics the values of a checkpoint within an epoch.

    Raises:
        CheckpointError: the model has other metrics.
    """
    was, now = reader.manifest["state"]["metrics"], [v.path for v in model.metrics_variables]
    if len(was) != len(now):
        raise CheckpointError(
            f"the checkpoint holds {len(was)} values of metrics ({', '.join(was) or 'none'}), and the model has "
            f"{len(now)} ({', '.join(now) or 'none'}): compile it with the same metrics"
        )
    for index, variable in enumerate(model.metrics_variables):
        _assign(variable, reader, f"metrics/{index}")
    # Of a prepared model's optimizer: whether those metrics count a step yet.
    if isinstance(model.optimizer, LossScaleOptimizer) and _SINCE_RESET in reader.names:
        _assign(model.optimizer.since_reset, reader, _SINCE_RESET)


def _pairs(saved: dict[str, Any], live: list[Any], name: str) -> tuple[dict[int, Any], list[str]]:
    """Pairs saved variables with live ones."""
    old = dict(enumerate(saved["weights"]))
    pairs: dict[int, Any] = {}
    notes = []
    histories = [index for index, weight in old.items() if weight["kind"] == FP8]
    live_histories = [variable for variable in live if _kind(variable) == FP8]
    if [old[index]["shape"] for index in histories] == [list(v.shape) for v in live_histories]:
        pairs |= zip(histories, live_histories, strict=True)
    else:
        notes += [f"the FP8 amax history {old[index]['path']} is left out" for index in histories]
        notes += [f"the FP8 amax history {variable.path} begins anew" for variable in live_histories]
    old = {index: weight for index, weight in old.items() if weight["kind"] != FP8}
    rest = [variable for variable in live if _kind(variable) != FP8]
    by_path = {variable.path: variable for variable in rest}
    if {weight["path"] for weight in old.values()} == by_path.keys() and len(by_path) == len(rest) == len(old):
        rest = [by_path[weight["path"]] for weight in old.values()]
    if differences := _differences(list(old.values()), rest):
        shown = "\n  ".join(differences[:SHOWN])
        more = f"\n  and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        there = _sizes(saved["model"], {weight["path"]: weight["shape"] for weight in old.values()})
        here = _sizes(name, {variable.path: variable.shape for variable in rest})
        raise CheckpointError(
            f"the checkpoint is of another model:\n  it has {there}\n  here is {here}\n  {shown}{more}"
        )
    return pairs | dict(zip(old, rest, strict=True)), notes


def _sizes(name: str, shapes: dict[str, Any]) -> str:
    """Describes a model by its weights."""
    layers = list(dict.fromkeys(path.rpartition("/")[0] or path for path in shapes))
    more = f" and {len(layers) - SHOWN} more" if len(layers) > SHOWN else ""
    values = sum(int(np.prod(shape)) for shape in shapes.values())
    return (
        f"{name!r} with {values:,} values in {len(shapes)} weights of {', '.join(layers[:SHOWN]) or 'no layer'}{more}"
    )


def _differences(old: list[dict[str, Any]], live: list[Any]) -> list[str]:
    differences = []
    for weight, variable in zip(old, live, strict=False):
        same_name = weight["path"].rpartition("/")[2] == variable.path.rpartition("/")[2]
        if not same_name or weight["shape"] != list(variable.shape):
            differences.append(
                f"it has {weight['path']} of shape {tuple(weight['shape'])}, the model {variable.path} of shape "
                f"{tuple(variable.shape)}"
            )
    differences += [f"it has {weight['path']}, which the model does not have" for weight in old[len(live) :]]
    differences += [f"the model has {variable.path}, which it does not have" for variable in live[len(old) :]]
    return differences


def _matched_slots(
    reader: Reader, optimizer: keras.optimizers.Optimizer, pairs: dict[int, Any], force: bool
) -> tuple[list[tuple[Any, str]], list[str]]:
    """Pairs the optimizer's variables with names of saved arrays."""
    live = {(slot.name, id(slot.weight)): slot for slot in _slots(optimizer)}
    assignments, lost = [], []
    for name in sorted({name.partition("|")[0] for name in reader.names if name.startswith("optimizer/")}):
        own, _, index = name.removeprefix("optimizer/").partition("@")
        if index and int(index) not in pairs:
            continue
        slot = live.pop((own, id(pairs[int(index)] if index else None)), None)
        if slot is None:
            lost.append(own)
        else:
            assignments.append((slot.variable, name))
    fresh = [name for name, _ in live]
    if "loss_scale._iterations" in fresh:
        slot = live["loss_scale._iterations", id(None)]
        assignments.append((slot.variable, "optimizer/_iterations"))
    notes = []
    if reader.manifest["state"]["scales_loss"] != (now := scales_loss(optimizer)):
        notes.append(
            "the loss scale starts at its initial value: the checkpoint has none"
            if now
            else "the loss scale is left out: the loss is not scaled here"
        )
    lost, fresh = (sorted({name for name in side if not name.startswith("loss_scale.")}) for side in (lost, fresh))
    differences = [f"the optimizer's {name} of the checkpoint has no place here and is left out" for name in lost]
    differences += [f"the optimizer's {name} is not in the checkpoint and begins anew" for name in fresh]
    if differences and not force:
        raise CheckpointError(
            f"the checkpoint is of another optimizer, or of one with other settings: {'; '.join(differences[:SHOWN])}. "
            "Pass force=True (--force) to go on"
        )
    return assignments, notes + differences


def _slots(optimizer: keras.optimizers.Optimizer) -> list[Slot]:
    """Lists an optimizer's variables; a scale's are under `loss_scale.`."""
    slots = optimizer_slots(inner := unwrapped(optimizer))
    if optimizer is not inner:
        own = [slot for slot in optimizer_slots(optimizer) if not slot.name.startswith("inner_optimizer.")]
        slots = [
            slot if slot.name == "gradient_sums" else slot._replace(name=f"loss_scale.{slot.name}") for slot in own
        ] + slots
    reached = {id(variable) for slot in slots for variable in _stored(slot.variable).values()}
    rest = [variable for variable in optimizer.variables if id(variable) not in reached]
    return slots + [Slot(f"variables.{index}", None, variable) for index, variable in enumerate(rest)]


def _kind(variable: keras.Variable) -> str:
    if is_overwritten(variable):
        return FP8
    return SEED if variable.name == "seed_generator_state" else WEIGHT


def _named(name: str, variable: keras.Variable) -> tuple[str, np.ndarray]:
    """Names a variable's value, or its parts by replica."""
    values = engine.replica_values(variable)
    if values is not None:
        return name + REPLICA_VALUES, values
    return name, backend.to_numpy(variable)


def _stored(slot: keras.Variable | StateSlot) -> dict[str, keras.Variable]:
    """Lists a slot's variables by the ends of their names."""
    if isinstance(slot, keras.Variable):
        return {"": slot}
    suffixes = [STORED_ROOT if slot.holds_root else STORED, SCALE]
    return dict(zip(suffixes, slot.variables, strict=False))


def _assign(variable: keras.Variable | StateSlot, reader: Reader, name: str) -> None:
    parts = _stored(variable)
    dtypes = reader.manifest["dtypes"]
    is_stored_alike = all(
        name + suffix in reader.names and (not suffix or dtypes[name + suffix] == str(part.dtype))
        for suffix, part in parts.items()
    )
    if is_stored_alike:
        for suffix, part in parts.items():
            part.assign(reader[name + suffix])
    elif name in reader.names:
        variable.assign(reader[name])
    elif {name + STORED, name + STORED_ROOT} & reader.names:  # in 8 or 16 bits
        is_root = name + STORED_ROOT in reader.names
        values = reader[name + (STORED_ROOT if is_root else STORED)].astype("float32")
        if name + SCALE in reader.names:
            values *= reader[name + SCALE]
        variable.assign(np.square(values) if is_root else values)
    else:
        engine.assign_replica_values(variable, reader[name + REPLICA_VALUES])
