"""The searches of all chips, one loop over a heap of questions: lowered in this thread, compiled in a few processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from keras_mp.lowering import CompileError
from keras_mp.planner.chips.place import Place
from keras_mp.planner.fit.cheapest import Answers, Unanswered, beginning_with, cheapest
from keras_mp.planner.fit.figures import pressure
from keras_mp.planner.fit.measures import Measures, Stage
from keras_mp.planner.fit.step import Compiled, Question, Step
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


def holds_for(question: Question, answer: Compiled, place: Place) -> bool:
    """Whether an answer holds for another chip of its family."""
    asked = question.place
    if place.chip.name == asked.chip.name:
        return True
    if answer.peak <= UNCONSTRAINED * min(place.capacity, asked.capacity):
        return True
    return asked.capacity > place.capacity and pressure(answer.report.memory, place.capacity) > OUT_OF_REACH


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
        answers: the knowledge of the search, from shapes or from compiles.
    """

    place: Place
    tried: dict[Measures, CompileReport] = field(default_factory=dict)
    origins: dict[Measures, Place] = field(default_factory=dict)
    failure: str = ""
    best: Measures | None = None
    compared: dict[str, CompileReport] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)

    @property
    def nearest(self) -> Measures | None:
        """The set that fits, or the one that needs the least."""
        if self.best is not None or not self.tried:
            return self.best
        return min(self.tried, key=lambda measures: self.tried[measures].memory.peak)

    @property
    def verdict(self) -> str:
        """What the search has come to, in words."""
        if self.best:
            return f"fits with {self.best.words}"
        return f"not known: {self.failure}" if self.failure else "does not fit"

    def learn(self, measures: Measures, memory: Memory) -> None:
        """Notes the answer for a set."""
        self.answers[measures] = pressure(memory, min(memory.capacity, usable(self.place)))


def usable(place: Place) -> int:
    """What a step may take of a chip's memory."""
    return int(NEARLY_FULL * place.capacity) if place.platform == "cuda" else place.capacity


class Schedule:
    """Questions about a step for several chips, and their answers.

    Args:
        step: the step that is asked about.
        precisions: the names of precisions in which the set that was found is compiled, too.
        tell: a function of a chip's title, words and whether it is done, which is called when the search for a chip
            starts and ends, and whenever a compiler starts.
        first: the measures that the search for a chip begins with, by the chip's name.

    Attributes:
        compiled: the number of steps that were compiled.
        from_files: the number of these that an earlier call had compiled.
    """

    def __init__(
        self,
        step: Step,
        precisions: Sequence[str] = (),
        tell: Callable[[str, str, bool], None] = lambda title, words, done: None,
        first: Mapping[str, Measures] | None = None,
    ) -> None:
        self._step, self._precisions, self._tell, self._first = step, precisions, tell, first or {}
        self.compiled = self.from_files = 0
        self._known: dict[tuple[str, int], list[tuple[Question, Compiled]]] = defaultdict(list)

    def run(self, places: Sequence[Place], workers: int) -> list[Asked]:
        """Asks about all chips to the end.

        Chips of one family are asked about one after another, the one with the most memory first, so that each finds
        what was compiled for those before; families side by side, TPUs first, whose compiler takes the longest.

        Returns:
            What was found for each, in the order of the places.
        """
        asked = [Asked(place) for place in places]
        families: dict[tuple[str, int], list[Asked]] = defaultdict(list)
        for one in sorted(asked, key=lambda one: (one.place.platform != "tpu", -one.place.capacity)):
            families[one.place.family].append(one)
        order = list(families.values())
        heap: list[tuple[int, Question]] = []  # of each family one at a time
        running: dict[Future[Compiled], tuple[int, Question]] = {}
        idle = list(range(len(order)))
        with ThreadPoolExecutor(workers) as pool:
            while idle or heap or running:
                for number in idle:
                    if question := self._next(order[number]):
                        heappush(heap, (number, question))
                idle = []
                while heap and len(running) <= workers:  # one is lowered ahead
                    number, question = heappop(heap)
                    try:
                        lowered = self._step.lower(question)
                    except CompileError as error:
                        _fail(order[number][0], question, error)
                        idle.append(number)
                        break
                    running[pool.submit(self._step.compile, question, lowered)] = number, question
                    if not question.is_known:
                        self._tell(question.place.title, f"compiling {question.words}", False)
                for future in wait(running, return_when=FIRST_COMPLETED).done if running and not idle else ():
                    number, question = running.pop(future)
                    if again := self._learn(order[number][0], question, future):
                        heappush(heap, (number, again))
                    else:
                        idle.append(number)
        return asked

    def _next(self, family: list[Asked]) -> Question | None:
        """The next question about a family's first chip that has one; the chips that have none leave the family."""
        while family:
            one = family[0]
            if not one.answers and not one.failure:
                self._tell(one.place.title, "looking for what makes it fit", False)
            question = self._searched(one) or self._compared(one)
            if question is not None:
                return self._known_already(question)
            self._tell(one.place.title, one.verdict, True)
            family.pop(0)
        return None

    def _searched(self, one: Asked) -> Question | None:
        """What the search for the cheapest set asks next; None where it has ended. Shapes answer where they suffice."""
        while one.best is None and not one.failure:
            ladders: Iterable[Sequence[Stage]] = self._step.ladders(one.place)
            if one.place.name in self._first:
                ladders = beginning_with(self._first[one.place.name], ladders)
            try:
                one.best = cheapest(ladders, one.answers)
            except Unanswered as unanswered:
                state = self._step.state(one.place, unanswered.measures)
                if state.fits:
                    return Question(one.place, unanswered.measures)
                one.learn(unanswered.measures, state)
                continue
            nearest = one.nearest
            if nearest is not None and one.tried[nearest].memory.fits:  # of a GPU nearly all
                one.best = nearest
            break
        return None

    def _compared(self, one: Asked) -> Question | None:
        """The set that was found in another precision, where shapes do not say that it is too large."""
        nearest = one.nearest
        if nearest is None:
            return None
        for precision in self._precisions:
            measures = self._step.in_precision(nearest, precision)
            if measures in one.tried:
                one.compared[precision] = one.tried[measures]
            elif precision not in {**one.compared, **one.failures} and self._step.state(one.place, measures).fits:
                return Question(one.place, measures, precision=precision)
        return None

    def _known_already(self, question: Question) -> Question:
        """The same question, of what was compiled before for a chip of the family, where that holds for this one."""
        for known, answer in self._known[question.place.family]:
            if known.measures == question.measures and holds_for(known, answer, question.place):
                origin = None if known.place.chip is question.place.chip else known.place
                return replace(question, whole=known.whole, is_known=True, origin=origin)
        return question

    def _learn(self, one: Asked, question: Question, answer: Future[Compiled]) -> Question | None:
        """Takes an answer; returns the question that follows at once: all blocks, where few leave a doubt."""
        try:
            compiled = answer.result()
        except CompileError as error:
            _fail(one, question, error)
            return None
        place, measures, report = question.place, question.measures, compiled.report
        if not question.is_known:
            self.compiled, self.from_files = self.compiled + 1, self.from_files + compiled.kept
        if question.precision:
            one.compared[question.precision] = report
        else:
            one.tried[measures], one.origins[measures] = report, question.origin or place
        if place.platform == "cuda" and report.extrapolated and 1 < pressure(report.memory, usable(place)) <= DOUBTED:
            return Question(place, measures, whole=True, precision=question.precision)
        if not question.is_known:
            self._known[place.family].append((question, compiled))
        if not question.precision:
            one.learn(measures, report.memory)
        return None


def _fail(one: Asked, question: Question, error: CompileError) -> None:
    if question.precision:
        one.failures[question.precision] = error_line(error)
    else:
        one.failure = error_line(error)
