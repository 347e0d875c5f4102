"""The largest batch that fits into memory, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from keras_mp.bench.compare import Task
from keras_mp.bench.process import Process, WorkloadError
from keras_mp.system.whole_number import whole_number

# Nobody trains with more; where nothing limits the memory, the search ends here.
MOST = 2**20


def largest(fits: Callable[[int], bool], start: int, most: int = MOST) -> int:
    """Finds the largest size that fits, within a sixteenth: doubles while it fits, then halves the gap.

    Args:
        fits: whether a size fits; where one does, all smaller ones do.
        start: the first to try, at least 1.
        most: the last to try.

    Returns:
        The largest that was seen to fit; 0 where not even 1 does.

    Raises:
        ValueError: for a start below 1.
    """
    whole_number("start", start)
    low, high = 0, min(start, most)
    while fits(high):
        low = high
        if high == most:
            return low
        high = min(2 * high, most)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def largest_batch(task: Task, start: int, paths: Sequence[str], memory_limit: int | None) -> int:
    """Finds the largest batch of a workload: each size is tried for two steps, in a process of its own.

    Args:
        task: its function takes a `batch_size`.
        start: the first size to try.
        paths: folders that the process imports from.
        memory_limit: the most bytes that it may hold, for CPUs.

    Raises:
        WorkloadError: If it fails for another reason than memory.
    """

    def fits(size: int) -> bool:
        process = Process(task.environment, paths, memory_limit)
        arguments: Mapping = {**task.arguments, "batch_size": size}
        try:
            process.ask("load", name=task.name, function=task.function, arguments=arguments)
            process.ask("run", name=task.name, steps=1)
        except WorkloadError as error:
            if error.kind != "out of memory":
                raise
            return False
        finally:
            process.close()
        return True

    return largest(fits, start)
