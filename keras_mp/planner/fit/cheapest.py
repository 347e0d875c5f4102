"""The cheapest set of measures that fits, in few compiles: which one, or what must be known first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from keras_mp.planner.fit.measures import Measures, Stage

# Where the plain step needs more than this times the room, it is first asked whether anything fits at all.
HOPELESS = 4.0


class Unanswered(LookupError):
    """The search needs the answer for a set of measures."""

    def __init__(self, measures: Measures) -> None:
        super().__init__(measures.words)
        self.measures = measures


class Answers(dict[Measures, float]):
    """Temporary memory of sets by its room; 1 just fits."""

    def __missing__(self, measures: Measures) -> float:
        raise Unanswered(measures)


def cheapest(ladders: Iterable[Sequence[Stage]], answers: Answers) -> Measures | None:
    """Finds the first set that fits, ladder after ladder.

    It starts anew with each answer, and comes to the same place: what it needs next depends on the answers alone.

    Args:
        ladders: the ladders of the strategies, the cheapest first.
        answers: the answers that are known so far.

    Returns:
        The set, or None where none fits.

    Raises:
        Unanswered: If an answer is missing; it has the set to ask for.
    """
    return next(filter(None, (climb(ladder, answers) for ladder in ladders)), None)


def beginning_with(first: Measures, ladders: Iterable[Sequence[Stage]]) -> Iterator[Sequence[Stage]]:
    """Yields ladders from the first set on with these measures.

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
            same = [one.micro_batches == first.micro_batches and {*first.names} <= {*one.names} for one in stage]
            starts = [index for index, is_same in enumerate(same) if is_same]
            if starts:
                rest = [stage[starts[0] + 1 :], *ladder[place + 1 :]]
                is_reached = True
                yield [(stage[starts[0]],), *filter(None, rest)]
                break
    if not is_reached:
        raise ValueError(f"{first.words}: these measures are never tried together here")


def climb(ladder: Sequence[Stage], answers: Answers) -> Measures | None:
    """Finds the first set of the stages that fits.

    It takes for granted that memory falls within a stage; that a later stage with as many micro-batches needs no more
    than an earlier one; and that an Nth of the batch needs an Nth of the temporary memory or more. Where a compiler
    makes this untrue, the set that is returned fits, too, and a cheaper one may.

    Args:
        ladder: the stages, as `keras_mp.planner.fit.measures.stages` lists them.
        answers: the answers that are known so far.

    Returns:
        The set, or None where none fits.

    Raises:
        Unanswered: If an answer is missing.
    """
    plain = before = answers[ladder[0][0]]  # `before` is the answer for the whole batch
    if plain <= 1:
        return ladder[0][0]
    if plain > HOPELESS:
        # Accumulated gradients may take more than a smaller batch saves: the two most saving sets.
        alone = [stage[-1] for stage in ladder if stage[-1].micro_batches == 1]
        divided = [stage[-1] for stage in ladder if stage[-1].micro_batches > 1]
        if not any(answers[measures] <= 1 for measures in (*divided[-1:], *alone[-1:])):
            return None
    for stage in ladder[1:]:
        if len(stage) == 1 and stage[0].micro_batches == 1:
            before = answers[stage[0]]
            if before <= 1:
                return stage[0]
        elif measures := _first(stage, before, answers):
            return measures
    return None


def _first(stage: Stage, before: float, answers: Answers) -> Measures | None:
    """The first set of a stage that fits, by bisection; `before` is the answer for the whole batch."""
    stage = tuple(measures for measures in stage if measures.micro_batches >= before)
    if not stage or answers[stage[-1]] > 1:
        return None
    low, high = 0, len(stage) - 1
    while low < high:
        middle = (low + high) // 2
        if answers[stage[middle]] <= 1:
            high = middle
        else:
            low = middle + 1
    return stage[high]
