"""Count what policies have to do, and how their rounds have ended: by day, by month, or by a field of their objects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime, timedelta
from typing import Any, Final

from django.db import connections, router
from django.db.models import F, Model

from django_delayq.exceptions import DelayqError, suggestion
from django_delayq.ledger.rollups import OVERDUE, SettledRow, Tally, counted, day_of, quantile, read_settled, start_of
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import COUNTS_PER_STATEMENT, MAX_COUNT, YEARS, Count
from django_delayq.models import PolicyDay, Timeout, could_fire_at
from django_delayq.operations.selection import column_at, may_ask_where
from django_delayq.policy.policies import TimeoutPolicy, get_policy, labels_of, registry
from django_delayq.sql.key_types import keys_in, object_id_of
from django_delayq.sql.now import database_now
from django_delayq.sql.statements import Param, Raw, chunks, compiled, params, selected, sql_of

DAYS_SHOWN: Final = 30
"""How many days a report by day covers if nothing else is asked for: as many as the ledger keeps by default."""
MONTHS_SHOWN: Final = 12
"""How many months a report by month covers if nothing else is asked for: a year, of which each month occurs once."""
MAX_EACH: Final = 1_000
"""How many rows of a policy are read: of the last firings, for their lag, and of those due soon, for the count of each
hour (with more, each hour is counted by itself). A day of a busy policy has millions."""
MAX_LATE: Final = 100
"""How many rows that were to run more than a day ago are examined; up to `MAX_COUNT` if all of these are recent."""
HOURS: Final = 24
"""How far the counts of fired timeouts reach back, and those of pending ones ahead: the rhythm of a business."""
MAX_VALUES: Final = 1_000
"""Values by which a report counts; the rest is one line. More is a mistake: each object has a value of its own."""
MAX_READ: Final = 3_000
"""How many rows a page reads from the ledger: what a busy policy settles in a minute, in a tenth of a second."""
TIMES: Final = ("day", "month")
GONE: Final = "(deleted)"
"""The value of objects that do not exist any more."""


State = Timeout.State


def _time(name: str, index: int | None = None) -> Param:
    return Param(Timeout._meta.get_field("run_at"), name, index)


_OF_STATES: Final[dict[str, dict[str, Any]]] = {
    "fired": {"state": State.FIRED, "run_at__gte": _time("recent")},
    "skipped": {"state": State.SKIPPED, "run_at__gte": _time("recent")},
    "firing": {"state": State.FIRING},
    "dead": {"state": State.DEAD},
    "held": {"state": State.HELD},
    "failing": {},
}
"""Counts of a policy with their conditions; failing rows have an index of their own instead."""
COUNTS: Final = (*_OF_STATES, "pending", "overdue", "due")
"""The counts of a policy. One read of pending rows, the soonest first, gives the last three, and those of each hour."""


class InvalidReport(DelayqError, ValueError):
    """The report cannot be made: the field to count by, or the days, are wrong."""


@dataclass(frozen=True, slots=True)
class Figures:
    """How some rounds have ended. The counts add up to `rounds`.

    Attributes:
        name: the day (`2026-03-01`), the month (`2026-03`), the label of the policy, or the value of the field.
        rounds: how many were settled.
        in_time: ended by their condition before their deadline, or while their clock was stopped.
        share: `in_time` of `rounds`; None: there are none.
        ended_late: ended by their condition after their deadline, before they fired.
        fired: fired.
        shadow: would have fired, but their policy was in shadow mode.
        skipped: skipped for another reason, such as by their handler.
        cancelled: cancelled for another reason, such as by hand.
        dead: all attempts have failed.
        late_p50, late_p99: seconds from when rounds could fire to when they fired (`Timeout.lateness`), to 2.5 %.
        time_to_event: median seconds from `since` (without one, from the scheduling) to the end of those that ended in
            time, to 2.5 %.
    """

    name: str
    rounds: int = 0
    in_time: int = 0
    share: float | None = None
    ended_late: int = 0
    fired: int = 0
    shadow: int = 0
    skipped: int = 0
    cancelled: int = 0
    dead: int = 0
    late_p50: float | None = None
    late_p99: float | None = None
    time_to_event: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of `policy_report`.

    Attributes:
        policy: the label of the policy; empty: of all policies.
        by: what it is counted by.
        first, last: the days that it covers, in `TIME_ZONE`.
        lines: one for each day, month, policy or value that has rounds.
        total: all of them together.
        counted_until: rounds that were settled later are not counted yet; None: all are.
    """

    policy: str
    by: str
    first: date
    last: date
    lines: tuple[Figures, ...]
    total: Figures
    counted_until: datetime | None = None


def policy_report(
    policy: str | TimeoutPolicy[Any] | None = None,
    *,
    by: str = "day",
    first: date | None = None,
    last: date | None = None,
    limit: int | None = None,
) -> Report:
    """Report how the rounds of a policy have ended, by the day on which they were settled.

    Days begin at midnight in `TIME_ZONE`. Rows are counted when they are deleted, so that days and months remain. What
    workers have not counted yet is read from the ledger. Rounds under former labels of the policy count for it.

    Args:
        policy: the policy, its label, or a label that only rows have; None: all policies.
        by: `day`, `month`, `policy`, or a field of the object, also along foreign keys: `channel__region`. Fields are
            read from the objects as they are now, and only for rounds that the ledger still has.
        first: the first day; by default 30 days before `last`, and for months the first of the month a year before.
        last: the last day, by default today.
        limit: read at most about so many rows of the ledger; see `Report.counted_until`.

    Raises:
        InvalidReport: the model has no such field, or `first` is after `last`.
        UnknownPolicy: there is no such policy.
    """
    label, labels, using = _asked(policy)
    first, last = _days(by, first, last, using)
    if by in (*TIMES, "policy"):
        found, until = counted(using, labels, first, last, limit)
        tallies: dict[str, Tally] = {}
        for (day, name), tally in sorted(found.items()):
            tallies.setdefault(_name_of(by, day, name), Tally()).merge(tally)
    else:
        declared = None if not label else registry.get(label)
        if declared is None:
            raise InvalidReport(f"A report by {by!r} needs a declared policy. Without one: day, month or policy.")
        tallies, until = _by_field(declared, by, start_of(first), start_of(last + timedelta(days=1)), limit)
    total = Tally()
    for tally in tallies.values():
        total.merge(tally)
    lines = tuple(figures(name, tally) for name, tally in tallies.items())
    return Report(label, by, first, last, lines, figures("total", total), until)


def _asked(policy: str | TimeoutPolicy[Any] | None) -> tuple[str, Collection[str] | None, str]:
    """Return the label, all labels of the policy, and the database. Raises UnknownPolicy."""
    if policy is None:
        return "", None, router.db_for_write(Timeout)
    using = router.db_for_write(Timeout)
    if isinstance(policy, str) and registry.get(policy) is None and "\0" not in policy:  # PostgreSQL refuses a NUL
        # One that is not declared any more may have left rows or days.
        rows, days = Timeout.objects.using(using).of_labels([policy]), PolicyDay.objects.using(using)
        if rows.exists() or (policy and days.filter(policy=policy).exists()):
            return policy, (policy,), using
    found = get_policy(policy)
    return found.label, found.labels, database_of(found.concrete_model)


def _days(by: str, first: date | None, last: date | None, using: str) -> tuple[date, date]:
    last = last or day_of(database_now(using))
    if last.year in YEARS and first is None:
        months, days = last.year * 12 + last.month - MONTHS_SHOWN, timedelta(days=DAYS_SHOWN - 1)
        first = date(months // 12, months % 12 + 1, 1) if by == "month" else last - days
    if first is None or first > last or not {first.year, last.year}.issubset(YEARS):
        raise InvalidReport(f"The first day, {first}, is after the last one, {last}, or too far away.")
    return first, last


def _name_of(by: str, day: date, label: str) -> str:
    if by == "policy":
        return labels_of(label)[0]
    return f"{day:%Y-%m}" if by == "month" else f"{day:%Y-%m-%d}"


def figures(name: str, tally: Tally) -> Figures:
    """Return the figures of a tally."""
    rounds = tally.counts.total()
    return Figures(
        name=name,
        rounds=rounds,
        share=tally.counts["in_time"] / rounds if rounds else None,
        late_p50=quantile(tally.lateness, 0.5),
        late_p99=quantile(tally.lateness, 0.99),
        time_to_event=quantile(tally.waits, 0.5),
        **tally.counts,
    )


def _by_field(
    policy: TimeoutPolicy[Any], path: str, begin: datetime, end: datetime, limit: int | None
) -> tuple[dict[str, Tally], datetime | None]:
    """Return the tally of each value of a field, the one with most rounds first, and until when rows were read."""
    tallies: dict[str, Tally] = {}
    until: datetime | None = None
    using = database_of(policy.concrete_model)
    values_at(policy, path, [], using)  # refuses a wrong path also if there are no rows
    for page in read_settled(Timeout.objects.using(using), begin, end):
        limit = limit if limit is None else limit - len(page)
        if limit is not None and limit < 0:
            break
        rows = [row for row in page if row.policy in policy.labels]
        values = values_at(policy, path, rows, using)
        for row in rows:
            name = values.get(row.object_id, GONE)
            name = name if name in tallies or len(tallies) < MAX_VALUES else "..."
            tallies.setdefault(name, Tally()).add(row)
        until = page[-1].settled_at
    ordered = dict(sorted(tallies.items(), key=lambda item: (-item[1].counts.total(), item[0])))
    return ordered, None if limit is None or limit >= 0 else until or begin


def values_at(policy: TimeoutPolicy[Any], path: str, rows: Iterable[SettledRow], using: str) -> dict[str, str]:
    """Return the value at `path` of each object, by its id in `rows`. Raises InvalidReport.

    Without a value for objects that are gone; empty for those where the value, or a relation on the way, is NULL.
    """
    model = policy.concrete_model
    if column_at(model, path) is None:
        hint = suggestion(path, (each.name for each in model._meta.concrete_fields), "Or along foreign keys: a__b.")
        raise InvalidReport(f"{model.__name__} has no column {path!r} to count by. {hint}")
    keys = keys_in(model, {row.object_id for row in rows}).values()
    found = model._base_manager.using(using).filter(pk__in=list(keys)).values_list("pk", F(path))
    return {object_id_of(model, pk): "" if value is None else str(value) for pk, value in found}


def may_count_by(user: Any, model: type[Model], path: str) -> bool:
    """Return whether `user` may see the values at `path`, not passwords; also True if there is no such path."""
    is_named = path.rpartition("__")[2] != "password"
    return is_named and (column_at(model, path) is None or may_ask_where(user, model, [path]))


FIGURES: Final = tuple(field.name for field in fields(Figures))


def csv_rows(report: Report) -> Iterator[list[str]]:
    """Yield the cells of a CSV file: the headings, the lines, the total. A spreadsheet runs none of them as a formula.

    Durations are in seconds, and shares from 0 to 1.
    """
    yield [report.by if name == "name" else name for name in FIGURES]
    for line in (*report.lines, report.total):
        cells = ("" if value is None else str(value) for value in (getattr(line, name) for name in FIGURES))
        yield [f"'{cell}" if re.match(r"[\t\r\n]|\s*[-=+@]", cell) else cell for cell in cells]


@dataclass
class PolicyFigures:
    """What was read of the rows of one policy."""

    numbers: Counter[int] = field(default_factory=Counter)
    """In the order of `COUNTS`, and then how many fall due in each of the next hours."""
    fired: list[Any] = field(default_factory=list)
    due: list[datetime] = field(default_factory=list)

    def attributes(self, now: datetime, since: datetime | None = None) -> dict[str, Any]:
        """Return attributes of `PolicyStatus`; `since`: when its last stop ended. No row has waited for longer."""
        counts = [Count(min(value, MAX_COUNT), value > MAX_COUNT) for _, value in sorted(self.numbers.items())]
        lags = sorted(max(0.0, (at - could_fire_at(*columns)).total_seconds()) for at, *columns in self.fired)
        oldest = max(min(self.due), since or min(self.due)) if self.due else None
        return {
            **dict(zip(COUNTS, counts, strict=False)),
            "oldest_due_at": oldest,
            "waited_seconds": max(0.0, (now - oldest).total_seconds()) if oldest else None,
            "last_fired_at": max((settled_at for settled_at, *_ in self.fired), default=None),
            **{f"lag_p{part}": lags[len(lags) * part // 100] if lags else None for part in (50, 99)},
            "hours": tuple(counts[len(COUNTS) :]),
        }


def read_figures(owners: dict[str, str], using: str, now: datetime, hours: int) -> dict[str, PolicyFigures]:
    """Read the figures of each policy, with so many `hours`; `owners` has the policy of each label.

    With as many statements for many policies as for one. Those with many rows in the next hours need further ones.
    """
    found = {owner: PolicyFigures() for owner in owners.values()}
    starts = [now + timedelta(hours=number) for number in range(hours + 1)]
    at = dict[str, Any](now=now, overdue=now - OVERDUE, recent=now - timedelta(hours=HOURS), starts=starts)

    def add(numbers: Iterable[tuple[str, Sequence[int]]], first: int = 0) -> None:
        for label, values in numbers:
            found[owners[label]].numbers.update(dict(enumerate(values, first)))

    for labels in chunks(list(owners), COUNTS_PER_STATEMENT):
        add(_counts(using, at, labels, MAX_COUNT + 1))
        soon = dict(_soon(using, at, labels, hours) if hours else ())
        for part in chunks([busy for busy in soon if sum(soon[busy]) == MAX_EACH], COUNTS_PER_STATEMENT // HOURS):
            soon |= _hours(using, at, part, MAX_COUNT + 1)
        add(soon.items(), len(COUNTS))
        late = dict(_late(using, at, labels, MAX_LATE))
        late |= _late(using, at, [label for label in labels if MAX_LATE in late[label]], MAX_COUNT + 1)
        add(late.items())
        # One that was armed long after its deadline, as by a backfill, has not waited since then.
        for label, times in _oldest_due(using, at, labels):
            found[owners[label]].due.append(max(times))
        for label, columns in _last_fired(using, at, labels):
            found[owners[label]].fired.append(columns)
    return found


def _of_each_label(build: Callable[..., Raw]) -> Callable[..., Iterator[tuple[str, list[Any]]]]:
    """Read several labels by a statement that `build` makes for one: yield the label of each row, and its values.

    `build` gets the rows of the label in the order of the index.
    """

    @compiled
    def union(using: str, size: int, *shape: Any) -> Raw:
        rows = Timeout.objects.using(using).order_by("policy", "state", "run_at", "id")
        parts = [build(rows.filter(policy=label), using, *shape) for label in params("policy", size)]
        sql = " UNION ALL ".join(f"SELECT part.*, {place} FROM ({each.sql}) part" for place, each in enumerate(parts))
        return Raw(sql, [value for each in parts for value in each.parameters], parts[0].returning)

    def read(using: str, at: dict[str, Any], labels: Sequence[str], *shape: Any) -> Iterator[tuple[str, list[Any]]]:
        for *values, place in union.rows(using, len(labels), *shape, **at, policy=labels) if labels else ():
            yield labels[place], values

    return read


@_of_each_label
def _counts(rows: Any, using: str, most: int) -> Raw:
    """Count the rows in the order of `COUNTS`."""
    failing = rows.failing().order_by("policy", "state", "attempts", "id")
    counted = (rows.filter(**each) if each else failing for each in _OF_STATES.values())
    numbers = _numbers(_selected([], each[:most], using) for each in counted)
    pending, own = sql_of(rows.filter(state=State.PENDING).values("run_at")[:most], using)
    due = ", ".join(f"COUNT(CASE WHEN run_at <= %s THEN 1 END) AS {name}" for name in ("overdue", "due"))
    sql = f"{numbers.sql}, COUNT(*) AS pending, {due} FROM ({pending}) last"
    return Raw(sql, [*numbers.parameters, _time("overdue"), _time("now"), *own])


@_of_each_label
def _soon(rows: Any, using: str, hours: int) -> Raw:
    """Count the pending rows that fall due in each of the next hours, among the first `MAX_EACH` of them."""
    soon, own = sql_of(_due_within(rows, 0, hours).values("run_at")[:MAX_EACH], using)
    times = (_time("starts", place) for each in range(hours) for place in (each, each + 1))
    hour = "COUNT(CASE WHEN run_at > %s AND run_at <= %s THEN 1 END) AS hour"
    return Raw(f"SELECT {', '.join(f'{hour}{each}' for each in range(hours))} FROM ({soon}) last", [*times, *own])


@_of_each_label
def _hours(rows: Any, using: str, most: int) -> Raw:
    """Count the pending rows that fall due in each of the next hours, at most so many."""
    return _numbers(_selected([], _due_within(rows, each, each + 1)[:most], using) for each in range(HOURS))


def _due_within(rows: Any, begin: int, end: int) -> Any:
    return rows.filter(state=State.PENDING, run_at__gt=_time("starts", begin), run_at__lte=_time("starts", end))


@_of_each_label
def _oldest_due(rows: Any, using: str) -> Raw:
    rows = rows.filter(state=State.PENDING, run_at__lte=_time("now"))[:MAX_LATE]
    return _selected(["run_at", "created_at"], rows, using)


@_of_each_label
def _late(rows: Any, using: str, examined: int) -> Raw:
    """Count the rows that fired, and those that were skipped, in the last day although they were to run before.

    No index has both times. But rows that were late together, because nothing could fire, follow each other in the
    index of the policy, immediately before those of the last day. So only the last `examined` rows are read.
    """
    before = (rows.filter(state=state, run_at__lt=_time("recent")).reverse() for state in (State.FIRED, State.SKIPPED))
    return _numbers(_selected([], each[:examined], using, is_recent=True) for each in before)


@_of_each_label
def _last_fired(rows: Any, using: str) -> Raw:
    """Select the times of the last rows that fired, if they fired in the last day, for `could_fire_at`."""
    names = ["settled_at", "due_at", "created_at", "ready_at", "run_at", "attempts"]
    return _selected(names, rows.filter(state=State.FIRED).reverse()[:MAX_EACH], using, is_recent=True)


def _numbers(parts: Iterable[Raw]) -> Raw:
    """Select the numbers that the `parts` select as one row."""
    given = list(parts)
    columns = ", ".join(f"({each.sql}) AS n{place}" for place, each in enumerate(given))
    return Raw(f"SELECT {columns}", [value for each in given for value in each.parameters])


def _selected(names: list[str], rows: Any, using: str, *, is_recent: bool = False) -> Raw:
    """Select columns of `rows`, or their number without `names`; with `is_recent`, of those settled in the last day."""
    fields: list[Any] = [Timeout._meta.get_field(name) for name in names]
    columns = ", ".join(selected(f"last.{each.column}", each, connections[using]) for each in fields) or "COUNT(*)"
    sql, values = sql_of(rows.values(*names or ["settled_at" if is_recent else "pk"]), using)
    recent, condition = [_time("recent")] * is_recent, " WHERE last.settled_at >= %s" * is_recent
    return Raw(f"SELECT {columns} FROM ({sql}) last{condition}", [*values, *recent], fields)
