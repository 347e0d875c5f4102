"""Reads a lowered program: products, casts, loops and how often they run.

Runs where JAX's MLIR is, in the compiler's own process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Private: JAX has no public way to read a StableHLO module (jax 0.7 to 0.10).
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import chlo, hlo

from keras_mp.planner.read.asked import Array, Asked, Asking, Cast, Contraction, LowOperation
from keras_mp.planner.read.flops import convolution_flops, dot_flops
from keras_mp.planner.read.kernels import Kernel, kernel_of, walk

_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"(:\d+)?')
_EXPONENTIALS = (
    "exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "tanh", "power", "rsqrt", "sqrt"
)  # fmt: skip
_MANUAL = "sdy.manual_computation"
_RAGGED = "chlo.ragged_dot"  # rows in groups, each by a matrix of its own
_EFFECTS = {f"stablehlo.{name}" for name in ("custom_call", "while", "infeed", "outfeed", "send", "recv", "return")}
# From a weight to the operand of a dot: what layers do to a kernel, quantization included.
_KEEPS_A_WEIGHT = {
    "convert", "transpose", "reshape", "multiply", "divide", "clamp", "maximum", "minimum", "select", "reverse",
    "optimization_barrier", "custom_call", "slice", "round_nearest_even", "func.call", "all_gather",
}  # fmt: skip


def read_module(module: bytes) -> Any:
    """Parses a module in a context of its own."""
    parsed = ir.Module.parse(module, context=mlir.make_ir_context())
    if b"mhlo\0" not in module:  # the dialect, as bytecode lists it: TensorFlow's
        return parsed
    with parsed.context:
        for operation in list(walk(parsed.operation)):
            if operation.name == "mhlo.copy":  # the identity, and not StableHLO
                operation.results[0].replace_all_uses_with(operation.operands[0])
                operation.erase()
    return parsed


def remove_dead(module: Any) -> None:
    """Removes what no result depends on, as compilers do."""
    with module.context:
        pure = {
            ir.StringAttr(function.attributes["sym_name"]).value
            for function in module.body.operations
            if not any(operation.name in _EFFECTS for operation in walk(function.operation))
        }
        for function in module.body.operations:
            _remove_dead(function.operation, pure)


def _remove_dead(parent: Any, pure: set[str]) -> None:
    for region in parent.regions:
        for block in region.blocks:
            for view in reversed(list(block.operations)):
                operation = view.operation
                if operation.name == "func.call":
                    removable = _callee(operation) in pure
                else:
                    removable = operation.name.startswith("stablehlo.") and operation.name not in _EFFECTS
                if removable and operation.results and not any(list(result.uses) for result in operation.results):
                    operation.erase()
                else:
                    _remove_dead(operation, pure)


def _callee(call: Any) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def number_operations(module: Any) -> list[str]:
    """Names operations keras_mp.op.i, which compilers carry on.

    An operation of a function that is called has, in the compiled module, the call's name before its own.

    Returns:
        The names that the operations had.
    """
    names: list[str] = []
    with module.context:
        for operation in list(walk(module.operation)):
            if operation.name.startswith("stablehlo.") or operation.name in ("func.call", _RAGGED):
                # In a device's part of a step JAX begins names anew: the layers around it are in the part's own.
                name, around = _name(operation), operation.parent
                while around is not None:
                    name = f"{_name(around)}/{name}" if around.name == _MANUAL else name
                    around = around.parent
                names.append(name)
                _rename(operation, f"keras_mp.op.{len(names) - 1}")
    return names


def read(module: Any) -> Asked:
    """Numbers a module's operations, and lists what it asks for."""
    names = number_operations(module)
    remove_dead(module)
    with module.context:
        functions = {ir.StringAttr(f.attributes["sym_name"]).value: f.operation for f in module.body.operations}
        main = functions["main"]
        arguments = {value: index for index, value in enumerate(main.regions[0].blocks[0].arguments)}
        reader = _Reader(functions)
        reader.read(main, (), 1, True, arguments)
    return Asked(tuple(reader.contractions), tuple(reader.low), tuple(reader.casts), tuple(names))


class _Reader:
    """Walks a function as it would run: calls are followed, and the body of a loop counts as often as it runs."""

    def __init__(self, functions: dict[str, Any]):
        self.functions = functions
        self.contractions: list[Contraction] = []
        self.low: list[LowOperation] = []
        self.casts: list[Cast] = []
        # Value numbering: equal operations on equal values have one number, as common subexpressions have.
        self._numbers: dict[Any, int] = {}
        self._seen: dict[tuple, int] = {}
        # What functions are given for their arguments.
        self._given: dict[Any, Any] = {}
        # Of arguments of functions that are given dequantized values, the FP8 dtype.
        self._float8: dict[Any, str] = {}

    def read(self, parent: Any, calls: tuple[int, ...], repeats: int, known: bool, arguments: dict[Any, int]) -> None:
        """Reads the regions of an operation; `arguments` gives the main function's argument that a value is."""
        for region in parent.regions:
            for block in region.blocks:
                for view in block.operations:
                    self._operation(view.operation, calls, repeats, known, arguments)

    def _operation(
        self, operation: Any, calls: tuple[int, ...], repeats: int, known: bool, arguments: dict[Any, int]
    ) -> None:
        kind = operation.name.removeprefix("stablehlo.")
        if kind == _MANUAL:  # a device's part of a step on several
            inside = operation.regions[0].blocks[0].arguments
            for argument, operand in zip(inside, operation.operands, strict=True):
                self._numbers[argument], self._given[argument] = self._value(operand), operand
            self.read(operation, calls, repeats, known, _passed(operation.operands, operation, 0, arguments))
            return
        if not operation.name.startswith("stablehlo.") and kind not in ("func.call", _RAGGED):
            return
        path = (*calls, _number(operation))
        at = Asking("/".join(map(str, path)), repeats, known)
        if kind in ("dot_general", "dot", "convolution", _RAGGED) or _is_block_scaled(operation):
            self.contractions.append(self._contraction(operation, at, calls, arguments))
        elif kind == "custom_call":
            kernel = kernel_of(operation, self._constant)
            if kernel is not None:
                self.contractions.append(self._kernel(operation, kernel, at, arguments))
        elif kind == "convert":
            (source, dimensions), target = _shape(operation.operands[0]), _shape(operation.results[0])
            self.casts.append(Cast(at, source, target.dtype, math.prod(dimensions)))
        elif kind in _EXPONENTIALS or kind == "reduce":
            self.low += _low(operation, kind, at)
        elif kind == "func.call":
            callee = self.functions[_callee(operation)]
            block = callee.regions[0].blocks[0]
            for argument, operand in zip(block.arguments, operation.operands, strict=True):
                self._numbers[argument] = self._value(operand)
                self._given[argument] = operand
                quantized = _quantized(operand, self._float8)
                if quantized:
                    self._float8[argument] = quantized
            self.read(callee, path, repeats, known, _passed(operation.operands, callee, 0, arguments))
            returned = list(block.operations)[-1].operation.operands
            for result, value in zip(operation.results, returned, strict=True):
                self._numbers[result] = self._value(value)
            return
        elif kind == "while":
            trips = _trips(operation, self.functions)
            inside = arguments | _passed(operation.operands, operation, 1, arguments)
            self.read(operation, calls, repeats * (trips or 1), known and trips is not None, inside)
        elif kind in ("case", "if"):
            self.read(operation, calls, repeats, known, arguments)
        self._give_numbers(operation)

    def _contraction(
        self, operation: Any, at: Asking, calls: tuple[int, ...], arguments: dict[Any, int]
    ) -> Contraction:
        factors = list(operation.operands)[:2]  # of operands with scales, not these
        operands = tuple(map(_shape, factors))
        flops, sizes = _product(operation, *operands)
        return Contraction(
            at,
            kind="convolution" if operation.name == "stablehlo.convolution" else "dot",
            operands=operands,
            asked=tuple(
                _quantized(operand, self._float8) or shape.dtype
                for operand, shape in zip(factors, operands, strict=True)
            ),
            sizes=sizes,
            flops=flops,
            weights=tuple(_weight(operand, arguments) for operand in factors),
            followers=tuple("/".join(map(str, (*calls, number))) for number in _followers(operation)),
            sources=tuple(map(self._source, factors)),
            groups=_shape(operation.operands[2]).dimensions[-1] if operation.name == _RAGGED else 1,
        )

    def _kernel(self, operation: Any, kernel: Kernel, at: Asking, arguments: dict[Any, int]) -> Contraction:
        factors = [operation.operands[place] for place in kernel.operands]
        operands = tuple(map(_shape, factors))
        return Contraction(
            at,
            kind="kernel",
            operands=operands,
            asked=tuple(shape.dtype for shape in operands),
            sizes=kernel.sizes,
            flops=kernel.flops,
            weights=tuple(_weight(operand, arguments) for operand in factors),
            followers=(),
            sources=tuple(map(self._source, factors)),
            name=kernel.name,
            traffic=kernel.traffic,
        )

    def _constant(self, value: Any) -> np.ndarray | None:
        """The integers that a value holds where it is a constant, also one that a function is given."""
        for _ in range(16):
            value = self._given.get(value, value)
            owner = getattr(value.owner, "operation", value.owner)
            kind = getattr(owner, "name", "").removeprefix("stablehlo.")
            if kind == "constant":
                values: Any = ir.DenseIntElementsAttr(owner.attributes["value"])
                return np.asarray(list(values))
            if kind not in ("reshape", "convert", "broadcast_in_dim", "optimization_barrier", ""):
                break
            if kind:
                value = owner.operands[ir.OpResult(value).result_number]  # of a barrier's the one that it is
        return None

    def _give_numbers(self, operation: Any) -> None:
        same: tuple = (object(),)  # like no other
        large = operation.name == "stablehlo.constant" and math.prod(_shape(operation.results[0])[1]) > 64
        inside: tuple[str, ...] = ()
        if operation.name == "stablehlo.reduce":
            inside = tuple(view.operation.name for view in operation.regions[0].blocks[0].operations)
        if (inside or not list(operation.regions)) and operation.name not in _EFFECTS and not large:
            attributes = tuple(f"{name}={value}" for name, value in sorted(_attributes(operation).items()))
            same = (operation.name, *inside, attributes, *(self._value(operand) for operand in operation.operands))
        for place, result in enumerate(operation.results):
            key = (*same, place, str(result.type))
            self._numbers[result] = self._seen.setdefault(key, len(self._seen))

    def _value(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers) + 10**9)

    def _source(self, operand: Any) -> int:
        """The number of the value that an operand is a copy of: what two dots share, which compilers then make one."""
        for _ in range(16):
            owner = getattr(operand.owner, "operation", operand.owner)
            kind = getattr(owner, "name", "").removeprefix("stablehlo.")
            if kind not in ("convert", "transpose", "reshape") or not hasattr(owner, "operands"):
                break
            operand = owner.operands[0]
        return self._value(operand)


def _attributes(operation: Any) -> dict[str, Any]:
    attributes = operation.attributes
    # jax 0.10 iterates over names, 0.7 over named attributes.
    return dict(
        (entry, attributes[entry]) if isinstance(entry, str) else (entry.name, entry.attr) for entry in attributes
    )


def _passed(operands: Any, operation: Any, region: int, arguments: dict[Any, int]) -> dict[Any, int]:
    """Maps the arguments of a region that is given weights."""
    inside = operation.regions[region].blocks[0].arguments
    weights = [_weight(operand, arguments) for operand in operands]
    return {value: weight for value, weight in zip(inside, weights, strict=True) if weight is not None}


def _product(operation: Any, left: Array, right: Array) -> tuple[int, tuple[int, int, int]]:
    """The floating-point operations of a product, and its rows, summed dimension and columns."""
    result = _shape(operation.results[0]).dimensions
    attributes = operation.attributes
    if _is_block_scaled(operation):  # (batch, m, k) and (batch, n, k)
        rows, columns, contracted = left.dimensions[1:2], right.dimensions[1:2], left.dimensions[2:]
    elif operation.name == _RAGGED:  # each row by the matrix of its group
        ragged = chlo.RaggedDotDimensionNumbers(attributes["ragged_dot_dimension_numbers"])
        contracted = tuple(left.dimensions[place] for place in ragged.lhs_contracting_dimensions)
        rows = _others(left, ragged.lhs_batching_dimensions, ragged.lhs_contracting_dimensions)
        taken = ragged.rhs_batching_dimensions, ragged.rhs_contracting_dimensions, ragged.rhs_group_dimensions
        columns = _others(right, *taken)
        result = (*(left.dimensions[place] for place in ragged.lhs_batching_dimensions), *rows, *columns)
    elif operation.name == "stablehlo.dot_general":
        numbers = hlo.DotDimensionNumbers(attributes["dot_dimension_numbers"])
        contracted = tuple(left.dimensions[place] for place in numbers.lhs_contracting_dimensions)
        rows = _others(left, numbers.lhs_batching_dimensions, numbers.lhs_contracting_dimensions)
        columns = _others(right, numbers.rhs_batching_dimensions, numbers.rhs_contracting_dimensions)
    elif operation.name == "stablehlo.dot":
        rows, contracted, columns = left.dimensions[:-1], left.dimensions[-1:], right.dimensions[1:]
    else:
        return _convolution(attributes, left.dimensions, right.dimensions, result)
    return dot_flops(result, contracted), (math.prod(rows), math.prod(contracted), math.prod(columns))


def _others(array: Array, *places: Any) -> tuple[int, ...]:
    """The dimensions that are neither of a batch nor summed over."""
    taken = {place for several in places for place in several}
    return tuple(size for place, size in enumerate(array.dimensions) if place not in taken)


def _is_block_scaled(operation: Any) -> bool:
    """Whether it is a product of operands whose blocks have scales, which StableHLO has no operation for."""
    if operation.name != "stablehlo.custom_call":
        return False
    return ir.StringAttr(operation.attributes["call_target_name"]).value == "__op$block_scaled_dot"


def _convolution(
    attributes: Any, left: Sequence[int], right: Sequence[int], result: Sequence[int]
) -> tuple[int, tuple[int, int, int]]:
    numbers = hlo.ConvDimensionNumbers(attributes["dimension_numbers"])
    spatial = len(numbers.input_spatial_dimensions)

    def per_dimension(name: str, default: int) -> list[int]:
        return [int(x) for x in attributes[name]] if name in attributes else [default] * spatial

    padding = (
        np.array(ir.DenseIntElementsAttr(attributes["padding"])).reshape(-1, 2)[:, 0].tolist()
        if "padding" in attributes
        else [0] * spatial
    )
    windows = list(
        zip(
            [left[d] for d in numbers.input_spatial_dimensions],
            [right[d] for d in numbers.kernel_spatial_dimensions],
            [result[d] for d in numbers.output_spatial_dimensions],
            per_dimension("window_strides", 1),
            padding,
            per_dimension("lhs_dilation", 1),
            per_dimension("rhs_dilation", 1),
            strict=True,
        )
    )
    batch, features = result[numbers.output_batch_dimension], result[numbers.output_feature_dimension]
    inputs = right[numbers.kernel_input_feature_dimension]
    positions = math.prod(result[d] for d in numbers.output_spatial_dimensions)
    taps = math.prod(right[d] for d in numbers.kernel_spatial_dimensions)
    return convolution_flops((batch, features), inputs, windows), (batch * positions, inputs * taps, features)


def _weight(operand: Any, arguments: dict[Any, int], depth: int = 16) -> int | None:
    """Finds the argument that an operand is a copy of: cast, transposed, reshaped, scaled."""
    if operand in arguments:
        return arguments[operand]
    owner = getattr(operand.owner, "operation", operand.owner)
    if depth == 0 or not hasattr(owner, "operands") or owner.name.removeprefix("stablehlo.") not in _KEEPS_A_WEIGHT:
        return None
    elements = math.prod(_shape(operand)[1])
    gathers = owner.name == "stablehlo.all_gather"  # a weight of which each device has a part
    for source in owner.operands:
        if gathers or math.prod(_shape(source)[1]) == elements > 1:
            argument = _weight(source, arguments, depth - 1)
            if argument is not None:
                return argument
    return None


def _quantized(operand: Any, float8: Mapping[Any, str], depth: int = 10) -> str | None:
    """The FP8 dtype that an operand was dequantized from; None where it was not."""
    if operand in float8:
        return float8[operand]
    owner = getattr(operand.owner, "operation", operand.owner)
    kind = getattr(owner, "name", "").removeprefix("stablehlo.")
    if depth == 0 or kind not in ("convert", "multiply", "divide", "transpose", "reshape", "func.call"):
        return None
    if kind == "convert" and _shape(owner.operands[0])[0].startswith("f8"):
        return _shape(owner.operands[0])[0]
    dtypes = [_quantized(source, float8, depth - 1) for source in owner.operands]
    return next((dtype for dtype in dtypes if dtype), None)


def _followers(operation: Any) -> list[int]:
    """Numbers what only moves or casts the result: a compiler that folds it into the dot keeps its name for both."""
    numbers = []
    for _ in range(16):
        users = [getattr(use.owner, "operation", use.owner) for use in operation.results[0].uses]
        kept = [
            user for user in users if user.name in ("stablehlo.transpose", "stablehlo.reshape", "stablehlo.convert")
        ]
        if len(users) != 1 or not kept:
            break
        operation = kept[0]
        numbers.append(_number(operation))
    return numbers


def _low(operation: Any, kind: str, at: Asking) -> list[LowOperation]:
    """The operation, if it is an exponential or a sum in 16 bits."""
    dtype, dimensions = _shape(operation.results[0] if kind != "reduce" else operation.operands[0])
    if dtype not in ("f16", "bf16"):
        return []
    if kind == "reduce":
        inner = [view.operation.name.removeprefix("stablehlo.") for view in operation.regions[0].blocks[0].operations]
        if "add" not in inner:
            return []  # a maximum or a minimum rounds nothing
        kind = "sum"
    elif kind == "exponential" and _is_softmax(operation):
        kind = "softmax"
    return [LowOperation(at, kind, dtype, math.prod(dimensions))]


def _is_softmax(operation: Any) -> bool:
    """Whether an exponential is of the distance to a maximum."""
    owner = getattr(operation.operands[0].owner, "operation", operation.operands[0].owner)
    return getattr(owner, "name", "") == "stablehlo.subtract" and _from_maximum(owner.operands[1], 12)


def _from_maximum(value: Any, depth: int) -> bool:
    owner = getattr(value.owner, "operation", value.owner)
    kind = getattr(owner, "name", "").removeprefix("stablehlo.")
    if kind == "reduce":
        inner = owner.regions[0].blocks[0].operations
        return any(view.operation.name == "stablehlo.maximum" for view in inner)
    moves = ("broadcast_in_dim", "reshape", "convert", "maximum", "select", "transpose", "optimization_barrier")
    return depth > 0 and kind in moves and any(_from_maximum(operand, depth - 1) for operand in owner.operands)


def _trips(operation: Any, functions: dict[str, Any]) -> int | None:
    """Counts the rounds of a loop that counts from a constant to a constant; None where it is not such a loop."""
    condition = operation.regions[0].blocks[0]
    inits = dict(zip(condition.arguments, operation.operands, strict=True))
    rounds = _bounds(list(condition.operations)[-1].operation.operands[0], {}, inits, functions)
    return None if None in rounds else min(rounds, default=None)


def _bounds(value: Any, passed: dict[Any, Any], inits: dict[Any, Any], functions: dict[str, Any]) -> list[Any]:
    """The rounds after which each `counter < limit` of a condition ends the loop; None where a step computes it."""
    owner = getattr(value.owner, "operation", value.owner)
    kind = getattr(owner, "name", "").removeprefix("stablehlo.")
    if kind in ("and", "reshape"):
        return [bound for operand in owner.operands for bound in _bounds(operand, passed, inits, functions)]
    if kind == "func.call":
        callee = functions[_callee(owner)].regions[0].blocks[0]
        inside = {
            argument: passed.get(operand, operand)
            for argument, operand in zip(callee.arguments, owner.operands, strict=True)
        }
        place = list(owner.results).index(value)
        return _bounds(list(callee.operations)[-1].operation.operands[place], inside, inits, functions)
    if kind != "compare" or "LT" not in str(owner.attributes["comparison_direction"]):
        return []
    counter, limit = (passed.get(operand, operand) for operand in owner.operands)
    start, limit = _constant(inits.get(counter, counter)), inits.get(limit, limit)
    loop = getattr(limit.owner, "operation", limit.owner)  # whose rounds the loop of its gradient takes
    stop = _trips(loop, functions) if getattr(loop, "name", "") == "stablehlo.while" else _constant(limit)
    return [stop and max(0, stop - start)] if counter in inits and start is not None else []


def _constant(value: Any) -> int | None:
    owner = getattr(value.owner, "operation", value.owner)
    if getattr(owner, "name", "") != "stablehlo.constant":
        return None
    return int(ir.DenseIntElementsAttr(owner.attributes["value"])[0])


def _shape(value: Any) -> Array:
    kind = ir.RankedTensorType(value.type) if "tensor<" in str(value.type) else None
    if kind is None:
        return Array("token", ())
    element = str(kind.element_type)
    dtype = {"f8E4M3FN": "f8e4m3fn", "f8E5M2": "f8e5m2"}.get(element, element.lower())
    return Array(dtype, tuple(kind.shape))


def _name(operation: Any) -> str:
    location = str(operation.location)
    names = [name for name, line in _QUOTED.findall(location) if not line]  # without the names of files
    # An inlined operation's is `callsite(callee at caller)`. In JAX's other locations a traceback follows the name.
    return "/".join(reversed(names)) if location.startswith("loc(callsite(") else "".join(names[:1])


def _number(operation: Any) -> int:
    return int(_name(operation).removeprefix("keras_mp.op."))


def _rename(operation: Any, name: str) -> None:
    location = ir.Location.name(name)
    try:
        operation.location = location
    except AttributeError:  # jax 0.7: locations are for good
        regions = list(operation.regions)
        copy = ir.Operation.create(
            operation.name,
            results=[result.type for result in operation.results],
            operands=list(operation.operands),
            attributes=_attributes(operation),
            loc=location,
            ip=ir.InsertionPoint(operation),
            regions=len(regions),
        )
        for old_region, new_region in zip(regions, copy.regions, strict=True):
            for block in list(old_region.blocks):
                block.append_to(new_region)
        for old, new in zip(operation.results, copy.results, strict=True):
            old.replace_all_uses_with(new)
        operation.erase()
