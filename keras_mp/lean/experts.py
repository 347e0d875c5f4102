"""A mixture of experts of which the chosen ones alone are computed: exact for every choice, and no token is dropped."""

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

    Returns:
        A tensor of the shape and dtype of x.

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

    is_quantized = any(isinstance(bank, QuantizedBank) for bank in banks)
    of_all = _few_at_once(of_one, experts, moving) if is_quantized else of_one

    @backend.custom_gradient
    def computed(chosen: Any, *values: Any) -> Any:
        scope = backend.gradient_scope()
        # Through the loop TensorFlow has no forward mode.
        whole = backend.in_forward_mode(values)
        routes = _Routes.of(chosen, experts, whole)

        def gradients_at_once(upstream: Any, *moved: Any) -> list[Any]:
            routes = _Routes.of(chosen, experts, whole=True)
            return backend.gradients_of(
                lambda *moved: routes.at_once(of_one, *moved, *values[moving:]), moved, upstream
            )

        def backward(upstream: Any) -> Any:
            with scope():
                # Without the barrier the compiler keeps what the forward pass computed, and banks that it cast.
                anew = backend.barrier(list(values), [upstream])
                # Gradients of banks as they are read: in float32 they would be twice as large.
                moved, fixed = [*anew[:2], *(ops.cast(bank, dtype) for bank in anew[2:moving])], anew[moving:]
                of_first = of_one if whole else of_all
                own = backend.gradients_of(lambda *moved: routes.at_once(of_first, *moved, *fixed), moved, upstream)
                own = own if whole else routes.gradients_left(of_one, upstream, moved, fixed, own)
                own = [ops.cast(gradient, value.dtype) for gradient, value in zip(own, values, strict=False)]
                own = engine.with_derivatives_of(gradients_at_once, own, [upstream, *values[:moving]])
            return (None, *own, *(None for _ in fixed))

        result = routes.at_once(of_one if whole else of_all, *values)
        return (result if whole else routes.added_left(of_one, result, *values)), backward

    return ops.cast(computed(chosen, x, weights, *keras.tree.flatten([banks[place] for place in places])), dtype)


def _few_at_once(expert: Callable[..., Any], experts: int, moving: int) -> Callable[..., Any]:
    """The same function of the rows and banks of all experts, of which it is given a few at a time.

    Args:
        moving: the number of its arguments that have a gradient.
    """
    few = next(number for number in range(max(experts // 8, 1), 0, -1) if experts % number == 0)

    def mapped(function: Callable[..., Any], values: Sequence[Any]) -> Any:
        split = [ops.reshape(value, (experts // few, few, *ops.shape(value)[1:])) for value in values]
        results = ops.map(lambda parts: function(*parts), split)
        return keras.tree.map_structure(lambda x: ops.reshape(x, (experts, *ops.shape(x)[2:])), results)

    @backend.custom_gradient
    def of_all(*values: Any) -> Any:
        def backward(upstream: Any) -> Any:
            def gradients(upstream: Any, *parts: Any) -> list[Any]:
                fixed = parts[moving:]
                return backend.gradients_of(lambda *moved: expert(*moved, *fixed), parts[:moving], upstream)

            return (*mapped(gradients, [upstream, *values]), *(None for _ in values[moving:]))

        return mapped(expert, values), backward

    return of_all


class _Routes(NamedTuple):
    """Which tokens each expert takes: the choices, numbered token by token, sorted by expert.

    Attributes:
        k: the number of experts that a token chooses.
        size: the rows of an expert in one product; an int, or on TensorFlow a tensor.
        order: the choices, those of an expert side by side, shape `(tokens k,)`.
        starts: the place of the first choice of each expert in that order, shape `(experts,)`.
        counts: the number of choices of each expert.
        place: the row of each choice in the product of all experts, shape `(tokens k,)`.
        there: whether it has one.
        ends: the number of blocks that are left of the experts up to each, shape `(experts,)`.
    """

    k: int
    size: Any
    order: Any
    starts: Any
    counts: Any
    place: Any
    there: Any
    ends: Any

    @classmethod
    def of(cls, chosen: Any, experts: int, whole: bool) -> _Routes:
        """Sorts choices.

        Args:
            whole: whether the rows of an expert are all tokens, so that nothing is left.
        """
        tokens, k = chosen.shape[0] or ops.shape(chosen)[0], chosen.shape[1]
        rows = -(-5 * tokens * k // (4 * experts * MULTIPLE)) * MULTIPLE
        smaller = min if isinstance(tokens, int) else ops.minimum
        size = tokens if whole else smaller(rows, tokens)
        flat = ops.cast(ops.reshape(chosen, (-1,)), "int32")
        order = ops.cast(ops.argsort(flat), "int32")
        experts_in_order = ops.take(flat, order)
        ends = ops.searchsorted(experts_in_order, ops.arange(experts, dtype="int32"), side="right")
        ends = ops.cast(ends, "int32")
        starts = ops.concatenate([ops.zeros((1,), "int32"), ends[:-1]])
        within = ops.cast(ops.argsort(order), "int32") - ops.take(starts, flat)
        left = ops.maximum(ends - starts - 1, 0) // size
        return cls(k, size, order, starts, ends - starts, flat * size + within, within < size, ops.cumsum(left))

    def rows(self, start: Any, count: Any, first: Any) -> tuple[Any, Any]:
        """The choices of a block of an expert's rows, and which of the block's rows hold one."""
        places = first + ops.arange(self.size, dtype="int32")
        there = places < count
        return ops.take(self.order, ops.where(there, start + places, 0)), there

    def at_once(self, expert: Callable[..., Any], x: Any, weights: Any, *banks: Any) -> Any:
        """The first rows of all experts in one product, added up for each token: float32."""
        choices, there = self.rows(self.starts[:, None], self.counts[:, None], 0)
        table = (choices, there, self.place, self.there)
        scale = _spread(ops.cast(ops.reshape(weights, (-1, 1)), x.dtype), 1, *table)
        return _gathered(expert(_spread(x, self.k, *table), scale, *banks), self.k, *table)

    def over_blocks(self, step: Callable[..., Any], state: Sequence[Any]) -> list[Any]:
        """Calls `step(expert, choices, there, *state) -> state` for each block that is left."""

        def body(block: Any, *state: Any) -> Any:
            number = ops.sum(ops.cast(self.ends <= block, "int32"))
            before = ops.where(number > 0, ops.take(self.ends, ops.maximum(number - 1, 0)), 0)
            first = self.size * (1 + block - before)
            choices, there = self.rows(ops.take(self.starts, number), ops.take(self.counts, number), first)
            return (block + 1, *step(number, choices, there, *state))

        start = (ops.zeros((), "int32"), *state)
        # Fewer blocks are left than there are experts; XLA differentiates TensorFlow's loop again only with a limit.
        limit = self.ends.shape[0]
        return list(ops.while_loop(lambda block, *_: block < self.ends[-1], body, start, maximum_iterations=limit)[1:])

    def block(self, x: Any, weights: Any, banks: Sequence[Any], number: Any, choices: Any, there: Any) -> list[Any]:
        """The rows of a block, their factors, and the banks of its expert."""
        rows = _masked(ops.take(x, choices // self.k, axis=0), there)
        scale = _masked(ops.take(ops.cast(ops.reshape(weights, (-1, 1)), x.dtype), choices, axis=0), there)
        return [rows, scale, *(bank[number] for bank in banks)]

    def added_left(self, expert: Callable[..., Any], result: Any, x: Any, weights: Any, *banks: Any) -> Any:
        """The result with what is left added to it."""

        def step(number: Any, choices: Any, there: Any, result: Any) -> Any:
            rows = expert(*self.block(x, weights, banks, number, choices, there))
            return (engine.add_at(result, choices // self.k, rows),)

        return self.over_blocks(step, [result])[0]

    def gradients_left(
        self, expert: Callable[..., Any], upstream: Any, moved: list[Any], fixed: list[Any], own: list[Any]
    ) -> list[Any]:
        """Gradients of x, weights and trained banks with those of what is left added to them."""
        x, weights, *banks = moved

        def step(number: Any, choices: Any, there: Any, last: Any, to_x: Any, to_weights: Any, *to_banks: Any) -> Any:
            block = self.block(x, weights, [*banks, *fixed], number, choices, there)
            to_rows = ops.cast(ops.take(upstream, choices // self.k, axis=0), x.dtype)
            rest = block[len(moved) :]
            of_rows = backend.gradients_of(lambda *block: expert(*block, *rest), block[: len(moved)], to_rows)
            to_rows, to_scale, *to_parts = of_rows
            before, to_banks = to_banks[: len(banks)], to_banks[len(banks) :]
            # Those of an expert's blocks are added up in float32, and rounded once.
            sums = [
                wide(part) + ops.where(number == last, total, wide(to_bank[number]))
                for part, total, to_bank in zip(to_parts, before, to_banks, strict=True)
            ]
            place = ops.reshape(number, (1, 1))
            return (
                number,
                engine.add_at(to_x, choices // self.k, _masked(to_rows, there)),
                engine.add_at(to_weights, choices, _masked(to_scale, there)),
                *sums,
                *(
                    ops.scatter_update(to_bank, place, ops.cast(total, to_bank.dtype)[None])
                    for to_bank, total in zip(to_banks, sums, strict=True)
                ),
            )

        to_x, to_weights, *to_banks = own
        sums = [wide(ops.zeros_like(bank[0])) for bank in banks]
        state = [ops.cast(-1, "int32"), wide(to_x), ops.reshape(to_weights, (-1, 1)), *sums, *to_banks]
        _, to_x, to_weights, *of_banks = self.over_blocks(step, state)
        return [to_x, ops.reshape(to_weights, ops.shape(weights)), *of_banks[len(banks) :]]


def _spread(x: Any, per: int, *table: Any) -> Any:
    """Rows of all experts, `(experts, C, features)`, from `(choices / per, features)`; 0 where there is none."""

    # The table as arguments: JAX cannot recompute a function with a gradient that finds them around it.
    @backend.custom_gradient
    def spread(x: Any, *table: Any) -> Any:
        choices, there, _, _ = table
        rows = _masked(ops.take(x, choices // per, axis=0), there)
        return rows, lambda upstream: (ops.cast(_gathered(upstream, per, *table), x.dtype), *(None for _ in table))

    return spread(x, *table)


def _gathered(rows: Any, per: int, *table: Any) -> Any:
    """The transpose: float32 `(choices / per, features)` from rows of all experts, those of a token added up."""

    @backend.custom_gradient
    def gathered(rows: Any, *table: Any) -> Any:
        _, _, place, there = table
        taken = ops.take(ops.reshape(rows, (-1, rows.shape[-1])), ops.where(there, place, 0), axis=0)
        taken = ops.reshape(wide(_masked(taken, there)), (-1, per, rows.shape[-1]))
        dtype = rows.dtype
        return ops.sum(taken, axis=1), lambda upstream: (
            _spread(ops.cast(upstream, dtype), per, *table),
            *(None for _ in table),
        )

    return gathered(rows, *table)


def _masked(rows: Any, there: Any) -> Any:
    return ops.where(there[..., None], rows, ops.zeros((), rows.dtype))


def wide(x: Any) -> Any:
    """Casts a tensor to float32, in which sums are computed; one in float64 stays."""
    return x if keras.backend.standardize_dtype(x.dtype) == "float64" else ops.cast(x, "float32")
