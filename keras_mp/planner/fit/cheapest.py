"""The cheapest set of measures that fits, in few compiles."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from keras_mp.planner.fit.measures import Measures, Stage

# Yields a set of measures; the answer is the step's temporary memory by the room for it beside the state: it fits at 1
# or below. Returns the set that was looked for, or None.
Search = Generator[Measures, float, Measures | None]
_Asked = Generator[Measures, float, float]
_Ask = Callable[[Measures], _Asked]

# Where the plain step needs more than this times the room, it is first asked whether anything fits at all.
HOPELESS = 4.0


def search(ladders: Iterable[Sequence[Stage]]) -> Search:
    """Looks for the first set that fits in one ladder after another, and asks for as few as it can.

    Args:
        ladders: the ladders of the strategies, the cheapest first.
    """
    for ladder in ladders:
        measures = yield from climb(ladder)
        if measures is not None:
            return measures
    return None


def beginning_with(first: Measures, ladders: Iterable[Sequence[Stage]]) -> Iterator[Sequence[Stage]]:
    """Yields ladders from the first set on that has these measures, of all that it has, and as many micro-batches.

    Of later ladders, sets that lack one of these measures are passed over, where the ladder has it at all.

    Raises:
        ValueError: If none has.
    """
    is_reached = False
    for ladder in ladders:
        if is_reached:
            needed = set(first.names) & set(ladder[-1][-1].names)
            later = (tuple(one for one in stage if needed <= set(one.names)) for stage in ladder)
            yield [stage for stage in later if stage]
            continue
        for place, stage in enumerate(ladder):
            starts = [index for index, one in enumerate(stage) if one.is_from(first)]
            if starts:
                rest = [stage[starts[0] + 1 :], *ladder[place + 1 :]]
                is_reached = True
                yield [(stage[starts[0]],), *filter(None, rest)]
                break
    if not is_reached:
        raise ValueError(f"{first.words}: no set of measures that is tried here has all of these")


def climb(ladder: Sequence[Stage]) -> Search:
    """Looks for the first set of the stages that fits.

    It takes for granted that memory falls within a stage; that a later stage with as many micro-batches needs no more
    than an earlier one; and that an Nth of the batch needs an Nth of the temporary memory or more. Where a compiler
    makes this untrue, the set that is returned fits, too, and a cheaper one may.

    Args:
        ladder: the stages, as `keras_mp.planner.fit.measures.stages` lists them.

    Yields:
        A set to compile.

    Returns:
        The set, or None where none fits.
    """
    known: dict[Measures, float] = {}

    def ask(measures: Measures) -> _Asked:
        if measures not in known:
            known[measures] = yield measures
        return known[measures]

    plain = yield from ask(ladder[0][0])
    if plain <= 1:
        return ladder[0][0]
    if plain > HOPELESS and not (yield from _any_fits(ladder, ask)):
        return None
    before = plain  # of one micro-batch
    for stage in ladder[1:]:
        if len(stage) == 1 and stage[0].micro_batches == 1:
            before = yield from ask(stage[0])
            if before <= 1:
                return stage[0]
        else:
            measures = yield from _first(stage, before, ask)
            if measures is not None:
                return measures
    return None


def _any_fits(ladder: Sequence[Stage], ask: _Ask) -> Generator[Measures, float, bool]:
    """Whether one of the two most saving sets fits: accumulated gradients may take more than a smaller batch saves."""
    alone = [stage[-1] for stage in ladder if stage[-1].micro_batches == 1]
    divided = [stage[-1] for stage in ladder if stage[-1].micro_batches > 1]
    for measures in (*divided[-1:], *alone[-1:]):
        if (yield from ask(measures)) <= 1:
            return True
    return False


def _first(stage: Stage, before: float, ask: _Ask) -> Search:
    """The first set of a stage that fits, by bisection; `before` is the answer for the whole batch."""
    stage = tuple(measures for measures in stage if measures.micro_batches >= before)
    if not stage or (yield from ask(stage[-1])) > 1:
        return None
    low, high = 0, len(stage) - 1
    while low < high:
        middle = (low + high) // 2
        if (yield from ask(stage[middle])) <= 1:
            high = middle
        else:
            low = middle + 1
    return stage[high]
