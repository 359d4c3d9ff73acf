"""Show progress on stderr: a bar with rich on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LINES = 10


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], object]]:
    """Yield the function to call after each of `total` items."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield _plain(label, total)
        return
    if not sys.stderr.isatty():
        yield _plain(label, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def _plain(label: str, total: int) -> Callable[[], object]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done * LINES // total > (done - 1) * LINES // total:
            sys.stderr.write(f"{label}: {done}/{total}\n")
            sys.stderr.flush()

    return advance
