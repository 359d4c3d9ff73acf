"""Show a live play: a table that is drawn repeatedly, or a line now and then."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shop.replay.results import policy_name
from shop.replay.steps import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from shop.replay.live import LivePlay

LINE_SECONDS = 5.0
HEADINGS = ("policy", "armed", "waiting", "in time", "fired", "late, median", "late, most")


@dataclass(frozen=True, slots=True)
class Lateness:
    """The lateness of fired timeouts, in milliseconds."""

    count: int
    median: float
    p99: float
    most: float

    @classmethod
    def of(cls, milliseconds: list[float]) -> Lateness:
        if not milliseconds:
            return cls(0, 0.0, 0.0, 0.0)
        ordered = sorted(milliseconds)
        p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        return cls(len(ordered), round(statistics.median(ordered), 1), round(p99, 1), round(ordered[-1], 1))


class Observer:
    """Observe a play and its timeouts; each refresh reads only the timeouts that fired since the last one."""

    def __init__(self, play: LivePlay) -> None:
        self.play = play
        self.is_drawn = False  # whether the table is already on the screen
        self._late: dict[str, list[float]] = defaultdict(list)
        self._seen: set[int] = set()
        self._newest: datetime | None = None

    def headline(self) -> str:
        """Return the progress of the orders."""
        taken = Counter(step for life in self.play.lives for step in life.done)
        refused = sum(life.refused_at is not None for life in self.play.lives)
        words = [f"{taken[step]} {step.name.lower()}" for step in sorted(Step)]
        return f"{len(self.play.lives)} orders: {', '.join(words)}, {refused} too late"

    def rows(self) -> list[tuple[str, ...]]:
        """Return one row of strings for each policy, in the order of `HEADINGS`."""
        self._look()
        found = []
        for policy, states in self.play.ledger.counts().items():
            late = Lateness.of(self._late[policy])
            waiting = states.get("pending", 0) + states.get("firing", 0)
            in_time = states.get("cancelled", 0) + states.get("skipped", 0)
            numbers = (sum(states.values()), waiting, in_time, states.get("fired", 0))
            times = (f"{late.median} ms", f"{late.most} ms") if late.count else ("", "")
            found.append((policy, *map(str, numbers), *times))
        return found

    def lateness(self) -> Lateness:
        """Return the lateness of all timeouts that have fired."""
        self._look()
        return Lateness.of([late for policy in self._late.values() for late in policy])

    def _look(self) -> None:
        fired = self.play.ledger.rows().filter(state="fired").order_by("settled_at")
        if self._newest is not None:
            fired = fired.filter(settled_at__gte=self._newest)
        for pk, label, due_at, settled_at in fired.values_list("pk", "policy", "due_at", "settled_at"):
            if pk not in self._seen and settled_at is not None:
                self._seen.add(pk)
                self._late[policy_name(label)].append((settled_at - due_at).total_seconds() * 1000)
            self._newest = settled_at


@contextmanager
def display(observer: Observer) -> Iterator[Callable[[], None]]:
    """Yield the function that shows the current state; it may be called at any rate."""
    try:
        from rich.live import Live
    except ImportError:
        yield _lines(observer)
        return
    if not sys.stdout.isatty():
        yield _lines(observer)
        return
    observer.is_drawn = True
    with Live(_rich_table(observer), auto_refresh=False) as live:
        yield lambda: live.update(_rich_table(observer), refresh=True)
        live.update(_rich_table(observer), refresh=True)


def _rich_table(observer: Observer) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # Without a frame, so that the whole names of the policies fit 80 columns.
    fitting: Any = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=observer.headline(), title_justify="left", title_style="bold", **fitting)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    for row in observer.rows():
        table.add_row(*row)
    return table


def _lines(observer: Observer) -> Callable[[], None]:
    spoken = time.monotonic()

    def show() -> None:
        nonlocal spoken
        if time.monotonic() - spoken >= LINE_SECONDS:
            spoken = time.monotonic()
            sys.stdout.write(f"{observer.headline()}; late by {observer.lateness().median} ms (median)\n")
            sys.stdout.flush()

    return show
