"""Reads kernels that are no HLO operations: their operations, the bytes that they move, and which products they are.

Mosaic's kernels for TPUs (Pallas, and Splash attention among them) come as MLIR within the step, in which each product
and each block of an array that is fetched can be counted. cuDNN's attention is a name with sizes. Runs where JAX's MLIR
is, in the compiler's own process.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

# Private: JAX has no public way to read a kernel (jax 0.7 to 0.10).
from jax._src.interpreters import mlir
from jax._src.lib import tpu
from jax._src.lib.mlir import ir, passmanager

_TPU = "tpu_custom_call"
_CUDNN = "__cudnn$fmha"
_GPU = re.compile(r"(__gpu\$xla\.gpu\.)?triton(_kernel_call)?|mosaic_gpu(_v2)?")


class Kernel(NamedTuple):
    """What a kernel computes and moves.

    Args:
        name: the name of the kernel, such as "splash_mha_fwd_residuals".
        flops: floating-point operations of its products; 0 where it has none, or they cannot be read.
        traffic: the bytes that it reads and writes; 0 where each array is taken to cross once.
        operands: the places of the arrays that it multiplies first, among its operands.
        sizes: rows, summed dimension and columns of its first product.
    """

    name: str
    flops: int
    traffic: int
    operands: tuple[int, ...]
    sizes: tuple[int, int, int]


def kernel_of(call: Any, constant: Callable[[Any], np.ndarray | None]) -> Kernel | None:
    """Reads a custom call of a known kernel, or None.

    Args:
        call: the operation.
        constant: a function that returns the value of an operand, or None where it is no constant.
    """
    target = ir.StringAttr(call.attributes["call_target_name"]).value
    if target != _TPU and not target.startswith(_CUDNN) and not _GPU.fullmatch(target):
        return None
    shapes = [_shape(operand) for operand in call.operands]
    # The masks' arrays come before queries and keys.
    floats = [place for place, (dtype, sizes) in enumerate(shapes) if "f" in dtype and len(sizes) > 1][:2]
    name = ir.StringAttr(call.attributes["kernel_name"]).value if "kernel_name" in call.attributes else target
    if len(floats) < 2:
        return Kernel(name, 0, 0, tuple(floats), (0, 0, 0))
    (*_, rows, features), (*_, columns, _) = (shapes[place][1] for place in floats)
    if target.startswith(_CUDNN):
        (_, rows, _, features), (_, columns, *_) = (shapes[place][1] for place in floats)
        flops = _of_attention(json.loads(_text(call, "backend_config")), features, backward="Backward" in target)
        return Kernel(target.removeprefix("__"), flops, 0, tuple(floats), (rows, features, columns))
    flops = traffic = 0
    if target == _TPU:
        with suppress(ir.MLIRError, KeyError, StopIteration):  # in the form of another version
            flops, traffic = _of_mosaic(
                name, json.loads(_text(call, "backend_config"))["custom_call_config"], call, constant
            )
    return Kernel(name, flops, traffic, tuple(floats), (rows, features, columns))


def _text(call: Any, attribute: str) -> str:
    return ir.StringAttr(call.attributes[attribute]).value


def _shape(value: Any) -> tuple[str, tuple[int, ...]]:
    kind = ir.ShapedType(value.type)
    return str(kind.element_type), tuple(kind.shape) if kind.has_rank else ()


def _of_attention(config: Any, features: int, backward: bool) -> int:
    """The operations of cuDNN's attention, of the scores that its mask leaves.

    Forward are two products, of queries with keys and of probabilities with values. Backward are five: the scores anew,
    the gradient of the probabilities, and those of query, key and value.
    """
    config = config["cudnn_fmha_backend_config"]
    *batch, rows, columns = map(int, config["intermediate_tensor_shape"]["dimensions"])
    seen = np.full(rows, columns)
    if "CAUSAL" in config["mask_type"]:
        seen = np.minimum(np.arange(rows) + 1, columns)
    if config.get("sliding_window_length", 0):
        seen = np.minimum(seen, config["sliding_window_length"])
    return (5 if backward else 2) * 2 * features * math.prod(batch) * int(seen.sum())


def _of_mosaic(name: str, config: Any, call: Any, constant: Callable[[Any], np.ndarray | None]) -> tuple[int, int]:
    """The operations and bytes of a kernel: by its own estimate where it has one, else by its body."""
    estimate = config.get("cost_estimate")
    if estimate:
        return int(estimate.get("flops", 0)), int(estimate.get("bytes_accessed", 0))
    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        body = ir.Module.parse(base64.b64decode(config["body"]))
        passmanager.PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(body.operation)
        functions = {ir.StringAttr(view.attributes["sym_name"]).value: view.operation for view in body.body.operations}
        main = next(function for function in functions.values() if "iteration_bounds" in function.attributes)
        grid = list(ir.DenseI64ArrayAttr(main.attributes["iteration_bounds"]))
        prefetched = ir.IntegerAttr(main.attributes["scalar_prefetch"]).value
        # Of Splash the second array says which blocks have scores at all.
        mask = constant(call.operands[1]) if name.startswith("splash_") and prefetched > 1 else None
        share = 1.0 if mask is None else float((mask != 0).mean())
        flops = math.prod(grid) * share * sum(map(_product, walk(main)))
        types = [argument.type for argument in main.regions[0].blocks[0].arguments][len(grid) + prefetched :]
        traffic = 0.0
        windows = ir.ArrayAttr(main.attributes["window_params"]) if "window_params" in main.attributes else ()
        for kind, window in zip(types, windows, strict=False):
            transform = ir.FlatSymbolRefAttr(ir.DictAttr(window)["transform_indices"]).value
            block = ir.MemRefType(kind)
            size = math.prod(block.shape) * _bits(str(block.element_type)) // 8
            traffic += size * _fetches(functions[transform], grid, share)
    return round(flops), round(traffic)


def _bits(dtype: str) -> int:
    return int(re.findall(r"\d+", dtype)[0])


def walk(operation: Any) -> Iterator[Any]:
    """Yields operations of regions; one may then be erased."""
    for region in operation.regions:
        for block in region.blocks:
            for view in list(block.operations):
                yield view.operation
                yield from walk(view.operation)


def _product(operation: Any) -> int:
    """The operations of a product in one round of the grid; 0 of all else."""
    if operation.name != "tpu.matmul":
        return 0
    left, right, result = (
        math.prod(ir.VectorType(value.type).shape) for value in (*list(operation.operands)[:2], operation.results[0])
    )
    shape = ir.VectorType(operation.results[0].type).shape
    batch = math.prod(shape[:-2])
    flops = 2 * result * math.isqrt(left * right // result // batch)
    parent = operation.parent
    while parent is not None and parent.name != "func.func":
        flops *= _trips(parent) if parent.name == "scf.for" else 1
        parent = parent.parent
    return flops


def _trips(loop: Any) -> int:
    """How often a loop runs; once where that is not known."""
    start, stop, step = map(_integer, list(loop.operands)[:3])
    return 1 if None in (start, stop, step) else max(0, math.ceil((stop - start) / step))


def _integer(value: Any) -> Any:
    """The value of a constant, or of a sum of constants; None of others."""
    owner = getattr(value.owner, "operation", value.owner)
    name = getattr(owner, "name", "")
    if name == "arith.constant":
        return ir.IntegerAttr(owner.attributes["value"]).value
    parts = [_integer(operand) for operand in owner.operands] if name == "arith.addi" else [None]
    return None if None in parts else sum(parts)


def _fetches(transform: Any, grid: Sequence[int], share: float) -> float:
    """How often a block of an array is fetched: each time that its index is another one than the round before.

    Args:
        transform: the function from a place in the grid to the block's index.
        grid: the rounds in each dimension, the last of which changes first.
        share: the share of the rounds that compute, where a table names the block of the next such round.
    """
    block = transform.regions[0].blocks[0]
    places = {value: place for place, value in enumerate(block.arguments)}
    read: set[int] = set()
    waiting = list(list(block.operations)[-1].operation.operands)
    while waiting:
        value = waiting.pop()
        if value in places:
            read.add(places[value])
        else:
            waiting += list(getattr(value.owner, "operation", value.owner).operands)
    last = max((place for place in read if place < len(grid)), default=-1)
    by_table = any(place >= len(grid) for place in read)
    return math.prod(grid[: last + 1]) * (share if by_table else 1.0)
