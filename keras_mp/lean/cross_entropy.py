"""Cross-entropy over a large vocabulary, in chunks of rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.stability.accumulate import product_float32
from keras_mp.system.argument_checks import whole_number

engine = backend.engine_of(__package__)

# Logits of one chunk: 256 MiB in float32.
CHUNK = 2**26
# A float16 gradient of a logit is kept this many times as large while it is multiplied: the probability of one word
# among tens of thousands lies where float16 loses bits.
_FLOAT16_SHIFT = 2.0**12


def chunked_cross_entropy(
    features: Any,
    kernel: Any,
    targets: Any,
    weights: Any = None,
    *,
    bias: Any = None,
    rows: int | None = None,
    vocabulary_first: bool = False,
    gradient: bool = True,
    with_rows: bool = False,
) -> Any:
    """Sums the cross-entropy of `features . kernel + bias`.

    The logits are made and dropped in chunks of rows.

        z = features . kernel + bias                         float32 sums of operands in the features' dtype
        loss = sum(weight (log(sum(exp(z))) - z[target]))    float32

        gradient of z = weight (softmax(z) - onehot(target)) rounded to the features' dtype
        gradient of features = (gradient of z) . kernel^T
        gradient of kernel = features^T . (gradient of z)    added up in float32

    The forward pass computes the gradients too, so that the logits are computed once; the backward pass multiplies
    them by the upstream number. Second derivatives, and forward mode, take all rows at once.

    Args:
        features: floats, shape `(..., width)`; the other sizes may be unknown.
        kernel: floats, shape `(width, vocabulary)`; given in float32, its gradient is not rounded.
        targets: integers, shape `(...)`. A target outside the vocabulary, with another weight than 0, is as in Keras's
            loss: on JAX its loss and gradients are 0; on TensorFlow they are NaN, or outside XLA, on a CPU, an error.
        weights: floats of the shape of targets, 1 by default; they get no gradient. A row of weight 0 is not there.
        bias: floats, shape `(vocabulary,)`.
        rows: the number of rows of a chunk; by default as many as make 2^26 logits. It need not divide the number of
            rows.
        vocabulary_first: whether the kernel has the shape `(vocabulary, width)`, as an embedding has.
        gradient: whether there is a backward pass; without one the loss alone is computed.
        with_rows: whether to return what metrics need of each row, besides the sum.

    Returns:
        A float32 number. With with_rows, that number and `Rows(hits, losses)`, which have no gradients.

    Raises:
        ValueError: If shapes do not fit, or rows is below 1.
    """
    features, kernel, targets = map(backend.as_tensor, (features, kernel, targets))
    width, vocabulary = reversed(kernel.shape) if vocabulary_first else kernel.shape
    _check(features, width, targets, weights, bias, vocabulary, rows)
    features = keras.ops.reshape(features, (-1, width))
    given_targets, targets = targets, keras.ops.cast(keras.ops.reshape(targets, (-1,)), "int32")
    weights = keras.ops.ones_like(targets, dtype="float32") if weights is None else backend.as_tensor(weights)
    weights = keras.ops.reshape(keras.ops.stop_gradient(keras.ops.cast(weights, "float32")), (-1,))
    bias = None if bias is None else backend.as_tensor(bias)
    rows = rows or _rows_of_chunk(vocabulary)
    dtype, labels = keras.backend.standardize_dtype(features.dtype), "vw" if vocabulary_first else "wv"
    if dtype == "float16":
        options = _Options(labels, dtype, "float32", _FLOAT16_SHIFT, gradient, with_rows)
    else:
        options = _Options(labels, dtype, dtype, 1.0, gradient, with_rows)
    shape = keras.ops.shape(given_targets)

    # Targets and weights as arguments: JAX cannot recompute a function with a gradient that finds them around it.
    @backend.custom_gradient
    def total(features: Any, kernel: Any, targets: Any, weights: Any, *bias: Any) -> Any:
        largest = keras.ops.max(keras.ops.abs(weights), initial=0.0)
        largest = keras.ops.where(largest == 0, 1.0, largest)
        outside = engine.loss_outside(keras.ops.where(weights == 0, 0, targets), vocabulary)
        zeros = [keras.ops.zeros((), "float32")]
        if gradient:
            # Apart from all other zeros of these shapes: XLA would keep those from here to where they are added.
            zero = engine.unmerged(zeros[0])
            zeros += [keras.ops.broadcast_to(zero, shape) for shape in (kernel.shape, (vocabulary,))]

        def computed(rows: int | None, features: Any, kernel: Any, *bias: Any) -> tuple[list[Any], list[Any]]:
            low, shift = keras.ops.cast(kernel, options.dtype), bias[0] if bias else None
            step = functools.partial(_step, kernel=low, bias=shift, largest=largest, outside=outside, options=options)
            slices = [features, targets, weights]
            of_chunk = [(1, "float32"), (1, "float32")] * with_rows + [(0, options.row_dtype)] * gradient
            return _over_chunks(step, zeros, slices, rows, of_chunk) if rows else step(zeros, slices)

        like = (features, kernel, *bias)
        # Through the loop TensorFlow has no forward mode.
        sums, results = computed(None if backend.in_forward_mode(like) else rows, *like)
        of_rows = results[: 2 * with_rows]

        def gradients(sums: list[Any], to_features: Any, upstream: Any) -> list[Any]:
            factor = upstream * (largest / options.shift)
            own = [to_features * keras.ops.cast(upstream, options.row_dtype), sums[1] * factor, sums[2] * factor]
            return [keras.ops.cast(g, x.dtype) for g, x in zip(own, like, strict=False)]

        def gradients_at_once(upstream: Any, *like: Any) -> list[Any]:
            sums, results = computed(None, *like)
            return gradients(sums, results[-1], upstream)

        def backward(upstream: Any, *of_rows: Any) -> Any:
            if not gradient:
                return (*map(keras.ops.zeros_like, like[:2]), None, None, *map(keras.ops.zeros_like, bias))
            upstream = keras.ops.cast(upstream, "float32")
            own = gradients(sums, results[-1], upstream)
            own = engine.with_derivatives_of(gradients_at_once, own, [upstream, *like])
            return (*own[:2], None, None, *own[2:])

        return (sums[0], *of_rows) if with_rows else sums[0], backward

    result = total(features, kernel, targets, weights, *([] if bias is None else [bias]))
    if not with_rows:
        return result
    loss, *of_rows = result
    return loss, RowMetrics(*(keras.ops.reshape(keras.ops.stop_gradient(x), shape) for x in of_rows))


def chunks_save_memory(rows: int | None, width: int, vocabulary: int, itemsize: int) -> bool:
    """Whether chunks of logits take less memory than all.

        whole   rows x vocabulary x 2 itemsize                  logits and their gradients
        chunks  rows of a chunk x vocabulary x (4 + itemsize)   the same of a chunk, logits in float32
                + vocabulary x width x 8                        the kernel's gradient, and a chunk's share of it

    Counted in the buffers of steps that XLA compiled for an H100 in mixed_bfloat16. True where rows is None, unknown.
    """
    if rows is None:
        return True
    chunk = min(rows, _rows_of_chunk(vocabulary))
    return rows * vocabulary * 2 * itemsize > chunk * vocabulary * (4 + itemsize) + vocabulary * width * 8


class RowMetrics(NamedTuple):
    """What metrics need of each row."""

    hits: Any  # 1.0 where the largest logit is the target's, and 0.0 elsewhere
    losses: Any  # the cross-entropy, without weights


def _rows_of_chunk(vocabulary: int) -> int:
    return max(128, CHUNK // vocabulary // 128 * 128)


class _Options(NamedTuple):
    """How a call computes."""

    labels: str  # labels of the kernel, for an einsum: "wv", or "vw" where its shape is `(vocabulary, width)`
    dtype: str  # dtype of the operands of all products
    row_dtype: str  # dtype of the gradients of rows, which float16 could not hold yet
    shift: float  # the factor of the gradient of a logit
    gradient: bool  # whether there is a backward pass
    with_rows: bool  # whether each row's `RowMetrics` are wanted


def _step(
    carry: list[Any], chunk: list[Any], *, kernel: Any, bias: Any, largest: Any, outside: Any, options: _Options
) -> tuple[list[Any], list[Any]]:
    """Adds a chunk's loss and gradients; returns those of rows."""
    rows, targets, weights = chunk
    labels = options.labels
    # The scopes tell `inspect` the role of each product: no name of a backward pass would.
    with keras.name_scope("keras_mp.forward"):
        logits = product_float32(f"rw,{labels}->rv", rows, kernel)
    settings = options.shift, options.dtype, options.with_rows
    loss, to_logits, to_bias, *of_rows = _loss(logits, targets, weights, largest, outside, bias, *settings)
    if not options.gradient:
        return [carry[0] + loss], of_rows
    with keras.name_scope("keras_mp.kernel_gradient"):
        if labels == "vw":
            to_kernel = product_float32("rv,rw->vw", to_logits, rows)
        else:
            to_kernel = product_float32("rw,rv->wv", rows, to_logits)
    sums = [carry[0] + loss, carry[1] + to_kernel, carry[2] + to_bias]
    with keras.name_scope("keras_mp.input_gradient"):
        to_rows = product_float32(f"rv,{labels}->rw", to_logits, kernel) * (largest / options.shift)
    return sums, [*of_rows, keras.ops.cast(to_rows, options.row_dtype)]


def _over_chunks(
    step: Any, carry: list[Any], slices: list[Any], rows: int, results: list[tuple[int, str]]
) -> tuple[list[Any], list[Any]]:
    """Runs the step over chunks of rows, filled with zeros."""
    count = slices[0].shape[0]
    if count is not None and count <= rows:
        return step(carry, slices)
    if count is None:
        count = keras.ops.shape(slices[0])[0]
        chunks = (count + rows - 1) // rows
        size = (count + chunks - 1) // keras.ops.maximum(chunks, 1)
    else:
        # A multiple of 8 rows, which matrix units take whole.
        size = min(rows, -(-count // -(-count // rows) // 8) * 8)
        chunks = -(-count // size)
    missing = chunks * size - count
    padded = [keras.ops.pad(x, [(0, missing)] + [(0, 0)] * (len(x.shape) - 1)) for x in slices]
    cut = [keras.ops.reshape(x, (chunks, size, *x.shape[1:])) for x in padded]
    carry, stacked = engine.scan(step, carry, cut, results)
    return carry, [keras.ops.reshape(x, (-1, *x.shape[2:]))[:count] for x in stacked]


@engine.fused
def _loss(
    logits: Any,
    targets: Any,
    weights: Any,
    largest: Any,
    outside: Any,
    bias: Any,
    shift: float,
    dtype: str,
    with_rows: bool,
) -> Any:
    """The weighted loss, and gradients of logits and bias.

    The gradients are divided by the largest weight, and multiplied by the shift.
    """
    if bias is not None:
        logits = logits + keras.ops.cast(bias, "float32")
    vocabulary = logits.shape[-1]
    peak = keras.ops.max(logits, axis=-1, keepdims=True)
    exponentials = keras.ops.exp(logits - peak)
    total = keras.ops.sum(exponentials, axis=-1, keepdims=True)
    one_hot = keras.ops.arange(vocabulary, dtype="int32")[None, :] == targets[:, None]
    inside = keras.ops.logical_and(targets >= 0, targets < vocabulary)
    # Differences to the largest logit, as in the sum: the logits themselves may be so large that they cancel badly.
    at_target = keras.ops.sum(keras.ops.where(one_hot, logits - peak, 0.0), axis=-1)
    losses = keras.ops.where(inside, keras.ops.log(total[:, 0]) - at_target, outside)
    of_rows = []
    if with_rows:
        hits = keras.ops.cast(keras.ops.argmax(logits, axis=-1), "int32") == targets
        of_rows = [keras.ops.cast(hits, "float32"), losses]
    losses = keras.ops.where(weights == 0, 0.0, losses * weights)
    factors = keras.ops.where(inside, weights / largest * shift, outside)
    to_logits = (exponentials / total - keras.ops.cast(one_hot, "float32")) * factors[:, None]
    to_logits = keras.ops.where(weights[:, None] == 0, 0.0, to_logits)
    return keras.ops.sum(losses), keras.ops.cast(to_logits, dtype), keras.ops.sum(to_logits, axis=0), *of_rows


def _check(features: Any, width: int, targets: Any, weights: Any, bias: Any, vocabulary: int, rows: Any) -> None:
    if features.shape[-1] != width:
        raise ValueError(f"features must have the kernel's width {width} last, got the shape {tuple(features.shape)}")
    for name, given in (("targets", targets), ("weights", weights)):
        if given is None:
            continue
        shape, wanted = tuple(given.shape), tuple(features.shape[:-1])
        pairs = zip(shape, wanted, strict=False)
        if len(shape) != len(wanted) or any(a is not None and b is not None and a != b for a, b in pairs):
            raise ValueError(f"{name} must have the shape of features without the last axis, {wanted}, got {shape}")
    if bias is not None and tuple(bias.shape) != (vocabulary,):
        raise ValueError(f"bias must have the shape ({vocabulary},), got {tuple(bias.shape)}")
    if rows is not None:
        whole_number("rows", rows)
