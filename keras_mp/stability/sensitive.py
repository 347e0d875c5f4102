"""Finds the layers that must not run in low precision."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Hashable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import keras

from keras_mp.rebuild.quantized_policies import CALIBRATED, group_count, logits_stop_gradients
from keras_mp.rebuild.walk import LIBRARIES, LOW_PRECISION, Walk, original_class, package_of, treatments_of
from keras_mp.stability.accumulate import SumsInFloat32
from keras_mp.stability.float32_layers import RESULT_MIXINS, Float32Regularizer
from keras_mp.stability.output_layers import ATTENTION_LAYERS, NORMALIZATIONS, calls_steps, output_layers, reached
from keras_mp.treatment.change import Planned

# Which of Keras's layers add up many numbers in the dtype of their inputs: a sum that 16 bits cannot hold.
#
# In float16 5,000 times 20 is infinite, and 3 added to 8,192 is lost; in bfloat16 1 added to 256 is. Where Keras itself
# adds up in float32, as in `ops.mean`, or a matrix unit does, as in a product, nothing is listed here.

FEW_TERMS = 16
"""So many numbers may be added up in 16 bits: rounded after each, the sum is off by 8 units in the last place at most,
and one of them alone has to be over 4,095 to make it infinite."""

AVERAGE_POOLING = (keras.layers.AveragePooling1D, keras.layers.AveragePooling2D, keras.layers.AveragePooling3D)
MERGING = (
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
# Newer than the oldest version of Keras.
ADAPTIVE_POOLING = tuple(
    getattr(keras.layers, name)
    for name in (f"AdaptiveAveragePooling{n}D" for n in (1, 2, 3))
    if hasattr(keras.layers, name)
)


def long_sum_of(layer: keras.Operation) -> str:
    """Says which sum of many numbers a layer has."""
    if isinstance(layer, keras.layers.GlobalAveragePooling1D):
        return "the steps of a masked sequence"
    if isinstance(layer, keras.layers.Dot) and layer.normalize:
        return "the squares of the vectors that it normalizes"
    if isinstance(layer, AVERAGE_POOLING) and math.prod(layer.pool_size) > FEW_TERMS:
        return f"the {math.prod(layer.pool_size):,} values of a window"
    if isinstance(layer, ADAPTIVE_POOLING):
        return "the values of a window"
    if isinstance(layer, keras.layers.RepeatVector) and layer.n > FEW_TERMS:
        return f"the gradients of its {layer.n:,} copies"
    if isinstance(layer, (keras.layers.Add, keras.layers.Average)) and len(_input_shapes(layer)) > FEW_TERMS:
        return f"its {len(_input_shapes(layer)):,} inputs"
    if isinstance(layer, MERGING) and (copies := _copies(layer)) > FEW_TERMS:
        often = f"{copies:,.0f} times" if copies < math.inf else "along an axis of unknown length"
        return f"the gradients of an input that it repeats {often}"
    if isinstance(layer, keras.layers.EinsumDense) and sums_one_operand(layer.equation):
        return "the axes of its inputs that its kernel does not have"
    return ""


def sums_one_operand(equation: str) -> bool:
    """Whether an einsum adds up an axis of one operand.

    So does "abc,cd->ad" with b, before the product.
    """
    operands, out = equation.replace("...", "").replace(" ", "").split("->")
    left, right = operands.split(",")
    return bool((set(left) ^ set(right)) - set(out))


def _copies(layer: Any) -> float:
    """How often a layer that merges repeats its smallest input."""
    shapes = _input_shapes(layer)
    # As Keras does, an input of lower rank is repeated along the axes after the batch's.
    rank = max(map(len, shapes), default=0)
    shapes = [(*shape[:1], *(1,) * (rank - len(shape)), *shape[1:]) for shape in shapes]
    merged = [max(math.inf if size is None else size for size in sizes) for sizes in zip(*shapes, strict=True)]
    repeated = [math.prod(to for size, to in zip(shape, merged, strict=True) if size == 1) for shape in shapes]
    return max(repeated, default=1)  # no shapes: not built


def _input_shapes(layer: Any) -> list[tuple[int | None, ...]]:
    # Private, as only the layer itself is told the shapes of its inputs.
    return list(next(iter((layer._build_shapes_dict or {}).values()), ()))


# Operations of a functional graph, by class name: their classes are private.
SENSITIVE_OPERATIONS = ("LogSoftmax", "Logsumexp", "Softmax", "Sparsemax")
# So many whole numbers from 0 on are exact: 2 to the bits of the significand.
WHOLE_NUMBERS = {"float16": 2**11, "bfloat16": 2**8}
_SINES = {"sin", "cos"}
_ONCE = ("__init__", "build")


def sensitive_layers(model: keras.Model) -> list[Planned]:
    """Lists layers that compute in 16 bits but need float32.

    `keras_mp.report` says which these are; in any precision they include a ReversibleEmbedding layer whose inputs Keras
    quantizes, as in int8 Keras gives what comes before its logits no gradient. Functions outside a layer's class, and
    most operations in its own `call()`, are not seen.
    """
    return [row for row in find(Walk(model)) if row.treatments]


def find(walk: Walk) -> list[Planned]:
    """Lists sensitive layers, and what nothing can be done about."""
    outputs = output_layers(walk) | {id(child): "the output of a router" for child in logits_of_routers(walk)}
    needs = [(path, layer, _needs(layer, walk, outputs)) for path, layer in reached(walk)]
    needs += [(f"{walk.model.name}/{part.name}", part, _needs_as_operation(part)) for part in walk.operations]
    rows = []
    for path, part, lacking in needs:
        has = treatments_of(part)
        reasons = [(treatment, reason) for treatment, reason in lacking if treatment not in has]
        if reasons:
            treatments = dict.fromkeys(treatment for treatment, _ in reasons if treatment)
            rows.append(Planned(path, part, treatments, "; ".join(reason for _, reason in reasons)))
    return rows


def _needs_as_operation(operation: keras.Operation) -> Iterator[tuple[str, str]]:
    dtype = keras.backend.standardize_dtype(keras.tree.flatten(operation.output)[0].dtype)
    if type(operation).__name__ in SENSITIVE_OPERATIONS and dtype in LOW_PRECISION:
        yield "operation", f"it exponentiates and sums in {dtype}"


def logits_of_routers(walk: Walk) -> list[Any]:
    """Lists Dense layers in KerasHub's that make logits of experts."""
    parents = [layer for layer in walk.every if package_of(original_class(layer)) == "keras_hub"]
    dense = [(of, one) for of in parents for one in walk.children[id(of)] if isinstance(one, keras.layers.Dense)]
    return [one for of, one in dense if one.units == getattr(of, "num_experts", None)]


def is_router(layer: Any) -> bool:
    """Whether a layer of KerasHub weighs experts, in its dtype."""
    cls = original_class(layer)
    return package_of(cls) == "keras_hub" and cls.__name__.endswith("Router")


def _needs(layer: Any, walk: Walk, outputs: dict[int, str]) -> Iterator[tuple[str, str]]:
    """The treatments that a layer needs, each with a reason."""
    low = layer.compute_dtype
    yield from _needs_in_16_bits(layer, walk, outputs.get(id(layer)))
    if logits_stop_gradients(layer):
        yield "input gradient", f"its {layer.quantization_mode} logits pass no gradient to the layers before"
    if getattr(layer, "quantization_mode", None) in CALIBRATED and not hasattr(layer, "_kernel"):
        yield "calibrated", f"Keras gives it no LoRA, and rounds the numbers of its {layer.quantization_mode} groups"
    if calls_steps(layer) and low in LOW_PRECISION:
        inside = {treatment for treatment, _ in _needs(layer.layer, walk, outputs)}
        reason = f"it calls {layer.layer.name!r} in {low}, whatever the dtype of that layer"
        if inside & {"everywhere", "result"} or layer.layer.compute_dtype == "float32":
            yield "everywhere", reason
        elif "float32" in inside:
            yield "float32", reason


def _needs_in_16_bits(layer: Any, walk: Walk, output: str | None) -> Iterator[tuple[str, str]]:
    # Keras's own code calls it for regularizers only.
    if any("add_loss" in names_in(code) for code in _own_code(layer)):
        dtypes = {part.compute_dtype for part in (layer, *walk.below(layer))}
        for low in sorted(dtypes & set(LOW_PRECISION)):
            yield "losses", f"its add_loss may add a loss in {low}, which does not add up with the model's in float32"
    low = layer.compute_dtype
    if low not in LOW_PRECISION:
        return
    if layer.activity_regularizer is not None and not isinstance(layer.activity_regularizer, Float32Regularizer):
        yield "regularizer", f"its activity regularizer adds up activations in {low}"
    if any(float32_activation(vars(layer).get(name)) is not None for name in ACTIVATION_ATTRIBUTES):
        yield "activation", f"its softmax exponentiates and sums in {low}"
    if isinstance(layer, ATTENTION_LAYERS):
        yield "scores", f"it sums attention scores and takes their softmax in {low}"
    inner = walk.children[id(layer)]
    if output is not None:
        treatment = _output_treatment(layer, inner)
        if treatment:
            yield treatment, f"it computes {output} and rounds it to {low}"
        else:
            unseen = "in a layer that stabilize cannot see; if that layer is not float32 yet, give it dtype='float32'"
            yield treatment, f"it computes {output} in {low} {unseen}"
    elif isinstance(layer, keras.layers.Softmax):
        yield "float32", f"it exponentiates and sums in {low}"
    elif isinstance(layer, (keras.layers.Attention, keras.layers.AdditiveAttention)):
        yield "float32", f"it sums attention scores and takes their softmax in {low}"
    elif is_router(layer):
        yield "float32", f"it chooses experts in {low}"
    elif isinstance(layer, NORMALIZATIONS) or (re.search(r"Norm(alization)?$", type(layer).__name__) and not inner):
        yield "float32", f"it sums squares over many values in {low}"
    elif long_sum := long_sum_of(layer):
        yield "float32", f"it adds up {long_sum} in {low}"
    elif (sines := _methods_with_sines(layer)) and not inner and _computes_angles(sines):
        yield "float32", f"it takes the sine or cosine of angles that it computes in {low}"
    elif sines and _rounds_arguments(layer):
        yield "arguments", f"it takes the sine or cosine of arguments that Keras first rounds to {low}"
    elif _rounds_groups(layer):
        yield "groups", f"it rounds the numbers of its {group_count(layer)} groups of int4 weights to {low}"


def _methods_with_sines(layer: keras.Operation) -> list[CodeType]:
    """The methods of a layer's class with sines or cosines.

    There is no data here that would say how large the angles are: past 256, bfloat16 steps over whole radians.
    """
    return [code for code in _own_code(layer) if code.co_name not in _ONCE and names_in(code) & _SINES]


def _computes_angles(sines: list[CodeType]) -> bool:
    """Whether code with sines names no wider dtype for angles.

    Of a layer with others inside it is not asked: what it computes beside the angles would be in float32, too.
    """
    return any(not _constants(code) & {"float32", "float64"} for code in sines)


def _rounds_arguments(layer: Any) -> bool:
    """Whether Keras rounds a layer's float32 inputs."""
    # Private, as a layer has no public list of the calls that a graph makes.
    tensors = [tensor for node in layer._inbound_nodes for tensor in node.input_tensors]
    return layer.autocast and any(tensor.dtype == "float32" for tensor in tensors)


def _own_code(layer: keras.Operation) -> list[CodeType]:
    own = [cls for cls in type(layer).__mro__ if package_of(cls) not in LIBRARIES]
    functions = [getattr(value, "__func__", value) for cls in own for value in vars(cls).values()]  # also static ones
    return [inspect.unwrap(function).__code__ for function in functions if inspect.isfunction(function)]


def _constants(code: CodeType) -> set[Any]:
    inner = [_constants(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_consts).union(*inner)


def names_in(code: CodeType) -> set[str]:
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _rounds_groups(layer: keras.Operation) -> bool:
    """Whether Keras rounds the numbers of a layer's groups."""
    casts = layer.autocast and layer.compute_dtype != layer.variable_dtype
    return casts and group_count(layer) > WHOLE_NUMBERS[layer.compute_dtype]


def _output_treatment(layer: Any, inner: list[Any]) -> str:
    known = isinstance(layer, tuple(RESULT_MIXINS)) and _computes_plainly(layer)
    equation = getattr(layer, "equation", "")
    if known and "..." not in equation and not (equation and sums_one_operand(equation)):
        return "result"
    return "" if inner else "everywhere"


def _computes_plainly(layer: keras.Operation) -> bool:
    """Whether a layer's product is that of Keras's own class."""
    if isinstance(layer, SumsInFloat32):
        return True
    cls = original_class(layer)
    keras_own = next(base for base in RESULT_MIXINS if issubclass(cls, base))
    return cls.call is keras_own.call


def attending(walk: Walk) -> list[Any]:
    """Lists what calls `keras.ops.dot_product_attention`, layers and operations.

    The model is saved and loaded for other machines, so these are the same on each; they ask for the chip when called.
    """
    return [part for part in [*walk.every, *walk.operations] if _calls_it(original_class(part))]


@functools.cache
def _calls_it(cls: type) -> bool:
    functions = [
        inspect.unwrap(value) for base in cls.__mro__ for value in vars(base).values() if inspect.isfunction(value)
    ]
    return any("dot_product_attention" in names_in(function.__code__) for function in functions)


# Activations that need float32.

ACTIVATION_ATTRIBUTES = ("activation", "recurrent_activation")


class Activation(NamedTuple):
    """An activation, without what `functools.partial` puts around it."""

    function: Any  # the callable: a function, an object or a layer; `keras.activations.linear` for None
    arguments: dict[str, Any]  # those that are bound to it by name
    name: str  # for messages; that of the class where the callable has none
    registered: str  # the name that Keras saves a function by; "" of another callable


def activation_of(given: Any) -> Activation:
    """Reads what a layer computes with as its activation."""
    arguments: dict[str, Any] = {}
    while isinstance(given, functools.partial) and not given.args:
        arguments = {**given.keywords, **arguments}
        given = given.func
    function = keras.activations.linear if given is None else given
    named = hasattr(function, "__name__") and isinstance(function, Hashable)
    name = function.__name__ if named else type(function).__name__
    return Activation(function, arguments, name, keras.saving.get_registered_name(function) if named else "")


def _in_float32(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: Any, axis: int = -1) -> Any:
        y = function(keras.ops.cast(x, "float32"), axis=axis)
        return y if keras.backend.standardize_dtype(x.dtype) == "float32" else keras.ops.cast(y, x.dtype)

    wrapper.__name__ = name
    return keras.saving.register_keras_serializable("keras_mp")(wrapper)


# The activations that divide by a sum of exponentials or sort along an axis, and the same in float32.
FLOAT32_ACTIVATIONS = {
    getattr(module, name): _in_float32(getattr(module, name), f"{prefix}{name}_float32")
    for module, prefix in ((keras.activations, ""), (keras.ops, "ops_"))
    for name in ("softmax", "log_softmax", "sparsemax")
}
_PLAIN = {wide: plain for plain, wide in FLOAT32_ACTIVATIONS.items()}


def float32_activation(activation: Any) -> Any:
    """The same activation in float32; None where it needs not."""
    return _exchanged(activation, FLOAT32_ACTIVATIONS)


def plain_activation(activation: Any) -> Any:
    """The activation before `float32_activation`; None of any other."""
    return _exchanged(activation, _PLAIN)


def _exchanged(activation: Any, others: dict[Any, Any]) -> Any:
    function, arguments, _, registered = activation_of(activation)
    other = others.get(function) if registered else None  # an object may be no key
    return functools.partial(other, **arguments) if other is not None and arguments else other
