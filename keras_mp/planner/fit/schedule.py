"""The searches of all chips, side by side: lowered in this thread, compiled in a few processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from keras_mp.backend.common.lowered import CompileError
from keras_mp.planner.chips.place import Place
from keras_mp.planner.fit.cheapest import Search
from keras_mp.planner.fit.figures import pressure
from keras_mp.planner.fit.measures import Measures
from keras_mp.planner.fit.step import Compiled
from keras_mp.planner.read.memory import Memory
from keras_mp.planner.report.compile_report import CompileReport
from keras_mp.reporting.text import error_line

# XLA for GPUs saves memory where a step comes near to what the chip has: only well below this share is the result for
# one chip that for another. It saves a fifth at most; what needs more than this times the room does not fit at all.
UNCONSTRAINED = 0.7
OUT_OF_REACH = 2.0
# A GPU's runtime takes memory that its compiler does not count; a TPU's compiler refuses what leaves it too little.
NEARLY_FULL = 0.9
# Extrapolated figures do not contain what it saves: by them, temporary memory of GPT-2 XL with LoRA on an H100 was 1.27
# times what it is.
DOUBTED = 1.3


@dataclass
class Known:
    """A compiled step of a family: for which of its chips, under which measures.

    Args:
        place: the chip.
        measures: the measures that were compiled.
        memory: the memory that it takes.
        peak: the most memory of what was compiled for it: of a deep model with few blocks.
        whole: whether with all blocks of a deep model.
    """

    place: Place
    measures: Measures
    memory: Memory
    peak: int
    whole: bool

    def holds_for(self, place: Place) -> bool:
        """Whether the result is that of another chip of the family, too, as far as fitting goes."""
        if place.chip.name == self.place.chip.name:
            return True
        if self.peak <= UNCONSTRAINED * min(place.capacity, self.place.capacity):
            return True
        larger = self.place.capacity > place.capacity
        return larger and pressure(self.memory, place.capacity) > OUT_OF_REACH


@dataclass
class Asked:
    """A chip, and what its search has asked for.

    Args:
        place: the chip.
        tried: the report on the step under each set of measures that was compiled.
        origins: the chip that each set was compiled for.
        failure: the reason why the search was given up; "" where it ended by itself.
        best: the set that fits.
        compared: the report on the nearest set in other precisions.
        failures: the reason why there is none, for each precision.
    """

    place: Place
    tried: dict[Measures, CompileReport] = field(default_factory=dict)
    origins: dict[Measures, Place] = field(default_factory=dict)
    failure: str = ""
    best: Measures | None = None
    compared: dict[str, CompileReport] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def nearest(self) -> Measures | None:
        """The set that fits, or the one that needs the least."""
        if self.best is not None or not self.tried:
            return self.best
        return min(self.tried, key=lambda measures: self.tried[measures].memory.peak)


def usable(place: Place) -> int:
    """What a step may take of a chip's memory."""
    return int(NEARLY_FULL * place.capacity) if place.platform == "cuda" else place.capacity


def is_doubted(report: CompileReport, place: Place) -> bool:
    """Whether figures are extrapolated and miss by so little that the step may fit a GPU."""
    extrapolated = place.platform == "cuda" and bool(report.extrapolated)
    return extrapolated and 1 < pressure(report.memory, usable(place)) <= DOUBTED


_Waits = Generator[Future, None, Any]


@dataclass
class Work:
    """What the searches need, and what they did.

    Args:
        search: the search of a chip.
        state: the least that a step takes, from shapes.
        compiler: a function that lowers a step, and returns the function that compiles it; its last arguments are
            whether with all blocks, and for which chip where not for the one itself.
        compared: the same measures in other precisions, by their names.
        tell: a function of a chip's title, words and whether it is done, which is called when the search for a chip
            starts and ends, and whenever a compiler starts.
        compiled: the number of steps that were compiled.
        from_files: the number of these that an earlier call had compiled.
    """

    search: Callable[[Place], Search]
    state: Callable[[Place, Measures], Memory]
    compiler: Callable[[Place, Measures, bool, Place | None], Callable[[], Compiled]]
    compared: Callable[[Measures], dict[str, Measures]] = lambda measures: {}
    tell: Callable[[str, str, bool], None] = lambda title, words, done: None
    compiled: int = 0
    from_files: int = 0
    known: dict[tuple[str, int], list[Known]] = field(default_factory=lambda: defaultdict(list))


def run(places: Sequence[Place], work: Work, workers: int) -> list[Asked]:
    """Runs the searches of all chips to their ends.

    Chips of one family are searched one after another, the one with the most memory first, so that each finds what was
    compiled for those before; families side by side, TPUs first, whose compiler takes the longest.

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
        title, search = one.place.title, work.search(one.place)
        work.tell(title, "looking for what makes it fit", False)
        try:
            measures = next(search)
            while True:
                memory = yield from _asked(one, measures, work, pool)
                measures = search.send(pressure(memory, min(memory.capacity, usable(one.place))))
        except StopIteration as ended:
            one.best = ended.value
            nearest = one.nearest
            if nearest is not None and one.tried[nearest].memory.fits:  # of a GPU nearly all
                one.best = nearest
        except CompileError as error:
            one.failure = error_line(error)
        yield from _compare(one, work, pool)
        verdict = (
            f"fits with {one.best.words}"
            if one.best
            else f"not known: {one.failure}"
            if one.failure
            else "does not fit"
        )
        work.tell(title, verdict, True)


def _compare(one: Asked, work: Work, pool: ThreadPoolExecutor) -> _Waits:
    """Compiles the set of measures that was found in other precisions, where shapes do not say that it is too large."""
    nearest = one.nearest
    for precision, measures in work.compared(nearest).items() if nearest is not None else ():
        others = Asked(one.place, dict(one.tried))
        if measures not in others.tried and work.state(one.place, measures).fits:
            try:
                yield from _compiled(others, measures, work, pool)
            except CompileError as error:
                one.failures[precision] = error_line(error)
        if measures in others.tried:
            one.compared[precision] = others.tried[measures]


def _asked(one: Asked, measures: Measures, work: Work, pool: ThreadPoolExecutor) -> Generator[Future, None, Memory]:
    """What a step takes on a chip: from shapes where they suffice, else compiled."""
    state = work.state(one.place, measures)
    if not state.fits:
        return state
    yield from _compiled(one, measures, work, pool)
    return one.tried[measures].memory


def _compiled(one: Asked, measures: Measures, work: Work, pool: ThreadPoolExecutor) -> _Waits:
    """Compiles a step: for a chip before, for the chip itself, or with all blocks, where few leave a doubt."""
    place = one.place
    family = work.known[place.family]
    forms: tuple[bool, ...] = (False, True)
    for known in family:
        if known.measures == measures and known.holds_for(place):
            origin = None if known.place.chip is place.chip else known.place
            future = pool.submit(work.compiler(place, measures, known.whole, origin))
            yield future
            one.tried[measures], one.origins[measures] = future.result().report, known.place
            if not is_doubted(one.tried[measures], place):
                return
            forms = (True,)
            break
    for whole in forms:
        future = pool.submit(work.compiler(place, measures, whole, None))
        work.tell(place.title, f"compiling {measures.words}{', all blocks' if whole else ''}", False)
        yield future
        report, kept, peak = future.result()
        work.from_files += kept
        work.compiled += 1
        one.tried[measures], one.origins[measures] = report, place
        if not is_doubted(report, place):
            break
    family.append(Known(place, measures, report.memory, peak, whole))
