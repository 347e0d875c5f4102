"""The searches of several chips: what they share, and what is compiled, with a compiler that answers from a table."""

import pytest

from keras_mp.planner.chips.place import find_place
from keras_mp.planner.compile.compiler import CompileError
from keras_mp.planner.fit.cheapest import beginning_with
from keras_mp.planner.fit.measures import Measures, stages
from keras_mp.planner.fit.schedule import Schedule
from keras_mp.planner.fit.step import Compiled
from tests.planner.fit.made_reports import memory, report

GIB = 2**30


class Compiler:
    """A step whose figures are a table: it needs so many GiB besides 1 GiB of state, divided by its micro-batches.

    Of a deep model `all_blocks` are what it needs compiled whole, and the others are extrapolated.
    """

    def __init__(self, temporary, kept=(), fails=(), all_blocks=None):
        self.temporary, self.fails, self.compiled, self.told = temporary, fails, [], []
        self.files, self.all_blocks = set(kept), all_blocks

    def figures(self, place, measures, whole):
        temporary = int((self.all_blocks if whole else self.temporary) / measures.micro_batches * GIB)
        how = "4 and 8 of 48 blocks" if self.all_blocks and not whole else ""
        kept = (place.name, measures.words) in self.files
        made = report(GIB, temporary=temporary, capacity=place.capacity, extrapolated=how)
        return Compiled(made, kept, made.memory.peak // 4 if how else made.memory.peak)

    def ladders(self, place):
        return [stages(Measures("float32"), self.rows, lambda taken, one: self.lean and one.name == "lean")]

    def state(self, place, measures):
        return memory(GIB)

    def in_precision(self, measures, precision):
        return Measures(precision)

    def lower(self, question):
        return []

    def compile(self, question, lowered):
        if question.is_known:
            return self.figures(question.place, question.measures, question.whole)
        if question.place.name + ", all blocks" * question.whole in self.fails:
            raise CompileError("it crashed")
        figures = self.figures(question.place, question.measures, question.whole)
        if not figures.kept:
            self.compiled.append((question.place.name, question.words))
        return figures

    def run(self, *names, rows=8, lean=False, compared=()):
        self.rows, self.lean = rows, lean
        schedule = Schedule(self, compared, lambda *told: self.told.append(told))
        return {asked.place.name: asked for asked in schedule.run([find_place(name) for name in names], 2)}, schedule


def test_gpus_of_one_compute_capability_share_a_compile_where_memory_is_no_limit():
    compiler = Compiler(20.0)
    asked, work = compiler.run("h100", "h200")
    assert compiler.compiled == [("h200", "float32")] and work.compiled == 1
    assert {name: one.best.words for name, one in asked.items()} == {"h100": "float32", "h200": "float32"}
    assert asked["h100"].origins[asked["h100"].best].name == "h200"
    h100, h200 = (asked[name].place.title for name in ("h100", "h200"))
    looking = "looking for what makes it fit"
    assert compiler.told == [
        *((h200, looking, False), (h200, "compiling float32", False), (h200, "fits with float32", True)),
        *((h100, looking, False), (h100, "fits with float32", True)),
    ]


def test_what_has_few_blocks_is_far_from_any_memory():
    compiler = Compiler(70.0, all_blocks=60.0)
    asked, _ = compiler.run("h100", "h200", rows=1)
    assert compiler.compiled == [("h200", "float32")] and asked["h100"].best.words == "float32"
    compiler = Compiler(80.0, all_blocks=60.0)
    asked, _ = compiler.run("h100", "h200", rows=1)
    assert compiler.compiled == [("h200", "float32"), ("h100", "float32, all blocks")]
    assert asked["h100"].best.words == "float32"


def test_a_step_near_to_the_memory_is_compiled_for_the_chip_itself():
    compiler = Compiler(75.0)
    asked, _ = compiler.run("h100", "h200", rows=1)
    assert compiler.compiled == [("h200", "float32"), ("h100", "float32")]
    assert asked["h100"].best.words == "float32"


def test_a_tenth_of_a_gpu_is_left_to_its_runtime_where_a_set_leaves_it():
    """Of a TPU's memory the compiler itself keeps what a program may not use."""
    asked, _ = Compiler(75.0).run("h100", rows=8)
    assert asked["h100"].best.micro_batches == 2
    asked, _ = Compiler(70.0).run("h100", rows=8)
    assert asked["h100"].best.micro_batches == 1
    asked, _ = Compiler(14.9).run("v5e", rows=8)
    assert asked["v5e"].best.micro_batches == 1


def test_what_fills_a_gpu_and_is_extrapolated_is_compiled_whole():
    compiler = Compiler(75.0, all_blocks=60.0)
    asked, _ = compiler.run("h100", rows=8)
    assert compiler.compiled == [("h100", "float32"), ("h100", "float32, all blocks")]
    assert asked["h100"].best.micro_batches == 1


def test_a_search_begins_with_the_set_that_is_named():
    first = Measures("float32", ("lean",), micro_batches=4)
    ladder = stages(Measures("float32"), 8, lambda taken, one: one.name in ("lean", "remat"))
    listed, later = beginning_with(first, [[(Measures("float32"),)], ladder, ladder])
    assert listed[0] == (first,)
    frozen = stages(Measures("float32"), 8, lambda taken, one: one.name in ("frozen in 16 bits", "lean", "remat"))
    (listed_too,) = beginning_with(first, [frozen])
    assert listed_too[0][0].names == ("frozen in 16 bits", "lean") and len(listed_too) == len(listed)
    assert [one.words for stage in listed[1:] for one in stage] == [
        "float32, lean, 8 micro-batches",
        "float32, lean, remat",
        *(f"float32, lean, remat, {number} micro-batches" for number in (2, 4, 8)),
    ]
    assert later == ladder[1:]
    with pytest.raises(ValueError, match="float32, lean, 3 micro-batches: these measures are never tried together"):
        list(beginning_with(Measures("float32", ("lean",), micro_batches=3), [ladder]))


def test_what_is_far_out_of_reach_is_not_compiled_again():
    compiler = Compiler(200.0)
    asked, _ = compiler.run("h100", "h200")
    assert ("h100", "float32") not in compiler.compiled
    assert asked["h200"].best.micro_batches == 2 and asked["h100"].best.micro_batches == 4


def test_chips_of_other_families_do_not_share():
    compiler = Compiler(4.0)
    compiler.run("h100", "t4", "v5e", "a100")
    assert sorted(name for name, _ in compiler.compiled) == ["a100", "h100", "t4", "v5e"]


def test_a_kept_result_is_counted():
    compiler = Compiler(4.0, kept=[("h100", "float32")])
    asked, work = compiler.run("h100", "t4")
    assert compiler.compiled == [("t4", "float32")]
    assert (work.compiled, work.from_files) == (2, 1) and asked["h100"].best is not None


def test_a_compiler_that_fails_ends_the_search_of_its_chip_only():
    asked, _ = Compiler(4.0, fails=["v5e"]).run("h100", "v5e")
    assert asked["v5e"].best is None and "it crashed" in asked["v5e"].failure
    assert asked["h100"].best is not None and asked["h100"].failure == ""


@pytest.mark.parametrize("all_blocks, fits", [(70.0, True), (90.0, False)])
def test_what_misses_by_little_and_is_extrapolated_is_compiled_whole(all_blocks, fits):
    compiler = Compiler(90.0, all_blocks=all_blocks)
    asked, work = compiler.run("h100", rows=1)
    assert compiler.compiled == [("h100", "float32"), ("h100", "float32, all blocks")] and work.compiled == 2
    one = asked["h100"]
    assert (one.best is not None) == fits
    assert one.tried[one.nearest] == compiler.figures(one.place, one.nearest, True).report


def test_what_misses_by_more_or_fits_is_not_compiled_whole_nor_is_a_step_for_a_tpu():
    for temporary, chip in ((60.0, "h100"), (95.0, "h100"), (17.0, "v5e")):
        compiler = Compiler(temporary, all_blocks=1.0)
        compiler.run(chip, rows=1)
        assert compiler.compiled == [(chip, "float32")]


def test_the_cheapest_set_that_fits_whole_is_taken():
    compiler = Compiler(90.0, all_blocks=70.0)
    asked, _ = compiler.run("h100", rows=1, lean=True)
    assert asked["h100"].best.words == "float32"


def test_a_whole_compile_that_fails_leaves_it_open():
    asked, _ = Compiler(90.0, all_blocks=70.0, fails=["h100, all blocks"]).run("h100", rows=1)
    assert asked["h100"].best is None and "it crashed" in asked["h100"].failure
