"""Attention on a TPU: JAX's Splash kernel, and the definition.

Keras 3.13 to 3.15 give that kernel unscaled queries, and a causal mask where none was asked for.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec

from keras_mp.backend.common.keras_patches import patched
from keras_mp.backend.jax.devices import traced_chip
from keras_mp.backend.jax.tensors import Division, division
from keras_mp.stability.accumulate import MASKED_SCORE

# A block of rows or columns has lanes of the chip, and at most so many.
LANES, MOST = 128, 512

# For each layer that is called now, the innermost last: what has computed its attention.
_used: list[list[str]] = []


@contextmanager
def attention_as_asked() -> Iterator[list[str]]:
    """Lets `keras.ops.dot_product_attention` compute on a TPU what it says.

    Yields:
        What computed each attention on a TPU, once it has: "Splash", or the kit's own form with the reason.
    """
    used: list[str] = []
    if traced_chip().platform != "tpu":
        yield used
        return
    _used.append(used)
    try:
        with patched({"keras.src.backend.nn.dot_product_attention": _as_asked}):
            yield used
    finally:
        _used.pop()


def _as_asked(original: Callable[..., Any]) -> Callable[..., Any]:
    def dot_product_attention(
        query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, scale: float | None = None,
        is_causal: bool = False, flash_attention: bool | None = None, attn_logits_soft_cap: float | None = None,
    ) -> Any:  # fmt: skip
        if traced_chip().platform != "tpu":
            arguments = (bias, mask, scale, is_causal, flash_attention, attn_logits_soft_cap)
            return original(query, key, value, *arguments)
        dtype = keras.backend.result_type(query.dtype, key.dtype, value.dtype)
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        if mask is not None:
            mask = jnp.asarray(mask).astype(bool)
            mask = jnp.reshape(mask, (*(1,) * (4 - mask.ndim), *mask.shape)) if mask.ndim < 4 else mask
        how: dict[str, Any] = {"causal": is_causal, "scale": scale, "soft_cap": attn_logits_soft_cap}
        result = None
        if bias is None and flash_attention is not False:
            result = splash_attention(query, key, value, mask, mean_of_unseen=True, **how)
        return _by_definition(query, key, value, bias, mask, **how) if result is None else result

    return dot_product_attention


def _by_definition(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, *, causal: bool, scale: float, soft_cap: float | None
) -> Any:
    """Attends with all scores in memory, in float32."""
    batch, rows, heads, features = query.shape
    columns, key_heads = key.shape[1:3]
    grouped = jnp.reshape(query, (batch, rows, key_heads, heads // key_heads, features))
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * scale
    scores = jnp.reshape(scores, (batch, heads, rows, columns))
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + jnp.asarray(bias, scores.dtype)
    if mask is not None:
        scores = jnp.where(mask, scores, MASKED_SCORE)
    if causal:
        scores = jnp.where(jnp.arange(rows)[:, None] >= jnp.arange(columns), scores, MASKED_SCORE)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    probabilities = jnp.reshape(probabilities, (batch, key_heads, heads // key_heads, rows, columns))
    return jnp.reshape(jnp.einsum("bkgts,bskh->btkgh", probabilities, value), (batch, rows, heads, value.shape[-1]))


def splash_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    causal: bool,
    scale: float,
    soft_cap: float | None = None,
    mean_of_unseen: bool = False,
) -> Any:
    """Attends with the Splash kernel; None where it cannot serve.

    The kernel keeps no scores and skips what no row sees. It serves lengths that are multiples of 128, and a mask of
    three factors: one that is known while the step is traced and the same for all of the batch, as a causal one or a
    window; one over keys, as of padding; one over queries.

    Args:
        query: float32 or bfloat16, shape `(batch, rows, heads, features)`.
        key, value: the same dtype, shape `(batch, columns, key heads, features)`.
        mask: booleans, shape `(batch or 1, heads or 1, rows or 1, columns)`, or None.
        causal: whether row i sees only the columns 0 to i.
        scale: the factor of the scores.
        soft_cap: the limit of the scores, `cap tanh(scores / cap)`; None for none.
        mean_of_unseen: whether a row that sees no key is the mean of all values, and not 0.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    (batch, rows, heads, _), (_, columns, key_heads, _) = query.shape, key.shape
    devices = division()
    reason = _why_not(query, key, value, devices)
    factors = None if reason else _factors(mask, causal, rows, columns)
    if factors is None:
        reason = reason or "a mask that is not known before it runs"
    if _used:
        _used[-1].append(f"the kit's own form: {reason}" if reason else "Splash")
    if factors is None:
        return None
    by_row, by_column = factors.rows, factors.columns
    segments = None
    if by_column is not None:
        numbers = jnp.broadcast_to(by_column.astype(jnp.int32), (batch, columns))
        segments = splash.SegmentIds(q=jnp.ones((batch, rows), jnp.int32), kv=numbers)
    q_block, kv_block = (next(size for size in (MOST, MOST // 2, LANES) if n % size == 0) for n in (rows, columns))

    def attend(query: Any, key: Any, value: Any, segments: Any) -> Any:
        kernel = splash.make_splash_mha(
            mask=_splash_mask(factors, (rows, columns), query.shape[1]),
            block_sizes=splash.BlockSizes(
                q_block, kv_block, kv_block, q_block, kv_block, kv_block, block_q_dq=q_block, block_kv_dq=kv_block
            ),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=soft_cap,
        )
        return jax.vmap(kernel)(query, key, value, segments)

    call: Callable[..., Any] = attend
    if devices is not None:
        # XLA would give each device all of a kernel's rows. Each has its own rows, and heads where weights are divided.
        by_head = PartitionSpec(devices.batch, devices.others or None)
        specs = (by_head, by_head, by_head, PartitionSpec(devices.batch))
        call = jax.shard_map(attend, mesh=devices.mesh, in_specs=specs, out_specs=by_head, check_vma=False)
    # The kernel does not scale scores.
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    operands = [jnp.swapaxes(x, 1, 2) for x in (scaled, key, value)]
    output = jnp.swapaxes(call(*operands, segments), 1, 2)
    seen = None if by_column is None else _sees_some(by_column, factors.window, rows, columns)
    if by_row is not None:
        seen = by_row if seen is None else by_row & seen
    if seen is None:
        return output
    # Of a row that sees no key the kernel gives the mean of the values in the blocks that it visits.
    unseen = jnp.zeros_like(output)
    if mean_of_unseen:
        means = jnp.mean(value.astype(jnp.float32), axis=1, keepdims=True).astype(value.dtype)
        unseen = jnp.repeat(means, heads // key_heads, axis=2)
    return jnp.where(seen[:, :, None, None], output, unseen)


def _why_not(query: Any, key: Any, value: Any, devices: Division | None) -> str:
    """Why the kernel does not serve, whatever the mask."""
    lengths = (query.shape[1], key.shape[1])
    if not all(isinstance(size, int) and size and size % LANES == 0 for size in lengths):
        return f"{lengths[0]} x {lengths[1]} is no multiple of {LANES}"
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"{query.dtype}"
    if key.shape != value.shape or query.shape[3] != key.shape[3] or query.shape[2] % key.shape[2]:
        return "queries, keys and values of other sizes"
    if devices is None:
        return ""
    if not isinstance(query, jax.core.Tracer):
        return "outside jit on several devices"
    by_row, by_head = (math.prod(devices.mesh.shape[x] for x in axes) for axes in ([devices.batch], devices.others))
    if query.shape[0] % by_row or key.shape[2] % by_head:
        return f"{query.shape[0]} rows and {key.shape[2]} heads of keys on {by_row} x {by_head} devices"
    return ""


class _Factors(NamedTuple):
    """What a mask is the product of."""

    window: tuple[int | None, int | None]  # the first and last column that a row sees, from its own; None: no limit
    known: Any  # booleans (rows, columns), for one that is no window; None where the window is all
    rows: Any  # booleans (batch or 1, rows); None for all
    columns: Any  # booleans (batch or 1, columns); None for all


def _factors(mask: Any, causal: bool, rows: int, columns: int) -> _Factors | None:
    """The factors of a mask that Splash takes, or None."""
    factors: dict[str, list[Any]] = {"rows": [], "columns": [], "known": []}
    if mask is not None and not _collect(mask, (0, 1, 2, 3), factors):
        return None
    named = (factors["rows"], factors["columns"], factors["known"])
    products: list[Any] = [functools.reduce(operator.and_, several) if several else None for several in named]
    by_row, by_column, known = products
    if by_column is not None:
        by_column = jnp.broadcast_to(by_column, (by_column.shape[0], columns))
    window = (None, None) if known is None else _window(known)
    if causal and window is not None:
        window = (window[0], 0 if window[1] is None else min(window[1], 0))
    if window is not None:
        start, stop = _bounds(window, rows, columns)
        return _Factors(window, None, by_row, by_column) if (start < stop).all() else None
    known = known & np.tri(rows, columns, dtype=bool) if causal else known
    # With keys unseen, too, it could not be told which rows see none.
    return _Factors((None, None), known, by_row, None) if by_column is None and known.any(1).all() else None


def _window(known: Any) -> tuple[int | None, int | None] | None:
    """The window that a mask is; None of another."""
    rows, columns = known.shape
    places, counts = np.arange(rows), known.sum(1)
    if not counts.all():
        return None
    start, stop = known.argmax(1), columns - known[:, ::-1].argmax(1)
    least, most = int((start - places).min()), int((stop - 1 - places).max())
    window = (None if least <= 1 - rows else least, None if most >= columns - 1 else most)
    same = [np.array_equal(*pair) for pair in zip((start, stop), _bounds(window, rows, columns), strict=True)]
    return window if all(same) and np.array_equal(counts, stop - start) else None


def _bounds(window: tuple[int | None, int | None], rows: int, columns: int) -> tuple[Any, Any]:
    """The first column of each row, and its end."""
    places = np.arange(rows)
    start = np.zeros_like(places) if window[0] is None else np.clip(places + window[0], 0, columns)
    stop = np.full_like(places, columns) if window[1] is None else np.clip(places + window[1] + 1, 0, columns)
    return start, stop


def _splash_mask(factors: _Factors, shape: tuple[int, int], heads: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    first, last = factors.window
    mask: masks.Mask
    if factors.known is not None:
        mask = masks.NumpyMask(factors.known)
    elif (first, last) == (None, None):
        mask = masks.FullMask(shape)
    else:
        mask = masks.LocalMask(shape, (None if first is None else -first, last), 0)
    return masks.MultiHeadMask([mask] * heads)


def _sees_some(by_column: Any, window: tuple[int | None, int | None], rows: int, columns: int) -> Any:
    """Which rows see a key, (batch or 1, rows)."""
    before = jnp.pad(jnp.cumsum(by_column.astype(jnp.int32), axis=1), ((0, 0), (1, 0)))
    start, stop = _bounds(window, rows, columns)
    return before[:, stop] > before[:, start]


Axes = tuple[int | None, int | None, int | None, int | None]


def _collect(x: Any, axes: Axes, factors: dict[str, list[Any]]) -> bool:
    """Collects a mask's factors, and whether it has no others.

    A mask in jit has no value, but JAX knows what it was computed from: it is read backwards, as far as products,
    conversions and new axes go, until its factors are of one axis, or depend on nothing.

    Args:
        x: an array of 0 and 1.
        axes: the axes of batch, heads, rows and columns; None for those that it does not vary along.
    """
    batch, heads, row, column = (None if axis is None or x.shape[axis] == 1 else axis for axis in axes)
    if heads is not None:
        return False
    if row is None or column is None:
        name, axis = ("columns", column) if row is None else ("rows", row)
        sizes = [1 if at is None else x.shape[at] for at in (batch, axis)]
        factors[name].append(jnp.reshape(x, sizes).astype(bool))
        return True
    x = x.full_lower() if isinstance(x, jax.core.Tracer) else x  # private, as all that is read of a tracer here
    if not isinstance(x, jax.core.Tracer):
        return _collect_values(np.asarray(x).astype(bool), batch, factors)
    equation = getattr(x, "parent", None)
    if equation is None:
        return False
    inputs, parameters, name = equation.in_tracers, equation.params, equation.primitive.name
    now: Axes = (batch, heads, row, column)
    whole = all(one.dtype == bool or jnp.issubdtype(one.dtype, jnp.integer) for one in inputs)
    nonzero = name == "ne" and (other := _value(inputs[1])) is not None and not np.any(other)
    if nonzero or (name == "convert_element_type" and (whole or x.dtype == bool)):
        return _collect(inputs[0], now, factors)
    # Of 0 and 1, also where KerasHub has masks as integers.
    if (name == "and" and x.dtype == bool) or (name in ("min", "mul") and whole):
        return all([_collect(one, now, factors) for one in inputs])
    if name == "broadcast_in_dim":
        sources = parameters["broadcast_dimensions"]
        inner = [sources.index(axis) if axis in sources else None for axis in now]
        return _collect(inputs[0], (inner[0], inner[1], inner[2], inner[3]), factors)
    if name in ("reshape", "squeeze") and (places := _moved(inputs[0].shape, x.shape)) is not None:
        inner = [None if axis is None else places[axis] for axis in now]
        return _collect(inputs[0], (inner[0], inner[1], inner[2], inner[3]), factors)
    if batch is None:
        value = _value(x)
        if value is not None:
            return _collect_values(np.asarray(value).astype(bool), None, factors)
    return False


def _collect_values(x: Any, batch: int | None, factors: dict[str, list[Any]]) -> bool:
    """Collects factors of a mask with values, without heads."""
    if batch is None:
        factors["known"].append(x.reshape([size for size in x.shape if size > 1]))
        return True
    # Eagerly: only windows, as a kernel would be compiled for each other mask.
    x = x.reshape([size for size in x.shape if size > 1])
    by_row, by_column, known = x.any(2), x.any(1), x.any(0)
    if _window(known) is None or not np.array_equal(x, known & by_row[:, :, None] & by_column[:, None, :]):
        return False
    for name, factor in (("rows", by_row), ("columns", by_column), ("known", known)):
        factors[name].append(factor if name == "known" else jnp.asarray(factor))
    return True


def _moved(before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, int] | None:
    """Axes by those after a reshape that moves no value."""
    old, new = ([axis for axis, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[axis] for axis in old] != [after[axis] for axis in new]:
        return None
    return dict(zip(new, old, strict=True))


def _value(x: Any) -> Any:
    """A traced array's value, if it depends on no argument."""
    x = x.full_lower() if isinstance(x, jax.core.Tracer) else x
    if not isinstance(x, jax.core.Tracer):
        return x
    equation = getattr(x, "parent", None)
    if equation is None or equation.effects:
        return None
    inputs = []
    for one in equation.in_tracers:
        inputs.append(_value(one))
        if inputs[-1] is None:
            return None
    with jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*inputs, **equation.params)
    if not equation.primitive.multiple_results:
        return results
    return next((one for one, var in zip(results, equation.outvars, strict=True) if var is x.val), None)
