"""Count settled rows, day by day, so that reports need not read the ledger, and outlive rows that are pruned.

Each `PolicyDay` counts one label in a part of a day in `TIME_ZONE`; the row without a label states that the part is
counted. Workers count new rows every minute (`roll_up`). Once a day is over, they count it as a whole again, for rows
that were committed long after they were settled. `count_finally` does so for the last time before `prune` deletes the
rows. What is not counted yet, a report reads from the ledger (`Counted`).

| event | what keeps the counts right |
| --- | --- |
| a transaction settles a row, and commits later | the last `COMMIT_MARGIN` is not counted; the day is counted again |
| a dead row is retried or cancelled | `uncount` takes it off its day; a count that runs meanwhile is dropped |
| two workers count the same rows | the second one finds other parts than it has begun with, and drops its count |
| `TIME_ZONE` was changed | days whose rows exist are counted again; later days begin where the final ones end |
| policies have retentions of their own | the shortest one ends the days of all: see `count_finally` |
| a policy was renamed | rows and days keep their labels; a report adds those of all labels of the policy |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from typing import Any, Final, NamedTuple, TypeVar

from django.conf import settings
from django.db import IntegrityError
from django.db.models import F, Q
from django.db.models.functions import Greatest
from django.utils import timezone

from django_delayq import clock
from django_delayq.clock import database_now
from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.ledger.search import Cursor, Order
from django_delayq.models import PolicyDay, Timeout, TimeoutQuerySet, could_fire_at, ending_of

State, Cause = Timeout.State, Timeout.Cause

COMMIT_MARGIN: Final = timedelta(minutes=2)
"""Younger rows are not counted yet: their transactions may not have committed, and clocks differ by seconds."""
REPAIR_AFTER: Final = timedelta(hours=3)
"""How long after its end a day is counted again: for transactions that were open for longer than the margin."""
READ_ROWS: Final = 2_000
"""Rows read at once: a tenth of a second, after which the worker may do something more urgent."""
GROWTH: Final = 1.05
"""The ratio of two limits of a histogram: so quantiles are exact to 2.5 %, and a day needs some 200 numbers."""
LEAST_SECONDS: Final = 0.001
"""Shorter durations count as so long: a logarithm has no zero."""
COUNTS: Final = ("in_time", "ended_late", "fired", "shadow", "skipped", "cancelled", "dead")
"""What a round ends as; each settled row is one of them."""
BY_SETTLED: Final = Order("settled_at")
NO_LABEL: Final = ""


class SettledRow(NamedTuple):
    """The columns of a settled row that are counted."""

    settled_at: datetime
    id: int
    policy: str
    state: str
    cause: str
    due_at: datetime
    created_at: datetime
    ready_at: datetime | None
    run_at: datetime
    attempts: int
    since_at: datetime | None
    remaining: timedelta | None
    keeps_deadline: bool
    object_id: str


@dataclass
class Tally:
    """Counts of settled rows, and histograms of their durations."""

    counts: Counter[str] = field(default_factory=Counter)
    lateness: Counter[int] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)

    def add(self, row: SettledRow) -> None:
        """Count one row."""
        end = ending_of(row)
        self.counts[end] += 1
        if end == "fired":
            could_fire = could_fire_at(row.due_at, row.created_at, row.ready_at, row.run_at, row.attempts)
            self.lateness[_interval_of(row.settled_at - could_fire)] += 1
        elif end == "in_time":
            self.waits[_interval_of(row.settled_at - (row.since_at or row.created_at))] += 1

    def merge(self, other: Tally) -> None:
        """Add the counts of `other`."""
        self.counts.update(other.counts)
        self.lateness.update(other.lateness)
        self.waits.update(other.waits)

    @classmethod
    def of(cls, part: PolicyDay) -> Tally:
        """Return what a stored part has counted."""
        lateness, waits = ({int(key): count for key, count in each.items()} for each in (part.lateness, part.waits))
        return cls(Counter({name: getattr(part, name) for name in COUNTS}), Counter(lateness), Counter(waits))


def _interval_of(duration: timedelta) -> int:
    return math.floor(math.log(max(LEAST_SECONDS, duration.total_seconds())) / math.log(GROWTH))


def quantile(histogram: Mapping[int, int], share: float) -> float | None:
    """Return the seconds that `share` of the durations do not exceed, to 2.5 %; None: there are no durations."""
    total = sum(histogram.values())
    rank = min(int(total * share), total - 1)
    for interval in sorted(histogram):
        rank -= histogram[interval]
        if rank < 0:
            return max(LEAST_SECONDS, float(GROWTH ** (interval + 0.5)))
    return None


def day_of(moment: datetime) -> date:
    """Return the day of `moment` in `TIME_ZONE`."""
    return (timezone.localtime(moment, timezone.get_default_timezone()) if settings.USE_TZ else moment).date()


def start_of(day: date) -> datetime:
    """Return when `day` begins in `TIME_ZONE`: at midnight, or when the clocks skip that, just after."""
    midnight = datetime.combine(day, time())
    if not settings.USE_TZ:
        return midnight
    return clock.in_utc(midnight.replace(tzinfo=timezone.get_default_timezone()))


R = TypeVar("R", bound="Any")


def read_settled(
    rows: TimeoutQuerySet, begin: datetime, end: datetime, kind: type[R], size: int = READ_ROWS
) -> Iterator[list[R]]:
    """Yield pages of those of `rows` that were settled from `begin` to before `end`, the oldest first.

    `kind`: a named tuple of columns. It begins with `settled_at` and `id`.
    """
    found = rows.filter(settled_at__gte=begin, settled_at__lt=end).order_by(*BY_SETTLED.fields)
    place: Cursor | None = None
    while True:
        following = found if place is None else place.after(found)
        page = [kind(*values) for values in following.values_list(*kind._fields)[:size]]
        if page:
            yield page
        if len(page) < size:
            return
        place = Cursor.at(page[-1], BY_SETTLED)


def rows_between(using: str, begin: datetime, end: datetime, size: int = READ_ROWS) -> Iterator[list[SettledRow]]:
    """Yield pages of the rows of all policies that were settled in this time."""
    return read_settled(Timeout.objects.using(using), begin, end, SettledRow, size)


def _count(using: str, begin: datetime, end: datetime, between: Callable[[], object]) -> dict[str, Tally]:
    """Return the tally of each label."""
    found: dict[str, Tally] = {}
    for page in rows_between(using, begin, end):
        for row in page:
            found.setdefault(row.policy, Tally()).add(row)
        between()
    return found


class Part(NamedTuple):
    """A part of a day."""

    day: date
    begins_at: datetime
    ends_at: datetime


def _markers(using: str, begin: datetime | None = None, end: datetime | None = None) -> Any:
    """Return the rows without a label that overlap the time, in their order, except those of another time zone."""
    rows = PolicyDay.objects.using(using).filter(policy=NO_LABEL)
    rows = rows if begin is None else rows.filter(ends_at__gt=begin)
    rows = rows if end is None else rows.filter(begins_at__lt=end)
    return rows.filter(Q(is_final=True) | Q(zone=settings.TIME_ZONE)).order_by("begins_at")


def gaps(markers: Iterable[PolicyDay], begin: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Yield the times from `begin` to `end` that none of the sorted `markers` has counted."""
    for marker in markers:
        if begin < marker.begins_at:
            yield begin, min(marker.begins_at, end)
        begin = max(begin, marker.ends_at)
    if begin < end:
        yield begin, end


def parts_of(using: str, begin: datetime, end: datetime) -> Iterator[Part]:
    """Yield the days, or parts of days, of a time, without those in which nothing was settled."""
    while begin < end:
        settled = Timeout.objects.using(using).filter(settled_at__gte=begin, settled_at__lt=end)
        first: Any = settled.order_by("settled_at").values_list("settled_at", flat=True).first()
        if first is None:
            return
        day = day_of(first)
        begin = max(begin, start_of(day))
        part = Part(day, begin, min(end, start_of(day + timedelta(days=1))))
        yield part
        begin = part.ends_at


def roll_up(using: str, between: Callable[[], object] = lambda: None) -> None:
    """Count the rows that were settled since the last call, and once more the days that are over.

    Each part is a transaction of its own. Calls `between` between two pages of rows.
    """
    now = database_now(using)
    foreign = PolicyDay.objects.using(using).filter(is_final=False).exclude(zone=settings.TIME_ZONE)
    if foreign.exists():
        foreign.delete()
    settled = Timeout.objects.using(using).filter(settled_at__isnull=False).order_by("settled_at")
    first: Any = settled.values_list("settled_at", flat=True).first()
    until = now - COMMIT_MARGIN
    if first is None or first >= until:
        return
    begin = start_of(day_of(first))
    markers = list(_markers(using, begin, until))
    for gap in gaps(markers, begin, until):
        for part in parts_of(using, *gap):
            _extend(using, part, now, between)
    for marker in _markers(using).filter(is_final=False, counted_at__lt=now - REPAIR_AFTER):
        day_ends_at = start_of(marker.day + timedelta(days=1))
        if marker.counted_at < day_ends_at + REPAIR_AFTER <= now:
            part = Part(marker.day, marker.begins_at, marker.ends_at)
            tallies = _count(using, marker.begins_at, marker.ends_at, between)
            _replace(using, part, tallies, [marker], counted_at=now)


def _extend(using: str, part: Part, now: datetime, between: Callable[[], object]) -> None:
    """Count `part`, and add it to what is counted of its day."""
    tallies = _count(using, part.begins_at, part.ends_at, between)
    own = _markers(using).filter(is_final=False, day=part.day, ends_at=part.begins_at).first()
    if own is None:
        _replace(using, part, tallies, [], counted_at=now)
        return
    _add_stored(using, own, tallies)
    _replace(using, part._replace(begins_at=own.begins_at), tallies, [own], counted_at=own.counted_at)


def _add_stored(using: str, marker: PolicyDay, tallies: dict[str, Tally]) -> None:
    for stored in PolicyDay.objects.using(using).filter(begins_at=marker.begins_at).exclude(policy=NO_LABEL):
        tallies.setdefault(stored.policy, Tally()).merge(Tally.of(stored))


def count_finally(using: str, oldest: datetime, before: datetime, between: Callable[[], object]) -> None:
    """Count all rows that were settled from `oldest` to `before`, some of which are deleted next, for the last time.

    Rows with other labels may be kept for longer: they are counted, too, so that a day has one state for all labels.
    Each deleted row was counted finally, so none of them is missing where no row is left, whatever is counted again.
    Of a day that is over, all rows are counted: the rest is deleted an hour later.
    """
    now = database_now(using)
    begin, end = start_of(day_of(oldest)), start_of(day_of(before) + timedelta(days=1))
    end = end if end + REPAIR_AFTER <= now else before
    final = list(_markers(using, begin, end).filter(is_final=True))
    for gap in gaps(final, begin, end):  # also before the final days: the rows of another retention
        for part in parts_of(using, *gap):
            while not _count_part_finally(using, part, now, between):
                pass


def _count_part_finally(using: str, part: Part, now: datetime, between: Callable[[], object]) -> bool:
    """Count `part`, and add it to the final part of its day that ends there. Return False if it must be counted again.

    Otherwise a retention of minutes would leave a row for each hour and label.
    """
    markers = PolicyDay.objects.using(using).filter(policy=NO_LABEL)  # those of other time zones are replaced, too
    seen = list(markers.filter(begins_at__lt=part.ends_at, ends_at__gt=part.begins_at))
    same_day = markers.filter(is_final=True, day=part.day, zone=settings.TIME_ZONE)
    former = same_day.filter(ends_at=part.begins_at).first()
    tallies = _count(using, part.begins_at, part.ends_at, between)
    if former is not None:
        _add_stored(using, former, tallies)
        part, seen = part._replace(begins_at=former.begins_at), [former, *seen]
    return _replace(using, part, tallies, seen, counted_at=now, is_final=True)


def _replace(
    using: str,
    part: Part,
    tallies: Mapping[str, Tally],
    seen: Iterable[PolicyDay],
    **columns: Any,
) -> bool:
    """Store `tallies` in place of the markers `seen` and their labels. Return False if these have changed meanwhile.

    `columns`: `counted_at`, and `is_final`.
    """
    rows = PolicyDay.objects.using(using)
    try:
        with transaction_of(using):
            overlapping = rows.filter(begins_at__lt=part.ends_at, ends_at__gt=part.begins_at)
            markers = for_update(overlapping.filter(policy=NO_LABEL).order_by("pk"), using)
            if {_version(marker) for marker in markers} != {_version(marker) for marker in seen}:
                return False
            overlapping.delete()
            common: dict[str, Any] = {**part._asdict(), "zone": settings.TIME_ZONE, **columns}
            new = [PolicyDay(policy=NO_LABEL, **common)]
            for label, tally in tallies.items():
                counts = {name: tally.counts[name] for name in COUNTS}
                histograms = {"lateness": _stored(tally.lateness), "waits": _stored(tally.waits)}
                new.append(PolicyDay(policy=label, **common, **counts, **histograms))
            rows.bulk_create(new)
    except IntegrityError:  # another worker has stored the same part
        return False
    return True


def _version(marker: PolicyDay) -> tuple[Any, ...]:
    return marker.pk, marker.ends_at, marker.changes, marker.is_final


def _stored(histogram: Mapping[int, int]) -> dict[str, int]:
    return {str(interval): count for interval, count in sorted(histogram.items())}


def uncount(rows: Iterable[Timeout], using: str) -> None:
    """Take those of the locked `rows` that are dead off their days, before they are revived or cancelled."""
    dead = [(row.settled_at, row.policy) for row in rows if row.state == State.DEAD and row.settled_at is not None]
    if not dead:
        return
    times = [settled_at for settled_at, _ in dead]
    days = PolicyDay.objects.using(using)
    markers = list(days.filter(policy=NO_LABEL, begins_at__lte=max(times), ends_at__gt=min(times)).order_by("pk"))
    changed = Counter(
        (marker.begins_at, label)
        for settled_at, label in dead
        for marker in markers
        if marker.begins_at <= settled_at < marker.ends_at
    )
    for begins_at in sorted({begins_at for begins_at, _ in changed}):
        days.filter(policy=NO_LABEL, begins_at=begins_at).update(changes=F("changes") + 1)
    for (begins_at, label), number in sorted(changed.items()):
        # Not below 0: a row that was committed after the last count of its day is not counted.
        days.filter(policy=label, begins_at=begins_at).update(dead=Greatest(F("dead") - number, 0))


@dataclass
class Counted:
    """The settled rows of whole days: the tallies of each day and label, and how far they reach."""

    tallies: dict[tuple[date, str], Tally]
    until: datetime | None
    """Rows that were settled later are not counted, because they were more than the limit; None: all are."""


def counted(using: str, labels: Collection[str] | None, first: date, last: date, limit: int | None = None) -> Counted:
    """Count the rows with `labels` (None: with any) that were settled from the day `first` to `last`.

    `limit`: read no more rows of the ledger than about so many.
    """
    begin, end = start_of(first), start_of(last + timedelta(days=1))
    markers = list(_markers(using, begin, end))
    counted_days: dict[tuple[date, str], Tally] = {}
    stored = PolicyDay.objects.using(using).filter(day__range=(first, last), ends_at__gt=begin, begins_at__lt=end)
    stored = stored.exclude(policy=NO_LABEL) if labels is None else stored.filter(policy__in=labels)
    valid = {marker.begins_at for marker in markers}
    for row in stored.filter(Q(is_final=True) | Q(zone=settings.TIME_ZONE)):
        if row.begins_at in valid:
            counted_days.setdefault((row.day, row.policy), Tally()).merge(Tally.of(row))
    until = None
    for gap in gaps(markers, begin, end):
        for part in parts_of(using, *gap):
            size = READ_ROWS if limit is None else min(READ_ROWS, limit + 1)
            for page in rows_between(using, part.begins_at, part.ends_at, size):
                limit = limit if limit is None else limit - len(page)
                if limit is not None and limit < 0:
                    return Counted(counted_days, until or part.begins_at)
                for each in page:
                    if labels is None or each.policy in labels:
                        counted_days.setdefault((part.day, each.policy), Tally()).add(each)
                until = page[-1].settled_at
    return Counted(counted_days, None)
