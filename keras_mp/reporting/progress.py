"""A bar on the terminal while long work runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[..., None]


@contextmanager
def progress(work: str, total: int | None = None) -> Iterator[Tell]:
    """Shows progress and the time left, on terminals alone.

    Yields:
        A function `tell(words, done=0)`: what is being done now, and how many steps more are done.
    """
    if not sys.stderr.isatty():
        yield lambda words, done=0: None
        return
    from rich import progress as parts
    from rich.console import Console

    columns = (
        parts.TextColumn(work),
        parts.BarColumn(20),
        parts.MofNCompleteColumn(),
        parts.TimeElapsedColumn(),
        parts.TextColumn("left:"),
        parts.TimeRemainingColumn(),
        parts.TextColumn("{task.description}"),
    )
    with parts.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda words, done=0: bar.update(task, description=words, advance=done)
