"""Models that train with the numbers of LiteRT's integers.

One treatment of each graph does it; layers stay as they are. Each tensor that LiteRT quantizes is rounded in a range of
its own, moved by the batches, and weights in one range a channel. What LiteRT computes as one operator, such as a
convolution with batch normalization and ReLU, is rounded once, behind it: folding scales a channel's weights and their
range alike, so that their codes are the same before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras

from keras_mp.backend.common.keras_private import get_keras_mask, operation_fn, set_keras_mask
from keras_mp.rebuild.merged import is_adapted
from keras_mp.rebuild.walk import FLOAT8, QAT, Config, calls_of, graph_of, treatments_of
from keras_mp.stability.float32_layers import has_float_dtype
from keras_mp.stability.sensitive import activation_of
from keras_mp.treatment.change import ChangePlan, Planned
from keras_mp.treatment.treated import Treatment, register_treatments, treat

LITERT = "litert"
BITS = {"int8": 8, "int16x8": 16}
"""The bits of activations by the name of a file's quantization; weights have 8."""
MOMENTUM = 0.99
"""The part of a range that a training step keeps."""

_KERAS = keras.layers
# The weights of each class that int8 rounds, and the axes along which each channel has a range of its own.
_WEIGHTS: dict[tuple[type, ...], dict[str, tuple[int, ...]]] = {
    (_KERAS.SeparableConv1D, _KERAS.SeparableConv2D): {"depthwise_kernel": (-2, -1), "pointwise_kernel": (-1,)},
    (_KERAS.DepthwiseConv1D, _KERAS.DepthwiseConv2D): {"kernel": (-2, -1)},
    (_KERAS.Conv1DTranspose, _KERAS.Conv2DTranspose): {"kernel": (-2,)},
    (_KERAS.Conv1D, _KERAS.Conv2D, _KERAS.Dense): {"_kernel": (-1,)},
}
# What returns values of its input alone, and zeros: they are rounded already.
_SAME = frozenset(
    "ActivityRegularization AlphaDropout Cropping1D Cropping2D Dropout ExpandDims Flatten GaussianDropout "
    "GaussianNoise GlobalMaxPooling1D GlobalMaxPooling2D Identity MaxPooling1D MaxPooling2D Permute RepeatVector "
    "Reshape SpatialDropout1D SpatialDropout2D Squeeze Transpose UpSampling1D ZeroPadding1D ZeroPadding2D".split()
)
# What LiteRT computes with the scale of the input: sums of its values.
_LIKE_INPUT = frozenset("AveragePooling1D AveragePooling2D Resizing UpSampling2D".split())
# What LiteRT computes with one scale for all inputs and the output.
_ONE_RANGE = frozenset("Concatenate Maximum Minimum Stack".split())
_ACTIVATIONS = {"Relu": "relu", "Relu6": "relu6", "Sigmoid": "sigmoid", "Softmax": "softmax", "Tanh": "tanh"}
_FUSED = ("linear", "relu", "relu6")
# Where each of these is followed by ReLU, LiteRT has one operator.
_FUSED_WITH_RELU = frozenset("Add Multiply Subtract".split())

# Where a range is among those of its graph, or the range itself, lowest and highest.
Range = int | tuple[float, float]


class Step(NamedTuple):
    """A call of a graph."""

    node: Any  # Keras's
    weights: Mapping[str, tuple[int, ...]]  # the layer's attributes that are rounded, each with its channels' axes
    inside: Range | None  # between the two products of a separable convolution
    before: Range | None  # before an activation that is an operator of its own
    after: list[Range | None]  # of its outputs; None where one is not rounded


class Plan(NamedTuple):
    """The ranges of a graph."""

    inputs: list[Range | None]
    steps: list[Step]  # in the order of computation
    names: list[str]  # of the operations whose outputs the ranges belong to, by their place
    finest: dict[int, float]  # the smallest fixed scale of tensors that share a range, by its place


def plan(graph: Any, options: Config) -> Plan:
    """Plans which tensors LiteRT quantizes, and in which ranges."""
    nodes = calls_of(graph)
    readers: dict[int, list[Any]] = {}
    for node in nodes:
        for x in node.input_tensors:
            readers.setdefault(id(x), []).append(node.operation)
    outputs = {id(x) for x in graph.outputs}
    names: list[str] = []
    ranges: dict[int, Range | None] = {}
    one_with: dict[int, int] = {}
    finest: dict[int, float] = {}
    folded: set[int] = set()

    def own(name: str) -> int:
        names.append(name)
        return len(names) - 1

    def first(place: Any) -> Any:
        return first(one_with[place]) if place in one_with else place

    for x in graph.inputs:
        operation = x._keras_history.operation
        ranges[id(x)] = own(operation.name) if options["inputs"] and has_float_dtype(x) else None
    steps = []
    for node in nodes:
        operation, kind = node.operation, type(node.operation).__name__
        weights = next((names for classes, names in _WEIGHTS.items() if isinstance(operation, classes)), {})
        activation = _activation(operation)
        inside = own(operation.name) if len(weights) > 1 else None
        before = own(operation.name) if weights and activation not in _FUSED else None
        source = ranges.get(id(node.input_tensors[0])) if node.input_tensors else None
        after: list[Range | None] = []
        for x in node.outputs:
            reader = readers.get(id(x), [])
            alone = len(reader) == 1 and id(x) not in outputs
            fused = alone and _fuses(
                operation, bool(weights) and activation == "linear", id(operation) in folded, reader
            )
            if fused and isinstance(reader[0], _KERAS.BatchNormalization):
                folded.add(id(reader[0]))
            passes = kind in _SAME or (activation == "linear" and not weights)
            if not has_float_dtype(x) or fused or graph_of(operation) is not None or (passes and source is not None):
                after.append(None)
                ranges[id(x)] = source if passes else None
                continue
            sources = {ranges.get(id(x)) for x in node.input_tensors}
            like = source if kind in _LIKE_INPUT or (kind in _ONE_RANGE and len(sources) == 1) else None
            fixed = _fixed(activation, options["bits"])
            ranges[id(x)] = fixed or (own(operation.name) if like is None else like)
            after.append(ranges[id(x)])
        steps.append(Step(node, weights, inside, before, after))
        if kind in _ONE_RANGE:
            alike = {first(ranges.get(id(x))) for x in (*node.input_tensors, *node.outputs)}
            places = sorted(place for place in alike if isinstance(place, int))
            one_with |= {place: places[0] for place in places[1:]}
            scales = [(place[1] - place[0]) / 255 for place in alike if isinstance(place, tuple)]
            if places and scales and options["bits"] == 8:
                finest[places[0]] = min(scales)
    kept = [place for place in range(len(names)) if place not in one_with]

    def settled(place: Any) -> Any:
        return kept.index(first(place)) if isinstance(place, int) else place

    steps = [
        step._replace(inside=settled(step.inside), before=settled(step.before), after=list(map(settled, step.after)))
        for step in steps
    ]
    fine: dict[int, float] = {}
    for place, scale in finest.items():
        fine[settled(place)] = min(scale, fine.get(settled(place), scale))
    return Plan([settled(ranges[id(x)]) for x in graph.inputs], steps, [names[place] for place in kept], fine)


def _activation(operation: Any) -> str:
    """The activation that an operation ends with, or ""."""
    if isinstance(operation, _KERAS.ReLU):
        plain = not operation.negative_slope and not operation.threshold
        return {None: "relu", 6: "relu6"}.get(operation.max_value, "other") if plain else "other"
    if isinstance(operation, _KERAS.Softmax):
        return "softmax"
    if hasattr(operation, "activation"):
        return activation_of(operation.activation).name
    return _ACTIVATIONS.get(type(operation).__name__, "")


def _fuses(operation: Any, linear: bool, folded: bool, readers: list[Any]) -> bool:
    """Whether LiteRT fuses an operation and its only reader."""
    weighs = any(isinstance(readers[0], classes) for classes in _WEIGHTS)
    relu = _activation(readers[0]) in ("relu", "relu6") and not weighs
    if linear and isinstance(readers[0], _KERAS.BatchNormalization):
        return True
    return relu and (linear or folded or type(operation).__name__ in _FUSED_WITH_RELU)


def _fixed(activation: str, bits: int) -> tuple[float, float] | None:
    """The range that LiteRT gives an activation, whatever its values."""
    if activation not in ("sigmoid", "softmax", "tanh"):
        return None
    if bits == 16:
        return -32767 / 32768, 32767 / 32768
    return (-1.0, 127 / 128) if activation == "tanh" else (0.0, 255 / 256)


def round_weights(weights: Any, channels: tuple[int, ...]) -> Any:
    """Rounds weights to 8 bits; gradients pass unrounded.

    Codes are -127 to 127, and the scale of a channel is max |w| / 127.

    Args:
        weights: weights of any shape.
        channels: the axes, counted from the last, along which each place has a scale of its own.
    """
    weights = keras.ops.cast(weights, "float32")
    rank = len(weights.shape)
    axes = [axis for axis in range(rank) if axis - rank not in channels]
    scale = keras.ops.max(keras.ops.abs(weights), axis=axes, keepdims=True) / 127
    codes = keras.ops.round(weights / keras.ops.where(scale > 0, scale, 1.0))
    return weights + keras.ops.stop_gradient(codes * scale - weights)


def rescalable(low: Any, high: Any, fixed: float) -> tuple[Any, Any]:
    """Widens a range, so that XNNPACK rescales exactly.

    XNNPACK, LiteRT's library for CPUs, multiplies the codes by fixed scale / new scale, rounded to a multiple of 1/256.
    """
    steps = keras.ops.floor(256 * fixed * 254 / (high - low))  # none where a code is wider than the whole fixed range
    scale = keras.ops.where(steps > 0, 256 * fixed / keras.ops.maximum(steps, 1), (high - low) / 254)
    low = keras.ops.round(low / scale) * scale
    return low, low + 255 * scale


class RoundedGraph:
    """Comes before a model's class: computes with LiteRT's numbers."""

    litert_ranges: Any = None

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **others: Any) -> Any:
        options = treatments_of(self)[LITERT]
        if "remat segments" in treatments_of(self):
            raise ValueError(
                f"model {self.name!r} trains for LiteRT, and cannot recompute parts of its graph: "  # type: ignore[attr-defined]
                "revert(model, 'make_lean')"
            )
        graph = graph_of(self)  # type: ignore[arg-type]
        planned = plan(graph, options)
        ranges = _Ranges(self.litert_ranges, options, training, planned.finest)
        # As Keras's own call of a graph.
        values = dict(zip(map(id, graph.inputs), graph._standardize_inputs(inputs), strict=True))
        for x, given in zip(graph.inputs, keras.tree.flatten(mask) if mask is not None else [], strict=False):
            if given is not None:
                set_keras_mask(values[id(x)], given)
        for x, place in zip(graph.inputs, planned.inputs, strict=True):
            values[id(x)] = ranges.rounded(values[id(x)], place)
        outputs = {id(x) for x in graph.outputs}
        for step in planned.steps:
            if any(id(x) not in values for x in step.node.input_tensors):
                continue
            args, kwargs = step.node.arguments.fill_in(values)
            with _with_rounded_weights(step, ranges, rounds=options.get("ranges") is None):
                results = operation_fn(step.node.operation, training=training, **others)(*args, **kwargs)
            kind = type(step.node.operation).__name__
            halves = "away" if kind in _LIKE_INPUT else "up" if kind in _ONE_RANGE else ""
            for x, result, place in zip(step.node.outputs, keras.tree.flatten(results), step.after, strict=True):
                # A loss must see probabilities that are not rounded to 0.
                kept = training and id(x) in outputs and isinstance(place, tuple)
                values[id(x)] = result if kept else ranges.rounded(result, place, halves)
        ranges.keep()
        results = keras.tree.pack_sequence_as(graph._outputs_struct, [values[id(x)] for x in graph.outputs])
        return results[0] if isinstance(results, (list, tuple)) and len(results) == 1 else results

    def load_own_variables(self, store: Any) -> None:
        """Takes the ranges of a file that has some."""
        if store.keys():
            super().load_own_variables(store)  # type: ignore[misc]


class _Ranges:
    """The ranges of a graph's call, as they move."""

    def __init__(self, variable: Any, options: Config, training: bool | None, finest: dict[int, float]) -> None:
        self.variable, self.bits, self.fixed, self.finest = variable, options["bits"], options.get("ranges"), finest
        self.moves = bool(training) and self.fixed is None
        self.now: Any = None if self.fixed is not None else keras.ops.convert_to_tensor(variable)
        self.seen: dict[int, tuple[Any, Any]] = {}
        self.moved: dict[int, Any] = {}

    def rounded(self, x: Any, place: Range | None, halves: str = "") -> Any:
        """Rounds a tensor in its range; outside, gradients are 0.

        Args:
            halves: the side to which LiteRT rounds values halfway between codes: "away" from code 0, averages; "up",
                what is rescaled; "" where hardly any are halfway.
        """
        if place is None:
            return x
        low, high = self._range(x, place)
        narrow = self.bits == 16
        if narrow:
            high = max(-low, high) if isinstance(low, float) else keras.ops.maximum(-low, high)
            low = -high
        if isinstance(low, float):
            result = keras.quantizers.fake_quant_with_min_max_vars(x, low, high, self.bits, narrow)
        else:
            seen = high > low
            high = keras.ops.where(seen, high, 1.0)
            if place in self.finest:
                low, high = rescalable(low, high, self.finest[place])
            if halves == "away" or (halves and place in self.finest):
                scale = (high - low) / (65534 if narrow else 255)
                zero = 0.0 if narrow else keras.ops.round(-low / scale) - 128
                side = keras.ops.sign(keras.ops.cast(x, "float32") / scale + zero) if halves == "away" else 1.0
                x = x + keras.ops.cast(keras.ops.stop_gradient(side * scale * 1e-3), x.dtype)
            result = keras.quantizers.fake_quant_with_min_max_vars(x, low, high, self.bits, narrow)
            result = keras.ops.where(seen, result, x)
        if get_keras_mask(x) is not None:
            set_keras_mask(result, get_keras_mask(x))
        return result

    def _range(self, x: Any, place: Range) -> tuple[Any, Any]:
        if isinstance(place, tuple):
            return place
        if self.fixed is not None:
            return tuple(self.fixed[place])
        if self.moves:
            x = keras.ops.cast(keras.ops.stop_gradient(x), "float32")
            seen = self.seen.get(place, (0.0, 0.0))  # in this step, of tensors that share the range
            low, high = keras.ops.minimum(keras.ops.min(x), seen[0]), keras.ops.maximum(keras.ops.max(x), seen[1])
            self.seen[place] = low, high
            batch, before = keras.ops.stack([low, high]), self.now[place]
            moved = before * MOMENTUM + batch * (1 - MOMENTUM)
            self.moved[place] = keras.ops.where(before[1] > before[0], moved, batch)
        row: Any = self.moved[place] if place in self.moved else self.now[place]
        return row[0], row[1]

    def keep(self) -> None:
        """Writes the ranges that moved."""
        if self.moves and self.moved:
            rows = [self.moved.get(place, self.now[place]) for place in range(self.now.shape[0])]
            self.variable.assign(keras.ops.stack(rows))


@contextmanager
def _with_rounded_weights(step: Step, ranges: _Ranges, rounds: bool) -> Iterator[None]:
    """Lets a layer compute with rounded numbers for one call."""
    layer = step.node.operation
    replaced: dict[str, Any] = {}
    for name, channels in step.weights.items() if rounds else ():
        replaced[name] = keras.ops.cast(round_weights(vars(layer)[name], channels), layer.compute_dtype)
    if step.before is not None:
        activation = layer.activation
        replaced["activation"] = lambda x: _activated(activation, ranges.rounded(x, step.before), ranges)
    if step.inside is not None:
        replaced["call"] = lambda inputs: _separable(layer, inputs, ranges, step.inside)
    kept = {name: vars(layer)[name] for name in replaced if name in vars(layer)}
    vars(layer).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(layer)[name]
        vars(layer).update(kept)


def _activated(activation: Any, x: Any, ranges: _Ranges) -> Any:
    """An activation; SiLU is LiteRT's sigmoid and product, each rounded."""
    if activation_of(activation).name != "silu":
        return activation(x)
    return x * ranges.rounded(keras.ops.sigmoid(x), _fixed("sigmoid", ranges.bits))


def _separable(layer: Any, inputs: Any, ranges: _Ranges, inside: Range | None) -> Any:
    """A separable convolution, rounded between its two products."""
    options = {"data_format": layer.data_format}
    x = keras.ops.depthwise_conv(
        inputs, layer.depthwise_kernel, layer.strides, layer.padding, dilation_rate=layer.dilation_rate, **options
    )
    x = keras.ops.conv(ranges.rounded(x, inside), layer.pointwise_kernel, 1, "valid", **options)
    if layer.bias is not None:
        shape = (-1,) if layer.data_format == "channels_last" else (-1, *[1] * (len(x.shape) - 2))
        x = keras.ops.add(x, keras.ops.reshape(layer.bias, shape))
    return x if layer.activation is None else layer.activation(x)


def _give_ranges(layer: Any) -> None:
    """Gives a graph the variable of its ranges, empty ones."""
    graph, options = graph_of(layer), treatments_of(layer)[LITERT]
    _take_ranges(layer)
    if graph is None or options.get("ranges") is not None:
        return
    count = len(plan(graph, options).names)
    layer.litert_ranges = layer.add_weight(
        shape=(count, 2),
        initializer="zeros",
        dtype="float32",
        autocast=False,
        trainable=False,
        aggregation="mean",
        name="litert_ranges",
    )


def _take_ranges(layer: Any) -> None:
    if vars(layer).get("litert_ranges") is not None:
        layer._untrack_variable(layer.litert_ranges)  # private: Keras has no public way to take a weight away
        del layer.litert_ranges


register_treatments(
    {LITERT: Treatment(lambda original, names: RoundedGraph, undo=_take_ranges, built=_give_ranges, order=-2)}
)


def plan_litert(plan: ChangePlan, quantize: str, select: Any = None) -> None:
    """Plans that a model trains with LiteRT's "int8" or "int16x8"."""
    if select is not None:
        raise ValueError("select is not for LiteRT, whose converter quantizes whatever has ranges: leave it out")
    model = plan.model
    if graph_of(model) is None:
        raise ValueError(
            f"convert({model.name!r}): for LiteRT a model must be functional or sequential, so that it is known what "
            f"reads what; {model.name!r} is a {type(model).__name__}"
        )
    for path, layer in plan.layers.items():
        if is_adapted(layer):
            raise ValueError(f"convert({model.name!r}): {path!r} is quantized or has LoRA: merge it before")
        if plan.treatments(layer) & {FLOAT8, QAT}:
            raise ValueError(f"convert({model.name!r}): {path!r} is converted already: revert(model, 'convert') before")
    for graph in _graphs(model):
        plan.rows.append(Planned("", graph, {LITERT: {"bits": BITS[quantize], "inputs": graph is model}}))


def _graphs(model: Any) -> list[Any]:
    """A model and the graphs called within it."""
    graphs = {id(model): model}
    for node in calls_of(graph_of(model)):
        if isinstance(node.operation, keras.Model) and graph_of(node.operation) is not None:
            graphs |= {id(graph): graph for graph in _graphs(node.operation)}
    return list(graphs.values())


def trained_for(model: keras.Model) -> str | None:
    """The quantization of LiteRT that a model trains for."""
    options = treatments_of(model).get(LITERT)
    return None if options is None else {bits: name for name, bits in BITS.items()}[options["bits"]]


def settle(model: keras.Model) -> None:
    """Writes rounded weights and trained ranges into a model.

    Raises:
        ValueError: a range is empty; the message names the layer whose output it belongs to.
    """
    for graph in _graphs(model):
        options = treatments_of(graph)[LITERT]
        planned = plan(graph_of(graph), options)
        ranges = keras.ops.convert_to_numpy(graph.litert_ranges).tolist()
        empty = [name for name, (low, high) in zip(planned.names, ranges, strict=True) if not high > low]
        if empty:
            raise ValueError(
                f"model {graph.name!r} has no range yet for the output of {', '.join(empty[:3])}: train it for some "
                "steps after convert, and on values that are not all zero"
            )
        for place, fixed in planned.finest.items():
            low, high = map(keras.ops.convert_to_tensor, ranges[place])
            ranges[place] = [float(end) for end in rescalable(low, high, fixed)]
        for layer, weights in {id(s.node.operation): (s.node.operation, s.weights) for s in planned.steps}.values():
            for name, channels in weights.items():
                vars(layer)[name].assign(round_weights(vars(layer)[name], channels))
        treat(graph, {LITERT: {**options, "ranges": ranges}})
