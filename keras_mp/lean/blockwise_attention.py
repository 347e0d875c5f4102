"""Attention that keeps no scores for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras

from keras_mp import backend
from keras_mp.optimizer.stochastic_rounding import mixed
from keras_mp.stability.accumulate import MASKED_SCORE, product_float32
from keras_mp.system.argument_checks import one_of, whole_number

engine = backend.engine_of(__package__)

# Rows of queries that are attended to at once: at least as many, so that matrix units are kept busy.
BLOCK = 128
# Blocks of one call: more only make the program longer.
BLOCKS = 16
# Contracts two tensors of (batch, key heads, group, rows, ...) over group and rows.
_over_rows = partial(product_float32, "bkgts,bkgtd->bksd")


def attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    block: int | None = None,
    unseen: str = "zero",
    dropout: float = 0.0,
    seed: Any = None,
) -> Any:
    """Attends exactly, without scores that are kept.

    The softmax is in float32, and the backward pass computes the probabilities anew.

        S = scale query . key^T             float32
        P = softmax(S)                      float32
        Q = P kept / (1 - dropout)          rounded to the inputs' dtype for the product
        output = Q . value                  summed in float32

        D = sum(gradient . output)          a number a row
        gradient of value = Q^T . gradient
        gradient of S = P (kept / (1 - dropout) gradient . value^T - D)
        gradient of query = scale (gradient of S) . key
        gradient of key = scale (gradient of S)^T . query

    Queries are taken in blocks, one after the other; a causal block is multiplied with no key behind its last row. Kept
    for the backward pass are the arguments and the output; dropout draws again.

    Args:
        query: floats, shape `(batch, rows, heads, features)`; rows may be unknown, and are then one block.
        key: floats of the same dtype, shape `(batch, columns, key_heads, features)`; `key_heads` divides `heads`, and
            each key head serves `heads / key_heads` queries that stand together.
        value: floats of the same dtype and shape as key.
        mask: booleans, shape `(batch, columns)` or `(batch, rows or 1, columns)`, False for keys that are not seen.
        causal: whether row i sees only the columns 0 to i.
        scale: the factor of the scores; `1 / sqrt(features)` by default.
        block: the number of rows of a block; by default `max(128, rows / 16)`, or all where that is faster. It need not
            divide the rows.
        unseen: the result of a row that sees no key: "zero", or "mean", the mean of all values, as
            `keras.ops.dot_product_attention` has it.
        dropout: the share of the probabilities that is dropped.
        seed: the seed of the dropout, as `keras.random.SeedGenerator.next` returns it. Whether a probability is kept is
            a hash of the seed and of its place, whatever the block; see `keras_mp.lean.blockwise_attention`.

    Returns:
        A tensor of the shape and dtype of query. Where unseen is "zero", so is the gradient of a row that sees no key.

    Raises:
        ValueError: shapes that do not fit, or a block below 1.

    References:
        Rabe, Staats, "Self-attention Does Not Need O(n^2) Memory", 2021 (arXiv:2112.05682); the gradient is equation 4
        of Dao et al., "FlashAttention", 2022 (arXiv:2205.14135). Groups: Ainslie et al. 2023 (arXiv:2305.13245).
    """
    query, key, value = map(backend.as_tensor, (query, key, value))
    mask = None if mask is None else keras.ops.cast(backend.as_tensor(mask), "bool")
    _check(query, key, value, mask, block)
    one_of("unseen", unseen, ("zero", "mean"))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if mask is not None:
        mask = keras.ops.expand_dims(mask, (1, 2) if len(mask.shape) == 2 else 1)
    if not dropout:
        mean = unseen == "mean"
        fused = engine.fused_attention(query, key, value, mask, causal=causal, scale=scale, mean_of_unseen=mean)
        if fused is not None:
            return fused
    if mask is not None and causal and unseen == "mean":
        rows, columns = (keras.ops.arange(keras.ops.shape(x)[1]) for x in (query, key))
        seen = keras.ops.expand_dims(rows, 1) >= keras.ops.expand_dims(columns, 0)
        mask, causal = keras.ops.logical_and(mask, seen), False
    if mask is not None:
        mask = keras.ops.expand_dims(mask, 1)
    blocks = _blocks(query.shape[1], key.shape[1], causal, block)
    dtype = keras.backend.standardize_dtype(query.dtype)
    # With no other block to add, what it sums is rounded next.
    alone = len(blocks) == 1 and None not in (query.shape[1], key.shape[1])
    over_rows = engine.product_over_rows(_over_rows) if alone else _over_rows
    sizes = _Sizes(query.shape[2], key.shape[2], key.shape[1], scale, dtype, unseen == "mean", dropout, over_rows)
    masks = [] if mask is None else [mask]

    # Mask and seed as arguments: JAX cannot recompute a function with a gradient that finds them around it.
    @backend.custom_gradient
    def attend(query: Any, key: Any, value: Any, *others: Any) -> Any:
        mask, seeds = (others[0] if masks else None), list(others[len(masks) :])
        scope = backend.gradient_scope()
        if mask is not None and len(blocks) > 1:
            mask = engine.computed_once(mask)
        operands = [_by_head(query, sizes.key_heads), _swapped(key), _swapped(value)]
        output = _forward(operands, mask, seeds, blocks, sizes)

        def gradient(upstream: Any) -> Any:
            with scope():
                gradients = _backward(operands, output, upstream, mask, seeds, blocks, sizes)
                return (*gradients, *(None for _ in others))

        return output, gradient

    return attend(query, key, value, *masks, *([seed] if dropout else []))


class _Sizes(NamedTuple):
    """Sizes of a call that all blocks share, and settings."""

    heads: int  # number of heads of the queries
    key_heads: int  # number of heads of the keys and values
    columns: int | None  # number of keys; None where it is unknown
    scale: float  # the factor of the scores
    dtype: str  # dtype of query, key and value
    mean_of_unseen: bool  # whether a row that sees no key is the mean of the values, and not 0
    dropout: float  # the share of the probabilities that is dropped
    # a function that contracts two tensors of (batch, key heads, group, rows, ...) over group and rows
    over_rows: Callable[[Any, Any], Any]


class _Rows(NamedTuple):
    """A block of queries."""

    start: int  # the first row of the block, and the row after its last
    stop: int | None
    seen: int | None  # the columns before this one may be seen; None for all, of an unknown number
    first: int  # the same as start where attention is causal; -1 where it is not

    def cut(self, x: Any) -> Any:
        """Cuts (batch, key heads, group, rows, features) to this block."""
        return x[:, :, :, self.start : self.stop]

    def of(self, mask: Any) -> Any:
        """Cuts a mask (batch, 1, 1, rows or 1, columns)."""
        if mask is None:
            return None
        return (mask if mask.shape[3] == 1 else mask[:, :, :, self.start : self.stop])[..., : self.seen]


def _blocks(rows: int | None, columns: int | None, causal: bool, block: int | None) -> list[_Rows]:
    if rows is None or columns is None:
        return [_Rows(0, None, None, 0 if causal else -1)]
    block = block or engine.rows_at_once(rows, max(BLOCK, -(-rows // BLOCKS)), causal=causal)
    blocks = []
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        if causal:
            blocks.append(_Rows(start, stop, seen=min(stop, columns), first=start))
        else:
            blocks.append(_Rows(start, stop, seen=columns, first=-1))
    return blocks


def _forward(operands: list[Any], mask: Any, seeds: list[Any], blocks: list[_Rows], sizes: _Sizes) -> Any:
    """Output, shape `(batch, rows, heads, features)`, from operands by head."""
    q, k, v = operands
    keys = _keys_of_rows(q, seeds)
    outputs: list[Any] = []
    for rows in blocks:
        q_rows, *drawn = _in_turn([q], keys, rows, outputs[-1:], len(blocks))
        scores = product_float32("bkgtd,bksd->bkgts", q_rows, k[:, :, : rows.seen])
        probabilities = _probabilities(scores, rows.of(mask), rows.first, sizes)
        probabilities = _dropped(probabilities, _kept(drawn, scores, sizes), sizes.dropout)
        outputs.append(_times_columns(keras.ops.cast(probabilities, sizes.dtype), v[:, :, : rows.seen]))
    return keras.ops.cast(_by_row(outputs, sizes.heads), sizes.dtype)


def _in_turn(tensors: list[Any], keys: list[Any], rows: _Rows, before: list[Any], count: int) -> list[Any]:
    """Parts of tensors for a block, after the block before.

    Else the compiler may hold the scores of all, and where all have the same columns, it merges their products into
    one. Keys of rows it would compute anew for each score.
    """
    parts = [rows.cut(x) for x in (*tensors, *keys)]
    # The first of several, too: else the compiler may merge its products with those of the others.
    return backend.barrier(parts, before) if keys or count > 1 else parts


def _backward(
    operands: list[Any], output: Any, upstream: Any, mask: Any, seeds: list[Any], blocks: list[_Rows], sizes: _Sizes
) -> list[Any]:
    """The gradients of query, key and value, in their shapes."""
    # Without the barrier the compiler takes the scores and the random numbers of the forward pass, and the parts of
    # keys and values that each block saw, and keeps them until here.
    q, k, v, *seeds = backend.barrier([*operands, *seeds], [upstream])
    keys = _keys_of_rows(q, seeds)
    up = _by_head(upstream, sizes.key_heads)
    means = _by_head(_row_products(upstream, output), sizes.key_heads)
    to_q: list[Any] = []
    sums: list[Any] = []
    for rows in reversed(blocks):  # the longest first, as later rows see more
        q_rows, up_rows, *drawn = _in_turn([q, up], keys, rows, to_q[-1:] + sums, len(blocks))
        to_rows, *shares = _block_gradients(rows, q_rows, k, v, up_rows, rows.cut(means), rows.of(mask), drawn, sizes)
        to_q.append(to_rows)
        if sums:
            pairs = zip(sums, shares, strict=True)
            shares = [total + _longer(share, total.shape[2] - share.shape[2]) for total, share in pairs]
        sums = shares
    to_query, (to_key, to_value) = _by_row(to_q[::-1], sizes.heads), sums
    # A key that no row can see is in no block.
    seen = blocks[-1].seen
    missing = 0 if seen is None or sizes.columns is None else sizes.columns - seen
    to_key, to_value = (_swapped(_longer(x, missing)) for x in (to_key, to_value))
    return [keras.ops.cast(gradient, sizes.dtype) for gradient in (to_query, to_key, to_value)]


def _block_gradients(
    rows: _Rows, q: Any, k: Any, v: Any, upstream: Any, means: Any, mask: Any, drawn: list[Any], sizes: _Sizes
) -> tuple[Any, Any, Any]:
    """Gradients of a block's queries, shares of keys and values."""
    keys, values = k[:, :, : rows.seen], v[:, :, : rows.seen]
    scores = product_float32("bkgtd,bksd->bkgts", q, keys)
    to_probabilities = product_float32("bkgtd,bksd->bkgts", upstream, values)
    probabilities = _probabilities(scores, mask, rows.first, sizes)
    there = _kept(drawn, scores, sizes)
    to_probabilities = _dropped(to_probabilities, there, sizes.dropout)
    to_scores = _to_scores(probabilities, to_probabilities, means, sizes.scale, sizes.dtype)
    if sizes.mean_of_unseen and mask is not None:
        # The same number stands in the place of each score that is not seen.
        to_scores = keras.ops.where(_seen(keras.ops.shape(scores), mask, rows.first), to_scores, 0)
    probabilities = keras.ops.cast(_dropped(probabilities, there, sizes.dropout), sizes.dtype)
    return (
        _times_columns(to_scores, keys),
        sizes.over_rows(to_scores, q),
        sizes.over_rows(probabilities, upstream),
    )


def _times_columns(rows: Any, columns: Any) -> Any:
    """Contracts (batch, key heads, group, rows, columns) with columns."""
    _, key_heads, group, _, _ = rows.shape
    count = keras.ops.shape(rows)[3] * group
    product = keras.ops.matmul(keras.ops.reshape(rows, (-1, key_heads, count, keras.ops.shape(rows)[4])), columns)
    return keras.ops.reshape(product, (-1, key_heads, group, count // group, columns.shape[3]))


def _by_head(x: Any, key_heads: int) -> Any:
    """Reorders to (batch, key heads, group, rows, features)."""
    x = _swapped(x)
    _, heads, _, features = x.shape
    return keras.ops.reshape(x, (-1, key_heads, heads // key_heads, keras.ops.shape(x)[2], features))


def _by_row(blocks: list[Any], heads: int) -> Any:
    """The way back, of all blocks together."""
    x = blocks[0] if len(blocks) == 1 else keras.ops.concatenate(blocks, axis=3)
    return _swapped(keras.ops.reshape(x, (-1, heads, keras.ops.shape(x)[3], x.shape[4])))


def _swapped(x: Any) -> Any:
    """A tensor with rows and heads in each other's place."""
    return keras.ops.transpose(x, (0, 2, 1, 3))


def _longer(x: Any, missing: int) -> Any:
    return keras.ops.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else x


def _seen(shape: Any, mask: Any, first: int) -> Any:
    """Which scores count, broadcast against them; None for all."""
    if first < 0:
        return mask
    causal = first + keras.ops.arange(shape[3])[:, None] >= keras.ops.arange(shape[4])[None, :]
    return causal if mask is None else keras.ops.logical_and(mask, causal)


def _keys_of_rows(q: Any, seeds: list[Any]) -> list[Any]:
    """Keys of dropout by row of scores; none without seed."""
    return [key for seed in seeds for key in keys_of(seed, keras.ops.shape(q)[:4])]


def _kept(drawn: list[Any], scores: Any, sizes: _Sizes) -> Any:
    """Which probabilities are not dropped; None for all."""
    return kept(*drawn, keras.ops.shape(scores)[4], sizes.dropout) if drawn else None


def _dropped(x: Any, there: Any, rate: float) -> Any:
    return x if there is None else keras.ops.where(there, x / (1.0 - rate), 0.0)


def _probabilities(scores: Any, mask: Any, first: int, sizes: _Sizes) -> Any:
    scores = _masked(scores, mask, first, sizes.scale)
    # Keras warns of a softmax over one number; inf and NaN stay what they were.
    probabilities = keras.ops.exp(scores - scores) if scores.shape[-1] == 1 else keras.ops.softmax(scores, axis=-1)
    if mask is None or sizes.mean_of_unseen:
        return probabilities  # a row sees itself, or all that it does not see has one score
    return keras.ops.where(_seen(keras.ops.shape(probabilities), mask, first), probabilities, 0.0)


@engine.fused
def _masked(scores: Any, mask: Any, first: int, scale: float) -> Any:
    seen = _seen(keras.ops.shape(scores), mask, first)
    return scores * scale if seen is None else keras.ops.where(seen, scores * scale, MASKED_SCORE)


@engine.fused
def _to_scores(probabilities: Any, to_probabilities: Any, means: Any, scale: float, dtype: str) -> Any:
    return keras.ops.cast(probabilities * (to_probabilities - means) * scale, dtype)


@engine.fused
def _row_products(left: Any, right: Any) -> Any:
    wide = keras.ops.cast(left, "float32") * keras.ops.cast(right, "float32")
    return keras.ops.sum(wide, axis=-1, keepdims=True)


def _check(query: Any, key: Any, value: Any, mask: Any, block: int | None) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} must have the shape (batch, rows, heads, features), got {tuple(x.shape)}")
    if tuple(key.shape[1:]) != tuple(value.shape[1:]) or key.shape[3] != query.shape[3]:
        raise ValueError(
            "key and value must have one shape, and the features of query, got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"the heads of key must divide those of query, got {key.shape[2]} and {query.shape[2]}")
    if block is not None:
        whole_number("block", block)
    if mask is None:
        return
    batch, rows, columns = query.shape[0], query.shape[1], key.shape[1]
    allowed = [(batch, columns), (batch, 1, columns), (batch, rows, columns)]
    if not any(_fits(tuple(mask.shape), shape) for shape in allowed):
        wanted = f"({batch}, {columns}), ({batch}, 1, {columns}) or ({batch}, {rows}, {columns})"
        raise ValueError(f"mask must have the shape {wanted}, got {tuple(mask.shape)}")


def _fits(shape: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        have is None or want is None or have == want or (axis == 0 and have == 1)
        for axis, (have, want) in enumerate(zip(shape, wanted, strict=True))
    )


# Which entries dropout keeps: a hash of a seed and of the entry's place, which can be drawn again and is never kept.


_GOLDEN = 0x9E3779B1  # 2**32 over the golden ratio, made odd


def keys_of(seed: Any, shape: tuple[Any, ...]) -> list[Any]:
    """Two keys of an array's rows, uint32 of `(*shape, 1)`.

    The shape is without the last axis; on TensorFlow sizes may be int32 tensors.
    """
    low, high = (keras.ops.cast(seed[place], "uint32") for place in range(2))
    first = mixed(mixed(low) ^ high)
    second = mixed(first ^ keras.ops.convert_to_tensor(_GOLDEN, "uint32"))
    rows = backend.places((*shape, 1))
    return [mixed(rows ^ first), mixed(rows ^ second)]


@engine.fused
def kept(first: Any, second: Any, columns: Any, rate: float) -> Any:
    """Draws which entries of rows are kept, by their keys."""
    words = mixed(backend.places((columns,)) + first, second)
    return words >= keras.ops.convert_to_tensor(round(rate * 2**32), "uint32")
