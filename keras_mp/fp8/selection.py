"""Which layers FP8 makes faster, by chip and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from keras_mp.fp8.layers import Float8Layer
from keras_mp.fp8.scaling import Scalings, problem
from keras_mp.precision.chips import CHIPS, Chip, find_chip
from keras_mp.rebuild.walk import Walk, original_class, quantization_trained_for
from keras_mp.stability.output_layers import NORMALIZATIONS, PASSING_ON, output_layers

# NVIDIA, cuBLAS documentation, cublasLtMatmul: sizes of FP8 operands must be multiples of 16.
MULTIPLE = 16
# A layer gains nothing when its smaller side is at most SMALL and its larger at most LARGE. Source: torchao's automatic
# filter for tensorwise scaling (torchao/float8/float8_linear_utils.py), from its measurements on an H100.
SMALL, LARGE = 1024, 4096

MATRIX_LAYERS = (keras.layers.Dense, keras.layers.EinsumDense)

Select = Callable[[str, Any], bool]


class Decision(NamedTuple):
    """Whether `convert` converts a layer, and why."""

    path: str  # the names that lead to the layer, joined with `/`
    layer: keras.layers.Layer
    sizes: tuple[int, int] | None  # inputs and outputs of its matrix product; None before it is built
    float8: bool  # whether it computes in FP8
    possible: bool  # whether it can
    reason: str  # the reason for it or against it
    # the prediction for the target, if one was given and the layer can compute in FP8; of INT8 there is none
    cost: Cost | None = None


class Target(NamedTuple):
    """The chip, batch and scaling to predict the gain for."""

    chip: str  # the chip's name
    batch_size: int  # the batch size of a step, where the model does not say it
    scalings: Scalings  # the scalings of layers that are not in FP8 yet


def decide(walk: Walk, select: Select | None = None, target: Target | None = None) -> list[Decision]:
    """Decides for each Dense and EinsumDense layer, depth first.

    Args:
        select: a function `select(path, layer) -> bool` that decides instead of the default rule.
        target: a chip, batch and scaling; the gain that is predicted for it then decides, instead of sizes alone.

    Raises:
        ValueError: the target is no chip with FP8, or MXFP8, or none that INT8 is known of; or the model does not say
            how many rows a layer's inputs have.
    """
    ends = {} if select else end_layers(walk)
    predict = _Predictor(target) if target else None
    return [
        _decide(path, layer, select, ends, predict)
        for path, layer in walk.layers.items()
        if isinstance(layer, MATRIX_LAYERS)
    ]


class _Predictor:
    """Predicts the cost of layers, in order of their paths."""

    def __init__(self, target: Target):
        self.target = target
        if target.scalings.title != "INT8":
            chip_for(target.chip, target.scalings)
        self._rows: dict[str, int] = {}

    def __call__(self, path: str, layer: keras.layers.Layer, sizes: tuple[int, int]) -> Cost | bool:
        """The cost, or for INT8 whether the layer gains."""
        scalings = layer.scaling if isinstance(layer, Float8Layer) else self.target.scalings
        parent = path.rpartition("/")[0]
        rows = rows_of(layer, sizes[0], self.target.batch_size)
        if rows is not None:
            self._rows[parent] = rows
        elif parent in self._rows:
            rows = self._rows[parent]  # attention does not tell its last projection how long its input is
        else:
            raise ValueError(
                f"layer {path!r} takes inputs of unknown length, {layer.get_build_config()['input_shape']}: to predict "
                "what a layer gains, build the model with a known one, such as keras.Input((1024,))"
            )
        if scalings.title == "INT8":
            least = gains_from(self.target.chip)
            return least is not None and all(map(int.__le__, least, (rows, *sizes)))
        return step_cost(rows, *sizes, chip_for(self.target.chip, scalings), scalings)


def _decide(
    path: str, layer: keras.layers.Layer, select: Select | None, ends: dict[int, str], predict: _Predictor | None
) -> Decision:
    wrong = _impossible(layer)
    sizes = None if wrong else matrix_sizes(layer)
    if sizes is None:
        return Decision(path, layer, sizes, isinstance(layer, Float8Layer), False, wrong)
    predicted = predict(path, layer, sizes) if predict else None
    cost = predicted if isinstance(predicted, Cost) else None
    told = ""
    if cost is not None:
        milliseconds = f"{cost.bfloat16 * 1e3:.3g} ms a step in bfloat16, {cost.fp8 * 1e3:.3g} in FP8"
        told = f": {milliseconds}, {cost.gain:.2f} times as fast (predicted)"
    if isinstance(layer, Float8Layer):
        computes = f"it computes in {layer.scaling.title} with {layer.scaling}"
        return Decision(path, layer, sizes, True, True, computes + told, cost)
    if select is not None:
        chosen = bool(select(path, layer))
        reason = "select chose it" if chosen else "select did not choose it"
        return Decision(path, layer, sizes, chosen, True, reason + told, cost)
    product = f"its product of {sizes[0]} by {sizes[1]}"
    reason = ends.get(id(layer), "")
    if not reason and (sizes[0] % MULTIPLE or sizes[1] % MULTIPLE):
        reason = f"{product} has sides that are no multiples of {MULTIPLE}"
    elif not reason and predicted is None and min(sizes) <= SMALL and max(sizes) <= LARGE:
        reason = f"{product} is too small: one side must exceed {LARGE}, or both {SMALL}"
    elif not reason and predicted is not None and not (predicted if cost is None else cost.gain >= 1):
        reason = f"{product} does not gain"
    return Decision(path, layer, sizes, not reason, True, (reason or f"{product} gains") + told, cost)


def _impossible(layer: keras.layers.Layer) -> str:
    plain = original_class(layer)
    if plain not in MATRIX_LAYERS:
        return f"{plain.__name__} has code of its own, which an FP8 layer would not run"
    if not layer.built:
        return "it is not built: call the model once on a batch"
    if layer.quantization_mode is not None:
        return f"it is quantized to {layer.quantization_mode}"
    if config := quantization_trained_for(layer):
        return f"it trains for {config.mode}"
    if reads_sparse(layer):
        return "it reads a sparse tensor, and both operands of an FP8 product are dense"
    return problem(layer.equation) if isinstance(layer, keras.layers.EinsumDense) else ""


def reads_sparse(layer: keras.layers.Layer) -> bool:
    """Whether a layer of a graph reads a sparse tensor."""
    # Private, as there is no public list of the calls of a layer.
    return any(tensor.sparse for node in layer._inbound_nodes for tensor in node.input_tensors)


def matrix_sizes(layer: keras.layers.Layer) -> tuple[int, int]:
    """Counts inputs and outputs of a layer's product."""
    shape = tuple(layer.kernel.shape)
    if isinstance(layer, keras.layers.Dense):
        return math.prod(shape[:-1]), shape[-1]
    operands, result = layer.equation.replace(" ", "").split("->")
    outputs = math.prod(size for size, label in zip(shape, operands.split(",")[1], strict=True) if label in result)
    return math.prod(shape) // outputs, outputs


def end_layers(walk: Walk) -> dict[int, str]:
    """Says why layers at both ends stay, by their ids.

    Layers that neither multiply nor mix, such as Flatten, Dropout and normalizations, may lie between. A subclassed
    model does not say in which order it calls its layers; there the first and the last created count.
    """
    products = [layer for layer in walk.layers.values() if isinstance(layer, MATRIX_LAYERS)]
    if getattr(walk.model, "outputs", None):
        first, last = set(_readers_of_input(walk.model)), set(output_layers(walk))
    else:
        first, last = {id(layer) for layer in products[:1]}, {id(layer) for layer in products[-1:]}
    ends = {id(layer): "it is the model's first layer" for layer in products if id(layer) in first}
    return ends | {id(layer): "it computes the model's output" for layer in products if id(layer) in last}


def _readers_of_input(model: keras.Model) -> Iterator[int]:
    """Ids of layers that read the input of a graph."""
    seen: set[int] = set()

    def reads_input(tensor: Any) -> bool:
        operation, node = _source(tensor)
        if isinstance(operation, keras.layers.InputLayer):
            return True
        passing = (*PASSING_ON, *NORMALIZATIONS, keras.layers.Rescaling)
        return isinstance(operation, passing) and any(map(reads_input, node.input_tensors))

    waiting = list(keras.tree.flatten(model.outputs))
    while waiting:
        operation, node = _source(waiting.pop())
        if id(node) in seen:
            continue
        seen.add(id(node))
        waiting += node.input_tensors
        if any(map(reads_input, node.input_tensors)):
            yield id(operation)
            if isinstance(operation, keras.Model) and getattr(operation, "outputs", None):
                yield from _readers_of_input(operation)


def _source(tensor: Any) -> tuple[Any, Any]:
    # Private, as there is no public way from a symbolic tensor to the layer that made it.
    operation, node_index, _ = tensor._keras_history
    return operation, operation._inbound_nodes[node_index]


# When FP8 pays: what a layer's three products and its quantization take at a chip's peak rates.

# Bytes of an element: of inputs and gradients, of the float32 master weights, of FP8.
_HALF, _MASTER, _FP8 = 2, 4, 1
_FP4 = 9 / 16  # with the scale of its block


class Cost(NamedTuple):
    """Seconds of one layer in one training step: an estimate."""

    bfloat16: float  # the seconds in bfloat16, the cast of the kernel included
    fp8: float  # the seconds in FP8, quantization included

    @property
    def gain(self) -> float:
        """How many times as fast FP8 is."""
        return self.bfloat16 / self.fp8


def step_cost(rows: int, inputs: int, outputs: int, chip: Chip, scalings: Scalings) -> Cost:
    """Estimates a layer's three products from the chip's peak rates.

        product      = max(2 rows inputs outputs / rate, bytes of operands and result / bandwidth),  three of them
        bfloat16     = products + (read 4, write 2) of the kernel
        FP8          = products + quantization
        quantization = for x, w and g: read it for the amax, read it again, write 1
                       delayed scaling reads it once; rowwise scaling makes all of it twice, for different products;
                       MXFP8 reads it for two amaxes, and once more to write 1 for each of the two
                       NVFP4 reads it once more, for the tensor's own amax, and writes 9/16 for each of the two
                       where matrix units want the summed axis innermost: write 1 once more, transposed

    No kernel reaches a peak; what is left out of both sides leaves their ratio much as it is. For (8192, 4096, 16384)
    on an H200 it predicts 1.69 for current and 1.81 for delayed scaling, where Transformer Engine's documentation
    measured 1.58 and 1.69.

    Args:
        rows: the rows of the inputs: batch times positions.
        chip: a chip with FP8.

    Returns:
        Seconds for one of the chip's devices.
    """
    bandwidth = chip.bandwidth / chip.devices
    x, w, g = rows * inputs, inputs * outputs, rows * outputs

    def products(dtype: str, size: float) -> float:
        rate = chip.peak[dtype] / chip.devices
        forward, to_inputs = size * (x + w) + _HALF * g, size * (g + w) + _HALF * x
        to_kernel = size * (x + g) + _MASTER * w
        moved = (forward, to_inputs, to_kernel)
        return sum(max(2 * rows * inputs * outputs / rate, bytes_moved / bandwidth) for bytes_moved in moved)

    four_bits = scalings.title == "NVFP4"
    # On Ada and Hopper FP8 operands must have the summed axis innermost, so that each is needed in two layouts (NVIDIA,
    # cuBLAS documentation, cublasLtMatmul, "the TN format"); not on Blackwell, nor on TPUs.
    layouts = 2 if chip.vendor == "nvidia" and chip.architecture in ("8.9", "9.0") else 1

    def quantized(elements: int, size: int) -> float:
        reads = 1 if scalings.kept else 2
        if four_bits:
            return elements * (4 * size + 2 * _FP4)
        if scalings.all[0].in_blocks:
            return elements * (3 * size + 2 * _FP8)
        if scalings.all[0].granularity == "row":
            return elements * 2 * (reads * size + _FP8)  # the second copy is the transposed one
        return elements * (reads * size + _FP8 * layouts)

    quantization = quantized(x, _HALF) + quantized(w, _MASTER) + quantized(g, _HALF)
    cast = w * (_MASTER + _HALF)
    own = products("fp4", _FP4) if four_bits else products("fp8", _FP8)
    return Cost(products("bfloat16", _HALF) + cast / bandwidth, own + quantization / bandwidth)


def chip_for(target: str, scalings: Scalings) -> Chip:
    """Looks up a chip that multiplies FP8, or blocks.

    Raises:
        ValueError: there is no such chip, or it has no such units, names those that have; or the backend has no such
            product.
    """
    chip = find_chip(target)
    if scalings.all[0].in_blocks:
        title, dtype = scalings.title, "fp4" if scalings.title == "NVFP4" else "fp8"
        having = ", ".join(name for name, chip in CHIPS.items() if _multiplies_blocks(chip, dtype))
        if not _multiplies_blocks(chip, dtype):
            raise ValueError(
                f"target={target!r}: {chip.title} has no {title} units, so {title} never pays there. With: {having}"
            )
        if keras.backend.backend() != "jax":
            raise ValueError(
                f"target={target!r}: Keras runs on TensorFlow, which has no {title} product, so {title} never pays. "
                "Set the environment variable KERAS_BACKEND to 'jax' before Keras is first imported"
            )
    if "fp8" not in chip.peak:
        having = ", ".join(name for name, chip in CHIPS.items() if "fp8" in chip.peak)
        raise ValueError(f"target={target!r}: {chip.title} has no FP8 units, so FP8 never pays there. With: {having}")
    return chip


def _multiplies_blocks(chip: Chip, dtype: str) -> bool:
    """Whether a chip multiplies blocks: NVIDIA's GPUs from Blackwell on."""
    return chip.vendor == "nvidia" and dtype in chip.peak and int(chip.architecture.split(".")[0]) >= 10


def rows_of(layer: keras.layers.Layer, inputs: int, batch_size: int) -> int | None:
    """Counts rows of a layer's inputs, or None."""
    shape = list(layer.get_build_config()["input_shape"])
    if shape and shape[0] is None:
        shape[0] = batch_size
    return None if None in shape else math.prod(shape) // inputs


# When INT8 pays: from which size of a layer on.

# Rows, inputs and outputs from which on a layer gains; None where no layer does. By what libtpu 0.0.42.1 estimates of a
# layer compiled by itself, forward and backward, quantization included. On a v5e (8192, 4096, 16384) takes 0.72 of
# bfloat16's cycles with delayed and static scales, 0.85 with current ones, and 0.61 with the kernel gradient in INT8;
# (2048, 2048, 8192) takes 0.92 at the least. What saves less than a tenth says nothing about a layer in a step. The
# larger of the two takes 0.95 at the least on a v6e, and 1.06 on a v7x.
GAINS_FROM: dict[str, tuple[int, int, int] | None] = {"v5e": (8192, 4096, 16384), "v6e": None, "v7x": None}


def gains_from(target: str) -> tuple[int, int, int] | None:
    """Looks up `GAINS_FROM` for a chip.

    Raises:
        ValueError: nothing is known of INT8 on the chip.
    """
    chip = find_chip(target)
    if chip.name not in GAINS_FROM:
        raise ValueError(
            f"target={target!r}: there are no compiled cycles of INT8 for {chip.title}, so that its gain is not "
            f"predicted. With: {', '.join(GAINS_FROM)}. Without a target, or with select, convert does not need them"
        )
    return GAINS_FROM[chip.name]
