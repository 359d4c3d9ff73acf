"""Count settled rows, day by day, so that reports need not read the ledger, and outlive rows that are pruned.

A `PolicyDay` counts the rows of one label that were settled on one day in `TIME_ZONE`. There are two kinds:

* Of deleted rows: the transaction that deletes a row counts it (`leave`). These counts are exact, and stay.
* Of rows that the ledger still has: a cache, which may be deleted at any time. The row without a label states until
  when the day is counted. Workers continue it every minute (`roll_up`). A report reads later rows from the ledger.

| event | what keeps the cache right |
| --- | --- |
| a row is committed long after it was settled | the last `COMMIT_MARGIN` is left out; a past day is counted again |
| a row is deleted, or a dead one is revived | `leave` takes it off its day; a count that runs meanwhile is dropped |
| two workers count the same rows | the first one finds another `version` than its own, and drops its count |
| `TIME_ZONE` was changed | the cache is counted again; the days of deleted rows remain |
| a row is deleted by hand | it counts until its day is counted again, or has no rows |
| a policy was renamed | rows and days keep their labels; a report adds those of all labels of the policy |
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from typing import Any, Final, NamedTuple
from uuid import uuid4

from django.conf import settings
from django.db.models import Q, QuerySet
from django.utils import timezone

from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.ledger.search import Cursor, Order
from django_delayq.models import PolicyDay, Timeout, TimeoutQuerySet, could_fire_at, ending_of
from django_delayq.sql.now import database_now
from django_delayq.sql.statements import upsert
from django_delayq.times import clock

COMMIT_MARGIN: Final = timedelta(minutes=2)
"""Younger rows are not counted yet: their transactions may not have committed, and clocks differ by seconds."""
REPAIR_AFTER: Final = timedelta(hours=3)
"""How long after its end a day is counted again: for transactions that were open for longer than the margin."""
READ_ROWS: Final = 2_000
"""Rows read at once: a tenth of a second, after which the worker may do something more urgent."""
OVERDUE: Final = timedelta(minutes=1)
"""So long after it could fire, a pending timeout counts as overdue, and one that fires counts as late."""
GROWTH: Final = 1.05
"""The ratio of two limits of a histogram: so quantiles are exact to 2.5 %, and a day needs some 200 numbers."""
LEAST_SECONDS: Final = 0.001
"""Shorter durations count as so long: a logarithm has no zero."""
COUNTS: Final = ("in_time", "ended_late", "fired", "shadow", "skipped", "cancelled", "dead")
"""What a round ends as; each settled row is one of them."""
HISTOGRAMS: Final = ("lateness", "waits", "hours")
"""The columns of a day that are counts by a number."""
BY_HOUR: Final = (*COUNTS, "late")
"""What is counted by the hour: `late` are those that fired more than `OVERDUE` late, and `fired` the others."""
BY_SETTLED: Final = Order("settled_at")
NO_LABEL: Final = ""
KEY: Final = ("policy", "day", "is_deleted")


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
    """Counts of settled rows, histograms of their durations, and counts by the hour."""

    counts: Counter[str] = field(default_factory=Counter)
    lateness: Counter[int] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)
    hours: Counter[int] = field(default_factory=Counter)
    """By `hour_of` times the length of `BY_HOUR`, plus the place in it."""

    def add(self, row: SettledRow) -> None:
        """Count one row."""
        end = ending_of(row)
        self.counts[end] += 1
        if end == "fired":
            late = row.settled_at - could_fire_at(row.due_at, row.created_at, row.ready_at, row.run_at, row.attempts)
            self.lateness[_interval_of(late)] += 1
            end = "late" if late > OVERDUE else end
        elif end == "in_time":
            self.waits[_interval_of(row.settled_at - (row.since_at or row.created_at))] += 1
        self.hours[hour_of(row.settled_at) * len(BY_HOUR) + BY_HOUR.index(end)] += 1

    def merge(self, other: Tally) -> None:
        """Add the counts of `other`."""
        for name, own in vars(self).items():
            own.update(getattr(other, name))

    def remove(self, other: Tally) -> None:
        """Take off the counts of `other`. Not below 0: a row that was committed after the last count is not counted."""
        for name, own in vars(self).items():
            setattr(self, name, own - getattr(other, name))

    @classmethod
    def of(cls, part: PolicyDay) -> Tally:
        """Return what a stored part has counted."""
        histograms = ({int(key): count for key, count in getattr(part, name).items()} for name in HISTOGRAMS)
        return cls(Counter({name: getattr(part, name) for name in COUNTS}), *map(Counter, histograms))

    def columns(self) -> dict[str, Any]:
        """Return the columns in which it is stored."""
        stored = {name: {str(key): each[key] for key in sorted(each)} for name, each in vars(self).items()}
        return {name: self.counts[name] for name in COUNTS} | {name: stored[name] for name in HISTOGRAMS}


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


def hour_of(moment: datetime) -> int:
    """Return the number of the hour of `moment` since 1970, in UTC: a day may have 23 hours, or 25."""
    return int(clock.aware(moment).timestamp() // 3600)


def day_of(moment: datetime) -> date:
    """Return the day of `moment` in `TIME_ZONE`."""
    return (timezone.localtime(moment, timezone.get_default_timezone()) if settings.USE_TZ else moment).date()


def start_of(day: date) -> datetime:
    """Return when `day` begins in `TIME_ZONE`: at midnight, or when the clocks skip that, just after."""
    midnight = datetime.combine(day, time())
    if not settings.USE_TZ:
        return midnight
    return clock.in_utc(midnight.replace(tzinfo=timezone.get_default_timezone()))


def read_settled(
    rows: TimeoutQuerySet, begin: datetime, end: datetime, kind: Any = SettledRow, size: int = READ_ROWS
) -> Iterator[list[Any]]:
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


class Part(NamedTuple):
    """A part of a day."""

    day: date
    begins_at: datetime
    ends_at: datetime


def _left(using: str) -> QuerySet[PolicyDay]:
    """Return what is counted of rows that the ledger still has. Delete what was counted in another time zone."""
    rows = PolicyDay.objects.using(using).filter(is_deleted=False)
    foreign = rows.exclude(zone=settings.TIME_ZONE)
    if foreign.exists():
        foreign.delete()
    return rows


def uncounted(using: str, begin: datetime, end: datetime, until: Mapping[date, datetime]) -> Iterator[Part]:
    """Yield the parts of days from `begin` to `end` in which rows were settled, and that are not counted.

    `until`: until when each day is counted.
    """
    while begin < end:
        day = day_of(begin)
        tomorrow = start_of(day + timedelta(days=1))
        begin = max(begin, until.get(day, begin))
        if begin < min(tomorrow, end):
            settled = Timeout.objects.using(using).filter(settled_at__gte=begin, settled_at__lt=end)
            first: Any = settled.order_by("settled_at").values_list("settled_at", flat=True).first()
            if first is None:
                return
            if first >= tomorrow:
                begin = start_of(day_of(first))
                continue
            yield Part(day, begin, min(tomorrow, end))
        begin = tomorrow


def roll_up(using: str, between: Callable[[], object] = lambda: None) -> None:
    """Count the rows that were settled since the last call, and once more the days that are over.

    Each part is a transaction of its own. Calls `between` between two pages of rows.
    """
    now, left = database_now(using), _left(using)
    settled = Timeout.objects.using(using).filter(settled_at__isnull=False).order_by("settled_at")
    first: Any = settled.values_list("settled_at", flat=True).first()
    begin = now + timedelta(days=1) if first is None else start_of(day_of(first))
    left.filter(day__lt=day_of(begin)).delete()
    markers = list(left.filter(policy=NO_LABEL))
    for part in uncounted(using, begin, now - COMMIT_MARGIN, {marker.day: marker.until for marker in markers}):
        _count(using, part, now, between)
    for marker in markers:
        begins_at, ends_at = start_of(marker.day), start_of(marker.day + timedelta(days=1))
        if marker.counted_at < ends_at + REPAIR_AFTER <= now:
            _count(using, Part(marker.day, begins_at, ends_at), now, between)


def _count(using: str, part: Part, now: datetime, between: Callable[[], object]) -> None:
    """Count `part`, and add it to what is counted of its day, or replace that if it begins with the day.

    If another transaction changes the day meanwhile, nothing is stored.
    """
    is_whole = part.begins_at == start_of(part.day)
    with transaction_of(using):
        marker = _renewed(using, [part.day])[part.day]
    if not is_whole and marker.until != part.begins_at:
        return
    tallies = defaultdict[Any, Tally](Tally)
    for page in read_settled(Timeout.objects.using(using), part.begins_at, part.ends_at):
        for row in page:
            tallies[part.day, row.policy].add(row)
        between()
    with transaction_of(using):
        stored = _left(using).filter(day=part.day)
        if not for_update(stored.filter(policy=NO_LABEL, version=marker.version), using):
            return
        if is_whole:
            stored.exclude(policy=NO_LABEL).delete()
        _change(using, tallies, Tally.merge, is_deleted=False)
        counted_at = now if is_whole else marker.counted_at
        stored.filter(policy=NO_LABEL).update(until=part.ends_at, counted_at=counted_at, version=uuid4())


def _renewed(using: str, days: Iterable[date]) -> dict[date, PolicyDay]:
    """Lock the markers of `days`, also of those that are not counted yet, and give them another version."""
    begins = {day: start_of(day) for day in sorted(days)}
    own: dict[str, Any] = {"policy": NO_LABEL, "zone": settings.TIME_ZONE}
    new = [PolicyDay(day=day, until=begin, counted_at=begin, **own) for day, begin in begins.items()]
    upsert(rows := _left(using), new, KEY, ("version",))
    return {each.day: each for each in for_update(rows.filter(policy=NO_LABEL, day__in=days), using)}


def _change(
    using: str, tallies: Mapping[Any, Tally], change: Callable[[Tally, Tally], None], *, is_deleted: bool
) -> None:
    """Change the stored tallies of days, which are locked, by those of these days and labels."""
    rows = PolicyDay.objects.using(using).filter(is_deleted=is_deleted)
    found = rows.filter(day__in={day for day, _ in tallies}, policy__in={label for _, label in tallies})
    stored = {(each.day, each.policy): Tally.of(each) for each in for_update(found, using)}
    new = []
    for (day, label), tally in sorted(tallies.items()):
        total = stored.get((day, label), Tally())
        change(total, tally)
        columns = {"zone": settings.TIME_ZONE, "is_deleted": is_deleted, **total.columns()}
        new.append(PolicyDay(policy=label, day=day, **columns))
    upsert(rows, new, KEY, tuple(Tally().columns()))


def leave(rows: Iterable[Any], using: str, *, are_deleted: bool = False) -> None:
    """Take those of the locked `rows` that are settled off their days, in the transaction that revives or deletes them.

    `are_deleted`: from now on they count as deleted. The rows are `Timeout` or `SettledRow`.
    """
    settled = [(day_of(row.settled_at), row) for row in rows if row.settled_at is not None]
    if not settled:
        return
    markers = _renewed(using, {day for day, _ in settled})
    counted, deleted = defaultdict[Any, Tally](Tally), defaultdict[Any, Tally](Tally)
    for day, row in settled:
        deleted[day, row.policy].add(row)
        if row.settled_at < markers[day].until:
            counted[day, row.policy].add(row)
    _change(using, counted, Tally.remove, is_deleted=False)
    if are_deleted:
        _change(using, deleted, Tally.merge, is_deleted=True)


def counted(
    using: str, labels: Collection[str] | None, first: date, last: date, limit: int | None = None
) -> tuple[dict[tuple[date, str], Tally], datetime | None]:
    """Count the rows with `labels` (None: with any) that were settled from the day `first` to `last`.

    Return the tallies by day and label; and until when rows are counted, None: all are. `limit`: read no more rows of
    the ledger than about so many.
    """
    ours = Q(is_deleted=True) | Q(zone=settings.TIME_ZONE)
    mine = Q() if labels is None else Q(policy__in=[NO_LABEL, *labels])
    found, counted_until, until = defaultdict[Any, Tally](Tally), dict[date, datetime](), None
    for row in PolicyDay.objects.using(using).filter(ours, mine, day__range=(first, last)):
        if row.policy == NO_LABEL:
            counted_until[row.day] = row.until
        else:
            found[row.day, row.policy].merge(Tally.of(row))
    for part in uncounted(using, start_of(first), start_of(last + timedelta(days=1)), counted_until):
        size = READ_ROWS if limit is None else min(READ_ROWS, limit + 1)
        for page in read_settled(Timeout.objects.using(using), part.begins_at, part.ends_at, size=size):
            limit = limit if limit is None else limit - len(page)
            if limit is not None and limit < 0:
                return found, until or part.begins_at
            for each in page:
                if labels is None or each.policy in labels:
                    found[part.day, each.policy].add(each)
            until = page[-1].settled_at
    return found, None
