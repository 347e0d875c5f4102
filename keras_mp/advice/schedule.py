"""The searches of all chips, side by side: lowered in this thread, compiled in a few processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from keras_mp.advice.asked import Asked, Known, is_doubted
from keras_mp.advice.cheapest import Search
from keras_mp.advice.figures import Figures
from keras_mp.advice.measures import Measures
from keras_mp.advice.place import Place
from keras_mp.backend.common.lowered import LoweringError
from keras_mp.reporting.text import error_line
from keras_mp.xla.compile import CompileError

_Waits = Generator[Future, None, Any]


@dataclass
class Work:
    """What the searches need, and what they did.

    Args:
        search: the search of a chip.
        state: the least that a step takes, from shapes.
        kept: the figures that an earlier call found, or None; the last argument is whether with all blocks.
        compiler: lowers a step, and returns the function that compiles it; the last argument is the same.
        tell: is called with a sentence whenever a compiler starts, and with "" when a chip is done.
        compiled: how many steps were compiled.
        from_files: how many of these an earlier call had compiled.
    """

    search: Callable[[Place], Search]
    state: Callable[[Place, Measures], Figures]
    kept: Callable[[Place, Measures, bool], Figures | None]
    compiler: Callable[[Place, Measures, bool], Callable[[], Figures]]
    tell: Callable[[str], None] = lambda sentence: None
    compiled: int = 0
    from_files: int = 0
    known: dict[tuple[str, int], list[Known]] = field(default_factory=lambda: defaultdict(list))


def run(places: Sequence[Place], work: Work, workers: int) -> list[Asked]:
    """Runs the searches of all chips to their ends.

    Chips of one family are searched one after another, the one with the most memory first, so that each finds what was
    compiled for those before; families side by side, TPUs first, whose compiler takes the longest.

    Args:
        places: the chips.
        work: what they need.
        workers: how many compilers run at once.

    Returns:
        What each search found, in the order of the places.
    """
    asked = [Asked(place) for place in places]
    families: dict[tuple[str, int], list[Asked]] = defaultdict(list)
    for one in sorted(asked, key=lambda one: (one.place.platform != "tpu", -one.place.capacity)):
        families[one.place.family].append(one)
    waiting: dict[Future, _Waits] = {}
    with ThreadPoolExecutor(workers) as pool:
        ready = [_search_all(family, work, pool) for family in families.values()]
        while ready or waiting:
            for waits in ready:
                future = next(waits, None)
                if future is not None:
                    waiting[future] = waits
            done = wait(waiting, return_when=FIRST_COMPLETED).done if waiting else set()
            ready = [waiting.pop(future) for future in done]
    return asked


def _search_all(family: Sequence[Asked], work: Work, pool: ThreadPoolExecutor) -> _Waits:
    """Searches for the chips of a family one after another; yields what it waits for."""
    for one in family:
        search = work.search(one.place)
        try:
            measures = next(search)
            while True:
                figures = yield from _figures(one, measures, work, pool)
                measures = search.send(figures.pressure(one.place.capacity))
        except StopIteration as ended:
            one.best = ended.value
        except (CompileError, LoweringError) as error:
            one.failure = error_line(error)
        work.tell("")


def _figures(one: Asked, measures: Measures, work: Work, pool: ThreadPoolExecutor) -> Generator[Future, None, Figures]:
    """The figures of a step on a chip: from shapes where they suffice, from a chip before, from a file, or compiled."""
    place = one.place
    state = work.state(place, measures)
    if state.peak > place.capacity:
        return state
    family = work.known[place.family]
    for known in family:
        if known.measures == measures and known.holds_for(place):
            one.tried[measures], one.origins[measures] = known.figures, known.place
            return known.figures
    figures = yield from _compiled(one, measures, work, pool, whole=False)
    if is_doubted(figures, place):
        figures = yield from _compiled(one, measures, work, pool, whole=True)
    family.append(Known(place, measures, figures))
    return figures


def _compiled(
    one: Asked, measures: Measures, work: Work, pool: ThreadPoolExecutor, *, whole: bool
) -> Generator[Future, None, Figures]:
    """The figures for the chip itself, from a file or compiled."""
    place = one.place
    figures = work.kept(place, measures, whole)
    if figures is None:
        future = pool.submit(work.compiler(place, measures, whole))
        work.tell(f"{place.title}: {measures.words}{', all blocks' if whole else ''}")
        yield future
        figures = future.result()
    else:
        work.from_files += 1
    work.compiled += 1
    one.tried[measures], one.origins[measures] = figures, place
    return figures
