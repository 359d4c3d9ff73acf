"""Ensure that Redis contains every timeout that is overdue or due soon.

The sweep loads timeouts from beyond the horizon, restores entries that Redis has lost, and finds rows that were never
pushed. One mechanism does all three, so that none of them is code that runs once a year. Every `SWEEP_INTERVAL` it
reads the rows that are due from a minute ago to two intervals ahead. Once a minute it reads all overdue rows, for those
that were committed after their deadline and for a backlog. Policies make no difference to it: that a line is not asked,
because its policy is stopped or not declared, is decided by each worker. `settle_all_expired`
settles `firing` rows whose worker has died, and `prune` deletes old rows.

Of many workers, one sweeps at a time: it has the turn. Turns only save work; two workers at once do no harm. A turn is
never trusted for long: an attacker who can write to Redis can take every turn, and without sweeps timeouts beyond the
horizon would never be loaded.

| the ledger contains | Redis contains | action, and where if not here |
| --- | --- | --- |
| pending, due soon or overdue | no entry | add the entry |
| pending, due soon or overdue | a later entry | move the entry forward |
| pending, due soon or overdue | an entry then, earlier, or leased | none: the row is checked in any case |
| pending, due later than that | anything | none yet; an early entry is checked and released: `dispatch` |
| pending, due | (unavailable, or no Redis) | claim the row and fire it: `sources.ledger` |
| firing, expired | anything | count the failed attempt: retried, dead, cancelled or superseded |
| firing, not expired | anything | none: its worker is running |
| settled, or no such row | an entry | check and acknowledge it: `dispatch` |
| settled long ago | | delete the row: `prune` |
| (an object whose policy requires another ledger) | | update the ledger: `arming.sync` |

Every action may be repeated, and stopped anywhere.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from django_delayq.conf import get_settings
from django_delayq.engine.engine import Engine, understood
from django_delayq.engine.records import turn_key
from django_delayq.engine.scripts import translated
from django_delayq.exceptions import EngineError
from django_delayq.firing.settling import settle_expired
from django_delayq.ledger.answers import forget_old_answers
from django_delayq.ledger.claiming import forget_free_shares
from django_delayq.ledger.marking import Old, delete_settled, prunable
from django_delayq.ledger.search import NOTHING, SOONEST, Count, Cursor, count, in_state, known_labels
from django_delayq.models import Timeout
from django_delayq.policy.policies import declared_queues, get_policies, registry
from django_delayq.signals import entries_restored, timeouts_pruned
from django_delayq.sql.now import database_now
from django_delayq.sql.statements import Param, compiled
from django_delayq.worker.servers import ClockSkew

if TYPE_CHECKING:
    from django.db.models import QuerySet

logger = logging.getLogger("django_delayq.worker")

PAGE_ROWS: Final = 1_000
"""Rows read and sent to Redis at once: as many as one script may change."""
PASS_ROWS: Final = 10_000
"""After so many rows in a row that Redis has, the rest is most likely there, too: a backlog is not read each time."""
FULL_INTERVAL: Final = timedelta(seconds=60)
"""How late a row may be whose transaction committed long after its deadline."""
OVERDUE_BY: Final = FULL_INTERVAL
"""Each sweep reads rows that are overdue by less: the full one reads the others."""
RESTORED_LIMIT: Final = 10
"""So many restored entries in one sweep are not logged: single pushes fail, and rows fire between two reads."""
TURN_SHARE: Final = 0.9
"""The part of an interval that a turn lasts, so that it is free when its worker comes back."""
PRUNE_PAUSE_SECONDS: Final = 0.01
"""Between two pages that are deleted, for replicas and other writers."""
MAX_MISSED: Final = 12
"""After so many intervals without a turn a worker does the work in any case."""

_had_turn_at: WeakKeyDictionary[Engine, dict[str, float]] = WeakKeyDictionary()


class Row(NamedTuple):
    """The columns of a pending row that its entry in Redis depends on."""

    run_at: datetime
    id: int
    queue: str
    policy: str
    created_at: datetime


def page_of(using: str, start: datetime | None, place: Row | None, end: datetime) -> list[Row]:
    """Return the next page of pending rows after `place`, whose `run_at` is from `start` (None: no bound) to `end`."""
    if place is None:
        found = _first_page.rows(using, PAGE_ROWS, start is not None, start=start, end=end)
    else:
        rows = in_state(Timeout.objects.using(using).filter(run_at__lte=end), Timeout.State.PENDING)
        found = Cursor(SOONEST, (place.run_at, place.id)).after(rows).values_list(*Row._fields)[:PAGE_ROWS]
    return [Row(*values) for values in found]


@compiled
def _first_page(using: str, size: int, is_bounded: bool) -> QuerySet[Timeout, Any]:
    run_at: Any = Timeout._meta.get_field("run_at")
    rows = Timeout.objects.using(using).filter(run_at__lte=Param(run_at, "end"))
    rows = rows.filter(run_at__gte=Param(run_at, "start")) if is_bounded else rows
    return in_state(rows, Timeout.State.PENDING).values_list(*Row._fields)[:size]


class Swept(NamedTuple):
    """How many rows were read, and how many of their entries were missing or too late.

    `restored`: how many of these Redis should have had: the rows are not due yet, were scheduled long enough ago, and
    due within `HORIZON` from the beginning, so that they were pushed then. Of overdue ones a worker may have deferred
    the entry.
    """

    checked: int = 0
    changed: int = 0
    restored: int = 0

    def plus(self, other: Swept) -> Swept:
        return Swept(*map(sum, zip(self, other, strict=True)))


class Sweep:
    """One worker's sweep. Not for several threads at once."""

    def __init__(self, engine: Engine, using: str, skew: ClockSkew) -> None:
        self._engine = engine
        self._using = using
        self._skew = skew
        self._between: Callable[[], object] = lambda: None
        self._places: dict[str, Row | None] = {}
        """Where the next sweep continues in each range."""
        self.queues: set[str] = set()
        """Those of the rows that it has read."""

    def run_once(self, *, everything: bool = False, between: Callable[[], object] = lambda: None) -> Swept:
        """Sweep if it is this worker's turn; with `everything` always, and all overdue rows.

        Call `between` between two pages. Raises EngineError or the database's errors; completed pages remain swept.
        """
        now = self._skew.now()
        self._between = between
        with turn(self._engine, "sweep", get_settings().sweep_interval, always=everything) as is_ours:
            return self._run(now, everything=everything) if is_ours else Swept()

    def _run(self, now: datetime, *, everything: bool) -> Swept:
        with turn(self._engine, "full-sweep", FULL_INTERVAL, always=everything) as is_full:
            if is_full:
                owned = known_labels(self._using)
                for queue in self._engine.queues({*declared_queues(), *self.queues}):
                    queue.correct_heads()
                    queue.remove_foreign(owned, self._between)
            end = now + 2 * get_settings().sweep_interval
            kind, start = ("full", None) if is_full else ("behind", now - OVERDUE_BY)
            page = page_of(self._using, start, None, end)
            if len(page) < min(PAGE_ROWS, PASS_ROWS):  # all of them, as nearly always
                self._places |= {"ahead": None, kind: None}
                swept = self._ensure(page)
                self._report_restored(swept.restored)
                return swept
            # Rows that are due soon come first: they must not wait behind a long backlog, where the sweep may fail.
            swept = self._range("ahead", now, end)
            self._report_restored(swept.restored)
            return swept.plus(self._range(kind, start, now))

    def _report_restored(self, restored: int) -> None:
        """Send the signal, and log once that Redis has lost entries, if these are many."""
        if not restored:
            return
        entries_restored.send_robust(Timeout, count=restored)
        # Later sweeps restore the entries that are due later, until nothing is left that was pushed before the loss.
        # One line is enough, of all workers together. If Redis is emptied again, it has lost the turn as well.
        quiet = 2 * max(get_settings().horizon, FULL_INTERVAL)
        if restored > RESTORED_LIMIT and try_claim_turn(self._engine, "healed", quiet):
            logger.warning(
                "Redis had lost entries: %d timeouts that are due next were missing and are restored. Later ones are "
                "restored before they are due",
                restored,
                extra={"event": "redis_healed", "restored": restored},
            )

    def _range(self, kind: str, start: datetime | None, end: datetime) -> Swept:
        """Sweep page after page until the end of the range, or until `PASS_ROWS` rows in a row needed no change.

        Then Redis most likely contains the rest, too, and a backlog of 100,000 rows is not read every few seconds.
        The next sweep continues at that place, so that every row is read in the end.
        """
        total, unchanged, place = Swept(), 0, self._places.get(kind)
        if place is not None and start is not None and place.run_at < start:
            place = None
        while unchanged < PASS_ROWS:
            page = page_of(self._using, start, place, end)
            swept = self._ensure(page)
            self._between()
            total = total.plus(swept)
            place = page[-1] if len(page) == PAGE_ROWS else None
            if place is None:
                break
            unchanged = 0 if swept.changed else unchanged + len(page)
        self._places[kind] = place
        return total

    def _ensure(self, rows: Sequence[Row]) -> Swept:
        settings, now = get_settings(), self._skew.now()
        # A younger row may be between its commit and its push, so its entry is not lost.
        pushed_before = now - 2 * settings.sweep_interval
        entries: dict[tuple[str, int, str, bool], list[tuple[int, int]]] = defaultdict(list)
        for row in rows:
            was_near = row.run_at - row.created_at <= settings.horizon
            was_pushed = was_near and row.created_at < pushed_before and row.run_at > now
            line = row.queue, self._engine.shard_of(row.id), row.policy, was_pushed
            entries[line].append((row.id, self._skew.redis_ms(row.run_at)))
        self.queues.update(row.queue for row in rows)
        changed = {True: 0, False: 0}
        for (queue, shard, policy, was_pushed), found in entries.items():
            changed[was_pushed] += self._engine.queue(queue, shard).ensure(policy, found)
        return Swept(len(rows), sum(changed.values()), changed[True])


def try_claim_turn(engine: Engine | None, work: str, interval: timedelta) -> bool:
    """Return whether it is the caller's turn to do `work`, which no other worker gets for most of `interval`.

    Without Redis always. Raises EngineUnavailable or EngineError.
    """
    if engine is None:
        return True
    had_at, now = _had_turn_at.setdefault(engine, {}), monotonic()
    is_overdue = now - had_at.setdefault(work, now) >= MAX_MISSED * interval.total_seconds()
    key, milliseconds = turn_key(engine.prefix, work), max(1, int(interval.total_seconds() * 1000 * TURN_SHARE))
    with translated(engine.client):
        is_ours = bool(engine.client.set(key, 1, nx=True, px=milliseconds))
        if not is_ours:
            reply: Any = engine.client.pttl(key)
            with understood("pttl"):
                left = int(reply)
            if left == -1 or left > milliseconds:  # no turn lasts so long: foreign, or the clock was set back
                is_ours = bool(engine.client.set(key, 1, px=milliseconds))
    if is_ours or is_overdue:
        had_at[work] = now
    return is_ours or is_overdue


@contextmanager
def turn(engine: Engine | None, work: str, interval: timedelta, *, always: bool = False) -> Iterator[bool]:
    """Yield what `try_claim_turn` returns. After an error the turn is free again, so that a retry can have it.

    With `always`, claim no turn and yield True. Raises EngineUnavailable or EngineError.
    """
    is_ours = not always and try_claim_turn(engine, work, interval)
    try:
        yield always or is_ours
    except Exception:
        if is_ours and engine is not None:
            with suppress(EngineError), translated(engine.client):
                engine.client.set(turn_key(engine.prefix, work), 1, px=1)  # allowed to a user that may not delete
        raise


def settle_all_expired(using: str) -> int:
    """Settle or retry every `firing` row whose worker has died; return how many. Needs no Redis."""
    settled = 0
    while True:
        report = settle_expired(using, PAGE_ROWS)
        found = len(report.done) + len(report.again)
        settled += (count := found - len(report.untried))
        if found < PAGE_ROWS or not count:  # else a page of locked rows would be read without end
            return settled


def retention_of(label: str) -> timedelta:
    """Return how long settled rows with this label are kept: also of a policy that is not declared."""
    policy = registry.get(label)
    return get_settings().kept_for(None if policy is None else policy.retention)


def least_age(labels: Collection[str] = ()) -> timedelta:
    """Return the age from which settled rows may be deleted: the sync may still arm a round that is overdue by less.

    A younger row that has fired shows it that this round is closed. Without the row the round would fire again.
    `labels`: see `prune`.
    """
    return max(map(retention_of, labels), default=get_settings().retention) / 2


def _old_rows(using: str, labels: Collection[str], age: timedelta | None) -> list[Old]:
    """Return what `prune` deletes: the rows of each retention, and for no labels those of all other policies."""
    now = database_now(using)
    own = [label for policy in get_policies() if policy.retention is not None for label in policy.labels]
    by_age = defaultdict[timedelta, list[str]](list)
    for label in labels or own:
        by_age[age if labels and age is not None else retention_of(label)].append(label)
    others = [] if labels else [Old(now - (age or get_settings().retention), but=tuple(own))]
    return others + [Old(now - kept, tuple(found)) for kept, found in by_age.items()]


def count_old(using: str, labels: Collection[str] = (), age: timedelta | None = None) -> Count:
    """Return how many rows `prune` would delete now, up to `search.MAX_COUNT`."""
    return sum((count(prunable(using, old)) for old in _old_rows(using, labels, age)), NOTHING)


def prune(
    using: str,
    between: Callable[[], object] = lambda: None,
    *,
    labels: Collection[str] = (),
    age: timedelta | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> int:
    """Delete rows that were settled, and due, longer than the `retention` of their policy ago; return how many.

    Reports continue to count them: see `ledger.rollups`.

    A row that was cancelled or fired long before its first deadline closes its round until then: without the row the
    object would be armed again.

    Args:
        using: the database.
        between: called between two pages, each of which is a transaction of its own.
        labels: only rows with one of these labels, if there are any.
        age: in place of the setting `RETENTION`, and, for `labels`, of the retention of their policies; see
            `least_age`.
        progress: called with the number of deleted rows, page by page.
    """
    forget_free_shares(using)
    forget_old_answers(using)
    deleted, found = 0, _old_rows(using, labels, age)
    for old in found:
        start: datetime | None = None
        while True:
            count, start = delete_settled(using, old, start)
            deleted += count
            progress(count)
            if start is None:
                break
            between()
            sleep(PRUNE_PAUSE_SECONDS)
    timeouts_pruned.send(Timeout, using=using, before=max(old.before for old in found))
    return deleted
