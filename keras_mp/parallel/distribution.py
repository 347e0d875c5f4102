"""A model distributed over devices, and gathered again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras

from keras_mp import backend
from keras_mp.parallel.hops import Hops, in_hops
from keras_mp.parallel.plan import GATHER_DTYPES, REDUCE_DTYPES, STRATEGIES, Plan, Rules
from keras_mp.parallel.split_rules import LayoutMapOf, check_rules, rules_of_layout_map, takes_rules
from keras_mp.rebuild.model import rebuild, unchanged
from keras_mp.system.argument_checks import one_of

engine = backend.engine_of(__package__)


@contextmanager
def distribute(
    strategy: str = "data",
    devices: int | Sequence[str] | None = None,
    *,
    mesh: tuple[int, int] | None = None,
    reduce_dtype: str = "float32",
    gather_dtype: str = "compute",
    rules: Rules | LayoutMapOf | None = None,
) -> Iterator[Plan]:
    """Distributes a model over several devices of this host.

    It is built, compiled and trained in this scope.

    ```
    with keras_mp.parallel.distribute("fully_sharded"):
        model = build()
        model.compile(keras_mp.loss_scaling.wrap_optimizer(optimizer, model), loss)
        model.fit(x, y, batch_size=256)      # rows of all devices together
    ```

    Make the optimizer, build, compile, load and fit within the scope. On JAX a large weight is made, and loaded from a
    file of weights or a KerasHub preset, in the parts that the devices hold.

    "data" gives each device all weights and a part of every batch (TensorFlow: `MirroredStrategy`). "fully_sharded"
    also splits weights, gradients and optimizer state over the devices, and gathers the weights in the dtype that their
    layers compute in (Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, stage 3). "tensor" splits the products of a
    layer over the devices, as `rules` say. The latter two are JAX's alone.

    Args:
        strategy: the way in which weights and batches lie on the devices: "data", "fully_sharded" or "tensor".
        devices: the number of devices, of which the first are taken; or their names, as
            `keras.distribution.list_devices()` gives them; by default all of the best kind.
        mesh: the number of devices that share a batch, and the number of devices that share a weight, for "tensor"; by
            default (1, devices).
        reduce_dtype: the dtype in which the gradients are summed over the devices: "float32" or "bfloat16", which
            halves the bytes sent and rounds each summand to 8 bits.
        gather_dtype: the dtype in which "fully_sharded" gathers weights: "compute", the dtype that their layers compute
            in, or "float8", which halves those bytes: kernels and embeddings whose rows have 32 or more numbers are
            rounded to E4M3, with a scale for each row. Layers that compute in FP8 or INT8 gather their own codes in any
            case.
        rules: the rules of "tensor": pairs of a regular expression of a weight's path and, for each dimension, "model",
            "batch" or None; or the `get_layout_map` of a KerasHub backbone, `GemmaBackbone.get_layout_map`. By default
            the rules of the functions that build models in the scope (`keras_mp.parallel.tensor_rules`).

    Yields:
        The plan: which axis of each variable is split.

    Raises:
        ValueError: If a name is unknown, the devices are not there, the mesh does not match them, the backend has no
            such strategy, a rule is none, or the global policy computes in float16 on a TPU. In `fit`: if the devices
            do not divide a batch, or "tensor" splits no weight of the model.
    """
    plan = make_plan(strategy, keras.distribution.list_devices(), devices, mesh, reduce_dtype, rules, gather_dtype)
    plan.check_dtypes([keras.config.dtype_policy().compute_dtype])
    with takes_rules(plan), engine.parallel_scope(plan):
        yield plan


def make_plan(
    strategy: str,
    available: Sequence[str],
    devices: int | Sequence[str] | None = None,
    mesh: tuple[int, int] | None = None,
    reduce_dtype: str = "float32",
    rules: Rules | LayoutMapOf | None = None,
    gather_dtype: str = "compute",
) -> Plan:
    """Makes a plan of `distribute`'s arguments and the devices."""
    _check_names(strategy, reduce_dtype, gather_dtype)
    if strategy != "data" and keras.backend.backend() == "tensorflow":
        raise ValueError(
            f"strategy={strategy!r} needs JAX (KERAS_BACKEND=jax): on TensorFlow, tf.distribute keeps a whole copy of "
            "the model on each device, and Keras has no layout for it; strategy='data' works"
        )
    names = _names(devices, available)
    if mesh is not None and strategy != "tensor":
        raise ValueError(f"mesh={mesh!r} is for strategy='tensor'; {strategy!r} splits every batch over all devices")
    if strategy != "tensor":
        hops = Hops()
        tpus = engine.tpu_coordinates(names) if strategy == "fully_sharded" else None
        if tpus is not None:
            names, hops = in_hops(names, *tpus)
        return Plan(strategy, names, (len(names),), reduce_dtype, hops=hops, gather_dtype=gather_dtype)
    shape = (1, len(names)) if mesh is None else tuple(mesh)
    if len(shape) != 2 or any(size < 1 for size in shape) or math.prod(shape) != len(names):
        raise ValueError(
            f"mesh={mesh!r} must be two numbers whose product is the number of devices, {len(names)}: those that share "
            "a batch times those that share a weight"
        )
    plan = Plan(strategy, names, shape, reduce_dtype)
    if callable(rules):
        rules = rules_of_layout_map(rules, plan)
    elif rules is not None:
        check_rules(rules)
    return dataclasses.replace(plan, rules=rules)


def _check_names(strategy: str, reduce_dtype: str, gather_dtype: str) -> None:
    one_of("strategy", strategy, STRATEGIES)
    one_of("reduce_dtype", reduce_dtype, REDUCE_DTYPES)
    if strategy == "tensor" and reduce_dtype != "float32":
        raise ValueError(
            f"reduce_dtype={reduce_dtype!r} does not go with strategy='tensor', where the compiler places the sums and "
            "chooses their dtype: that of the product, bfloat16 under mixed_bfloat16"
        )
    one_of("gather_dtype", gather_dtype, GATHER_DTYPES)
    if strategy != "fully_sharded" and gather_dtype != "compute":
        raise ValueError(
            f"gather_dtype={gather_dtype!r} is for strategy='fully_sharded'; {strategy!r} leaves the weights where "
            "they are"
        )


def _names(devices: int | Sequence[str] | None, available: Sequence[str]) -> tuple[str, ...]:
    if devices is None:
        return tuple(available)
    if isinstance(devices, int):
        if not 1 <= devices <= len(available):
            raise ValueError(
                f"devices={devices} must be from 1 to {len(available)}, the number of devices here. To try several on "
                f"one CPU: {engine.HOW_TO_HAVE_MORE_DEVICES}"
            )
        return tuple(available[:devices])
    unknown = [name for name in devices if name not in available]
    if unknown or not devices or len(set(devices)) < len(devices):
        raise ValueError(f"devices={list(devices)} must be different names among {', '.join(available)}")
    return tuple(devices)


# A model that several devices or processes trained, on one device.


def gather(model: keras.Model) -> keras.Model:
    """Copies a model to one device of this process.

    The copy is to save, to export and to predict with; call it outside of the scope. Where several processes trained
    the model, all of them must call it.

    Returns:
        A new model with the same weights, compiled alike, with the optimizer's state; the model itself where it lies on
        one device already.
    """
    return rebuild(model, unchanged).told(f"gather({model.name!r})") if engine.is_spread(model) else model
