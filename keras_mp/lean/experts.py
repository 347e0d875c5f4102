"""A mixture of experts: the chosen ones alone, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_mp import backend
from keras_mp.rebuild.quantized_banks import QuantizedBank

engine = backend.engine_of(__package__)

# Rows of one product are a multiple of this, for the matrix units of all chips.
MULTIPLE = 16


def chosen_experts(
    x: Any,
    chosen: Any,
    weights: Any,
    banks: Sequence[Any],
    expert: Callable[..., Any],
    trained: Sequence[bool] | None = None,
) -> Any:
    """Sums the weighted outputs of each token's chosen experts.

    The result has the shape and dtype of x.

        y[t] = sum over j of weights[t, j] expert(x[t]) of the bank's chosen[t, j]       added up in float32

        C = ceil(1.25 tokens k / experts)       rows of every expert in one batched product; most steps have no more
        for what is left: a loop over C rows of one expert at a time

    Nothing is computed of other experts: at most 2.25 tokens k rows, and a few to fill up blocks. Kept for the backward
    pass are the arguments alone; there the experts are computed again. Second derivatives and forward mode take all
    tokens of every expert in one product.

    Args:
        x: floats, shape `(tokens, width)`; tokens may be unknown.
        chosen: integers from 0 to experts - 1, shape `(tokens, k)`, no two of a row alike.
        weights: floats, shape `(tokens, k)`; rounded to the dtype of x.
        banks: floats, shapes `(experts, ...)`; rounded to the dtype of x where they are read. Or such as are stored as
            integers: of them an eighth of the experts is dequantized at a time.
        expert: a function `expert(rows, scale, *banks)` of rows `(..., C, width)` and a factor for each, `(..., C, 1)`,
            in the dtype of x, and of each bank the part of one expert, or all with an axis of experts in front of the
            rows. It is linear in the factor, and returns floats of the shape and dtype of rows.
        trained: whether each bank gets a gradient; all by default. No other gradient is computed.

    References:
        Shazeer et al., "Outrageously Large Neural Networks", 2017 (arXiv:1701.06538). Without a capacity that drops
        tokens: Gale et al., "MegaBlocks", 2023 (arXiv:2211.15841).
    """
    experts, dtype = keras.tree.flatten(banks)[0].shape[0], keras.backend.standardize_dtype(x.dtype)
    trained = [True] * len(banks) if trained is None else list(trained)
    # Those that get a gradient stand in front.
    places = sorted(range(len(banks)), key=lambda place: not trained[place])
    moving = 2 + sum(trained)
    structure = keras.tree.map_structure(lambda _: 0, [banks[place] for place in places])

    def of_one(rows: Any, scale: Any, *parts: Any) -> Any:
        read = [
            part.floats(dtype) if isinstance(part, QuantizedBank) else ops.cast(part, dtype)
            for part in keras.tree.pack_sequence_as(structure, list(parts))
        ]
        return expert(rows, scale, *(read[places.index(place)] for place in range(len(read))))

    def pulled(upstream: Any, *values: Any) -> list[Any]:
        fixed = values[moving:]
        return backend.gradients_of(lambda *moved: of_one(*moved, *fixed), values[:moving], upstream)

    of_all, pulled_of_all = of_one, pulled
    if any(isinstance(bank, QuantizedBank) for bank in banks):
        of_all, pulled_of_all = _few_at_once(of_one, experts), _few_at_once(pulled, experts)

    @backend.custom_gradient
    def computed(chosen: Any, *values: Any) -> Any:
        scope = backend.gradient_scope()
        # Through the loops TensorFlow has no forward mode.
        whole = backend.in_forward_mode(values)
        routes = _Routes.of(chosen, experts, whole)

        def gradients_at_once(upstream: Any, *moved: Any) -> list[Any]:
            routes = _Routes.of(chosen, experts, whole=True)
            return backend.gradients_of(
                lambda *moved: routes.sums(of_one, of_one, *moved, *values[moving:]), moved, upstream
            )

        def backward(upstream: Any) -> Any:
            with scope():
                # Without the barrier the compiler keeps what the forward pass computed, and banks that it cast.
                anew = backend.barrier(list(values), [upstream])
                # Gradients of banks as they are read: in float32 they would be twice as large.
                moved, fixed = [*anew[:2], *(ops.cast(bank, dtype) for bank in anew[2:moving])], anew[moving:]
                own = routes.gradients(pulled if whole else pulled_of_all, pulled, upstream, moved, fixed)
                own = [ops.cast(gradient, value.dtype) for gradient, value in zip(own, values, strict=False)]
                own = engine.with_derivatives_of(gradients_at_once, own, [upstream, *values[:moving]])
            return (None, *own, *(None for _ in fixed))

        return routes.sums(of_one if whole else of_all, of_one, *values), backward

    return ops.cast(computed(chosen, x, weights, *keras.tree.flatten([banks[place] for place in places])), dtype)


def _few_at_once(function: Callable[..., Any], experts: int) -> Callable[..., Any]:
    """Calls a function on an eighth of experts at once."""
    few = next(number for number in range(max(experts // 8, 1), 0, -1) if experts % number == 0)

    def of_all(*values: Any) -> Any:
        split = [ops.reshape(value, (experts // few, few, *ops.shape(value)[1:])) for value in values]
        results = ops.map(lambda parts: function(*parts), split)
        return keras.tree.map_structure(lambda x: ops.reshape(x, (experts, *ops.shape(x)[2:])), results)

    return of_all


class _Routes(NamedTuple):
    """Choices of experts, numbered by token, sorted by expert."""

    k: int  # the number of experts that a token chooses
    size: Any  # the rows of an expert in one product; an int, or on TensorFlow a tensor
    order: Any  # the choices, those of an expert side by side, shape `(tokens k,)`
    starts: Any  # the place of the first choice of each expert in that order, shape `(experts,)`
    counts: Any  # the number of choices of each expert
    place: Any  # the row of each choice in the product of all experts, shape `(tokens k,)`
    there: Any  # whether it has one
    ends: Any  # the number of blocks left of the experts up to each, shape `(experts,)`; None where none can be

    @classmethod
    def of(cls, chosen: Any, experts: int, whole: bool) -> _Routes:
        """Sorts choices; whole: an expert has rows for all tokens."""
        tokens, k = chosen.shape[0] or ops.shape(chosen)[0], chosen.shape[1]
        rows = -(-5 * tokens * k // (4 * experts * MULTIPLE)) * MULTIPLE
        smaller = min if isinstance(tokens, int) else ops.minimum
        size = tokens if whole else smaller(rows, tokens)
        flat = ops.cast(ops.reshape(chosen, (-1,)), "int32")
        order = ops.cast(ops.argsort(flat), "int32")
        numbers = ops.arange(experts, dtype="int32")
        starts, stops = (
            ops.cast(ops.searchsorted(ops.take(flat, order), numbers, side=side), "int32") for side in ("left", "right")
        )
        within = ops.cast(ops.argsort(order), "int32") - ops.take(starts, flat)
        ends = None if whole else ops.cumsum(ops.maximum(stops - starts - 1, 0) // ops.maximum(size, 1))
        return cls(k, size, order, starts, stops - starts, flat * size + within, within < size, ends)

    def sums(self, of_all: Callable[..., Any], of_one: Callable[..., Any], x: Any, weights: Any, *banks: Any) -> Any:
        """What the experts make of each token, added up: float32."""
        choices, there = self._rows(self.starts[:, None], self.counts[:, None], 0)
        result = self._gathered(of_all(*self._read(x, weights, choices, there), *banks), self.k)

        def step(number: Any, choices: Any, there: Any, result: Any) -> Any:
            rows = of_one(*self._read(x, weights, choices, there), *(bank[number] for bank in banks))
            return (engine.add_at(result, choices // self.k, rows),)

        return self._over_blocks(step, [result])[0]

    def gradients(
        self, of_all: Callable[..., Any], of_one: Callable[..., Any], upstream: Any, moved: list[Any], fixed: list[Any]
    ) -> list[Any]:
        """Gradients of x, weights and trained banks, in turn."""
        x, weights, *banks = moved
        upstream = ops.cast(upstream, x.dtype)

        def of_rows(function: Callable[..., Any], choices: Any, there: Any, banks: Sequence[Any]) -> Any:
            to_rows = _masked(ops.take(upstream, choices // self.k, axis=0), there)
            return function(to_rows, *self._read(x, weights, choices, there), *banks)

        first = self._rows(self.starts[:, None], self.counts[:, None], 0)
        to_rows, to_scale, *to_banks = of_rows(of_all, *first, [*banks, *fixed])

        def step(number: Any, choices: Any, there: Any, last: Any, to_x: Any, to_weights: Any, *rest: Any) -> Any:
            parts = [bank[number] for bank in (*banks, *fixed)]
            to_rows, to_scale, *to_parts = of_rows(of_one, choices, there, parts)
            before, to_banks = rest[: len(banks)], rest[len(banks) :]
            # Those of an expert's blocks are added up in float32, and rounded once.
            sums = [
                wide(part) + ops.where(number == last, total, wide(to_bank[number]))
                for part, total, to_bank in zip(to_parts, before, to_banks, strict=True)
            ]
            place = ops.reshape(number, (1, 1))
            new = [
                ops.scatter_update(to_bank, place, ops.cast(total, to_bank.dtype)[None])
                for to_bank, total in zip(to_banks, sums, strict=True)
            ]
            to_x = engine.add_at(to_x, choices // self.k, to_rows)
            return (number, to_x, engine.add_at(to_weights, choices, to_scale), *sums, *new)

        zeros = [wide(ops.zeros_like(bank[0])) for bank in banks]
        state = [ops.cast(-1, "int32"), self._gathered(to_rows, self.k), self._gathered(to_scale, 1), *zeros, *to_banks]
        _, to_x, to_weights, *rest = self._over_blocks(step, state)
        return [to_x, ops.reshape(to_weights, ops.shape(weights)), *rest[len(banks) :]]

    def _rows(self, start: Any, count: Any, first: Any) -> tuple[Any, Any]:
        """Choices of a block's rows, and which hold one."""
        places = first + ops.arange(self.size, dtype="int32")
        there = places < count
        return ops.take(self.order, ops.where(there, start + places, 0)), there

    def _read(self, x: Any, weights: Any, choices: Any, there: Any) -> list[Any]:
        """Rows of a block and their factors; else 0."""
        scale = ops.cast(ops.reshape(weights, (-1, 1)), x.dtype)
        taken = ops.take(x, choices // self.k, axis=0), ops.take(scale, choices, axis=0)
        return [_masked(rows, there) for rows in taken]

    def _gathered(self, rows: Any, per: int) -> Any:
        """Rows in the order of choices, each `per` summed: float32."""
        taken = ops.take(ops.reshape(rows, (-1, rows.shape[-1])), ops.where(self.there, self.place, 0), axis=0)
        return ops.sum(ops.reshape(wide(_masked(taken, self.there)), (-1, per, rows.shape[-1])), axis=1)

    def _over_blocks(self, step: Callable[..., Any], state: Sequence[Any]) -> list[Any]:
        """Calls `step(expert, choices, there, *state)` for what is left."""
        if self.ends is None:
            return list(state)

        def body(block: Any, *state: Any) -> Any:
            number = ops.sum(ops.cast(self.ends <= block, "int32"))
            before = ops.where(number > 0, ops.take(self.ends, ops.maximum(number - 1, 0)), 0)
            first = self.size * (1 + block - before)
            choices, there = self._rows(ops.take(self.starts, number), ops.take(self.counts, number), first)
            return (block + 1, *step(number, choices, there, *state))

        start = (ops.zeros((), "int32"), *state)
        # Fewer blocks are left than there are experts; XLA differentiates TensorFlow's loop again only with a limit.
        limit = self.ends.shape[0]
        return list(ops.while_loop(lambda block, *_: block < self.ends[-1], body, start, maximum_iterations=limit)[1:])


def _masked(rows: Any, there: Any) -> Any:
    return ops.where(there[..., None], rows, ops.zeros((), rows.dtype))


def wide(x: Any) -> Any:
    """Casts to float32, in which sums are; float64 stays."""
    return x if keras.backend.standardize_dtype(x.dtype) == "float64" else ops.cast(x, "float32")
