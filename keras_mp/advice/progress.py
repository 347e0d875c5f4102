"""A bar on a terminal that says how many chips are done, and what is being compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_of(chips: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """Shows a bar on standard error where that is a terminal.

    Args:
        chips: how many there are.
        shown: whether to show anything at all.

    Yields:
        A function that takes the name of what a compiler starts with, and "" when a chip is done.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda sentence: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("chips"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=chips)

        def tell(sentence: str) -> None:
            if sentence:
                bar.update(task, description=f"compiling {sentence}")
            else:
                bar.advance(task)

        yield tell
