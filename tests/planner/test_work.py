"""What counts as a kernel of a compiled step, and the bytes that it moves, in text that compilers write."""

from keras_mp.planner.read.hlo import is_work, moved_bytes, parse
from tests.planner.test_step_time import ON_A_TPU, TEXT


def working(text):
    module = parse(text)
    return {
        name: moved_bytes(instruction, module)
        for name, instruction in module.computations[module.entry].items()
        if is_work(instruction, module)
    }


def test_collectives_and_copies_ahead_are_no_work():
    assert set(working(ON_A_TPU)) == {"product", "twice"}
    assert {"gather-start", "gather-done", "sum"}.isdisjoint(working(TEXT))


def test_a_product_counts_however_it_is_started():
    module = parse(ON_A_TPU)
    start = module.computations["main"]["copy-start"]
    assert not is_work(start, module) and is_work(start, module, {"copy-start"})


def test_bytes_cross_the_memory_once():
    """The operand and the weights, which a copy brought ahead; the result stays with the core, the gather is sent."""
    moved = working(ON_A_TPU)
    assert moved["product"] == 2 * 4096 * 2048 + 2 * 2048 * 2048
    assert moved["twice"] == 2 * 2 * 2048 * 2048
