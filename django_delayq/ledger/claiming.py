"""Claims, the leases of workers without Redis: claim due rows for a while, extend claims, release them.

A worker that dies with a claim leaves its count behind, so that the row is a poison suspect when it is claimed again.
A claim decides nothing else: any worker may fire a claimed row, once.

The timeouts of policies with a rate are claimed in slots, which all workers share. `RateShare` has when the next one is
free; if the rate counts by a value, of each value. The row of the empty value is the lock of the policy. `meter` locks
and changes other counters that workers share, such as those of brakes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil
from time import monotonic
from typing import Any, Final, NamedTuple

from django.db import connections
from django.db.models import CharField, Exists, F, Min, OuterRef, Q, QuerySet, TextField, Value, Window
from django.db.models.expressions import RawSQL
from django.db.models.functions import RowNumber

from django_delayq.conf import get_settings
from django_delayq.ledger.controls import stops_in_force
from django_delayq.ledger.locking import delete_free, for_update, transaction_of
from django_delayq.ledger.marking import lock_free, update_free
from django_delayq.ledger.paging import update_each
from django_delayq.ledger.shares import lock_share, provide_lock
from django_delayq.models import PolicyMeter, RateShare, Timeout, TimeoutQuerySet
from django_delayq.policy.options import MAX_STORED, Rate
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.now import DatabaseNow, database_now, evaluated_at_execution
from django_delayq.sql.statements import Param, Raw, chunks, compiled, sql_of, upsert
from django_delayq.times.clock import is_set

AHEAD_SECONDS: Final = 1.0
"""How far ahead of time slots are assigned. A worker that dies loses that many of them at most."""
TURN_SECONDS: Final = 0.5
"""How long before the next free slot it is assigned. Until then the worker that got the last ones fires in order."""
LATENESS_PART: Final = 16
"""Slots are valid for this fraction of the period. With a longer one the rate would be lower than declared."""
MIN_LATENESS_SECONDS: Final = 0.01
"""A thread needs some milliseconds to begin: with less, most slots of short periods would be lost."""
MAX_LATENESS_SECONDS: Final = 2.0
"""Without it, a timeout with a rate per hour could be fired minutes after its slot."""


class Slot(NamedTuple):
    """From when until when one work of a policy with a rate may begin, by `time.monotonic()` of this process.

    Not the column `slot` of a timeout, which at most one pending timeout may hold.
    """

    begin_at: float
    begin_by: float
    share: str = ""
    """The value whose slot it is, if the rate counts by one: see `ledger.shares`."""


@dataclass(frozen=True, slots=True)
class Spacing:
    """The slots in which works of a policy with a rate begin: one each `interval` seconds, for `size` timeouts at most.

    A work begins a little later than its slot, by at most `lateness` seconds; then the slot is lost. The interval
    includes that: a slot, and the first one that would be too many in a period, lie a period plus `lateness` apart.
    A part of it is left for the step from the last check to the handler.
    """

    size: int
    interval: float
    lateness: float

    @classmethod
    def of(cls, rate: Rate, together: int = 1) -> Spacing:
        """Return the spacing for works of at most `together` timeouts."""
        works, period = -(-rate.count // together), rate.per.total_seconds()
        lateness = min(max(period / LATENESS_PART, MIN_LATENESS_SECONDS), MAX_LATENESS_SECONDS)
        return cls(rate.count // works, (period + lateness) / works, lateness)

    def slots(self, free_in: float, soonest: float, timeouts: int) -> list[float]:
        """Return in how many seconds each of at most so many timeouts may begin; [] if it is too early to ask.

        Those of one work begin together.

        Args:
            free_in: when the first slot is free that is not assigned. No slot is assigned so far ahead that it can be
                much later than `AHEAD_SECONDS` and an interval: then the clock was set back, or the rate was lower.
            soonest: how long the caller needs to prepare a work.
        """
        first = soonest if free_in > self.furthest_seconds else max(soonest, free_in)
        if first > TURN_SECONDS:
            return []
        count = min(timeouts, self.size * (1 + int((AHEAD_SECONDS - first) / self.interval)))
        return [first + number // self.size * self.interval for number in range(count)]

    def slot(self, at: float, share: str) -> Slot:
        """Return the slot that begins `at`."""
        return Slot(at, at + 0.7 * self.lateness, share)

    @property
    def furthest_seconds(self) -> float:
        """Return how far ahead the first free slot may be, beyond which it is not believed: see `slots`."""
        return AHEAD_SECONDS + self.interval + 0.1


@contextmanager
def meter(policy: str, name: str, using: str) -> Iterator[dict[str, Any]]:
    """Lock a counter and yield its state, plain types for JSON; store what the block changes in it.

    The block runs in a transaction of its own, which locks the row until it commits: keep it short. An exception rolls
    everything back, and leaves the counter as it was.

    Args:
        policy: the present label of the policy.
        name: which counter of the policy; it is created, with an empty state, at its first use.
        using: the database.

    Raises:
        django.db.Error: the database failed.
    """
    rows = PolicyMeter.objects.using(using).filter(policy=policy, name=name)
    if not rows.exists():
        # Outside the transaction: where two workers insert it at once, InnoDB would let both lock it, and then abort
        # one that wants to write.
        PolicyMeter.objects.using(using).bulk_create([PolicyMeter(policy=policy, name=name)], ignore_conflicts=True)
    with transaction_of(using):
        [row] = for_update(rows, using)
        yield row.state
        rows.update(state=row.state)


CHUNK = 200
"""So many rows are locked in one transaction: handlers of other workers wait for its end."""
LONGEST_DEFERRAL = timedelta(minutes=2)
"""A row that cannot be fired now is deferred for less. One that is claimed for longer was claimed by a clock that was
ahead."""


class Claimed(NamedTuple):
    """What was claimed: how often each id was and not released, until when, the database's time, and the labels."""

    claims: Mapping[int, int]
    until: datetime
    now: datetime
    labels: Mapping[int, str] = {}
    """By id; of `claim_each`."""


class Granted(NamedTuple):
    """The result of `claim_in_slots`: the claimed rows with their slots, and for how long no more can be had."""

    claimed: Claimed
    slots: Mapping[int, Slot]
    wait_seconds: float
    has_more: bool = False
    """Rows are due that wait for a slot; or it is not known, because there was no slot."""


def claimable(using: str, queues: Sequence[str] | None, label: str, ahead: timedelta = timedelta(0)) -> TimeoutQuerySet:
    """Return the rows of a label that are not claimed and due, or due within `ahead`, longest due first.

    `queues` None: of all queues.
    """
    rows = Timeout.objects.using(using).pending().filter(_unclaimed(_longest_claim()), policy=label)
    rows = rows.filter(run_at__lte=DatabaseNow() + ahead if ahead else DatabaseNow())
    return (rows if queues is None else rows.filter(queue__in=queues)).order_by("run_at", "id")


def _longest_claim() -> timedelta:
    return max(get_settings().longest_lease, LONGEST_DEFERRAL)


def _unclaimed(longest: timedelta) -> Q:
    free = Q(claimed_until__isnull=True) | Q(claimed_until__lte=DatabaseNow())
    return free | Q(claimed_until__gt=DatabaseNow() + longest)


def labels_with_claimable(
    using: str, queues: Sequence[str] | None, labels: Sequence[str], ahead: timedelta = timedelta(0)
) -> dict[str, bool]:
    """Return those of `labels` for which `claim_each` would find a row, and whether it is due already.

    Not those under which a stop is in force. One query with one index lookup for each label, whatever the rows of the
    others.
    """
    asked = json.dumps([{"label": label} for label in labels])
    shape = None if queues is None else tuple(queues), _longest_claim(), ahead
    found = _claimable_labels.rows(using, *shape, asked=asked) if labels else ()
    return {label: bool(is_due) for label, is_due in found}


@compiled
def _claimable_labels(using: str, queues: tuple[str, ...] | None, longest: timedelta, ahead: timedelta) -> Raw:
    """Compare the first unclaimed row of each label with the clock.

    Not a search for due rows: MariaDB would look for them by their time alone, and read all due rows of the ledger for
    each label. Nor for unsettled ones: PostgreSQL would do the same by the index of these.
    """
    connection, field = connections[using], Timeout._meta.get_field("policy")
    dialect, table = dialect_of(connection), Timeout._meta.db_table
    label = RawSQL(dialect.in_collation_of("asked.label", connection, table, "policy"), (), output_field=CharField())
    rows = Timeout.objects.using(using).filter(_unclaimed(longest), policy=label, state=Timeout.State.PENDING)
    rows = rows if queues is None else rows.filter(queue__in=queues)
    first, of_first = sql_of(rows.order_by("run_at", "id").values("run_at")[:1], using)
    stops, of_stops = sql_of(stops_in_force(using).filter(policy=label).values("pk"), using)
    compiler = rows.query.get_compiler(using)
    with evaluated_at_execution():
        now, of_now = compiler.compile(DatabaseNow())
        end, of_end = compiler.compile((DatabaseNow() + ahead).resolve_expression(rows.query))
    source = dialect.rows_of_json({"label": f"varchar({field.max_length})"}, "asked")
    asked = f"SELECT asked.label, ({first}) AS first, EXISTS ({stops}) AS is_stopped FROM {source}"
    sql = f"SELECT label, first <= {now} FROM ({asked}) found WHERE first <= {end} AND NOT is_stopped"
    return Raw(sql, [*of_now, *of_first, *of_stops, Param(TextField(), "asked"), *of_end])


def claim_each(
    using: str,
    queues: Sequence[str] | None,
    limits: Mapping[str, int],
    seconds: timedelta,
    ahead: timedelta = timedelta(0),
) -> Claimed:
    """Claim at most so many rows of each label for `seconds`, which are due or will be within `ahead`.

    Rows that other transactions have locked are left.
    """
    found: dict[int, int] = {}
    labels: dict[int, str] = {}
    with transaction_of(using):
        now = database_now(using)
        for label, limit in limits.items():
            rows = for_update(claimable(using, queues, label, ahead), using, wait=False)
            of_label = dict(rows.values_list("id", "claims")[:limit])
            found |= of_label
            labels |= dict.fromkeys(of_label, label)
        return _mark_claimed(found, now, seconds, using)._replace(labels=labels)


def claim_in_slots(
    policy: TimeoutPolicy[Any],
    using: str,
    queues: Sequence[str] | None,
    *,
    limit: int,
    seconds: timedelta,
    preparation: float,
) -> Granted | None:
    """Claim at most `limit` due rows of a policy with a rate, as many as may begin soon, each with its slot.

    The transaction holds the lock of the policy while it claims. So over all workers the order of the slots is that of
    the deadlines, and a slot is used up only if there is a row for it. If the rate counts by a value, this holds for
    each value by itself.

    Args:
        policy: its `limits` have a rate.
        using, queues: as in `claimable`.
        limit: at least 1.
        seconds: how long the claims last.
        preparation: how many seconds from now the first slot is at the earliest.

    Returns:
        None: another worker is claiming rows of the policy.

    Raises:
        django.db.Error: the database failed.
    """
    provide_lock(policy, "", using, timedelta(0))
    with transaction_of(using):
        if not lock_share(policy, "", using):
            return None
        due = _DueRows(policy, using, queues, database_now(using))
        return due.grant(min(limit, CHUNK) if policy.counts_by else limit, seconds, preparation, monotonic())


class _Due(NamedTuple):
    run_at: datetime
    id: int
    claims: int
    share: str


class _DueRows:
    """The due rows of a policy with a rate, while its slots are locked.

    The first rows by deadline are nearly always all there are. Where they are a part, and the rate counts by a value, a
    value with a long backlog could have all of them: then the first rows of the other values are read, too, without
    those whose next slot is not free.
    """

    def __init__(self, policy: TimeoutPolicy[Any], using: str, queues: Sequence[str] | None, now: datetime) -> None:
        assert policy.rate is not None
        self._policy, self._using, self._queues, self._now = policy, using, queues, now
        self._by, self._spacing = policy.counts_by, Spacing.of(policy.rate, policy.transaction_size)
        self._free_in = defaultdict[str, float](float)
        """In how many seconds the next slot of each value is free."""

    def grant(self, limit: int, seconds: timedelta, preparation: float, arrived: float) -> Granted:
        """Claim at most `limit` rows, those with the earliest slots; see `claim_in_slots`."""
        count, others = 2 * limit, list[_Due]()
        if not self._by:  # without any slot no row is read
            self._read_slots({""})
            count = len(self._spacing.slots(self._free_in[""], preparation, limit))
        first, is_all = self._first(count)
        shares = {row.share for row in first}
        if self._by:
            self._read_slots(shares)
        if self._by and not is_all and sum(self._free_in[each] <= TURN_SECONDS for each in shares) < limit:
            others = self._of_others(shares, limit)
        due = defaultdict[str, list[_Due]](list)
        for row in sorted([*first, *self._locked(others)]):
            due[row.share].append(row)
        offers = list[tuple[float, _Due]]()
        for share, rows in due.items():
            offers += zip(self._spacing.slots(self._free_in[share], preparation, len(rows)), rows, strict=False)
        chosen = sorted(offers)[:limit]
        self._store({row.share: at + self._spacing.interval for at, row in chosen})
        claimed = _mark_claimed({row.id: row.claims for _, row in chosen}, self._now, seconds, self._using)
        slots = {row.id: self._spacing.slot(arrived + at, row.share) for at, row in chosen}
        left = {row.share for row in (*first, *others) if row.id not in slots}
        has_more, wait = bool(left) or not is_all, self._free_in[""] - TURN_SECONDS
        if self._by:
            wait = self._seconds_left(left, shares, is_all=is_all) if has_more and len(chosen) < limit else 0.0
        return Granted(claimed, slots, max(0.0, wait), has_more)

    def _first(self, count: int) -> tuple[list[_Due], bool]:
        """Lock the first due rows by deadline, at most `count` of each label; return them, and whether they are all."""
        rows, is_all = list[_Due](), True
        columns = ("run_at", "id", "claims", "share" if self._by else Value(""))
        for label in self._policy.labels:
            due = for_update(self._due(label), self._using, wait=False)
            found = [_Due(*row) for row in due.values_list(*columns)[:count]]
            rows, is_all = rows + found, is_all and len(found) < count
        return rows, is_all

    def _of_others(self, shares: Collection[str], count: int) -> list[_Due]:
        """Return due rows of values other than `shares` whose next slot is free, the first ones of each value first."""
        place = Window(RowNumber(), partition_by="share", order_by=["run_at", "id"])
        found = list[tuple[Any, ...]]()
        for label in self._policy.labels:
            rows = self._due(label).exclude(share__in=shares)
            if not is_set():
                rows = rows.filter(~Exists(self._waiting().filter(share=OuterRef("share"))))
            rows = rows.annotate(place=place).order_by("place", "run_at", "id")
            found += rows.values_list("place", *_Due._fields)[:count]
        others = sorted(_Due(*row) for _, *row in sorted(found)[:count])
        self._read_slots({row.share for row in others})
        return others

    def _due(self, label: str) -> TimeoutQuerySet:
        return claimable(self._using, self._queues, label)

    def _waiting(self) -> QuerySet[RateShare]:
        """Return the values whose next slot is not free yet."""
        until = DatabaseNow() + timedelta(seconds=self._spacing.furthest_seconds)
        rows = RateShare.objects.using(self._using).filter(policy=self._policy.label, free_at__lte=until)
        return rows.filter(free_at__gt=DatabaseNow() + timedelta(seconds=TURN_SECONDS))

    def _read_slots(self, shares: Collection[str]) -> None:
        if shares and not is_set():  # a clock that a test has stopped would free no slot after the first ones
            rows = RateShare.objects.using(self._using).filter(policy=self._policy.label, share__in=shares)
            for share, free_at in rows.values_list("share", "free_at"):
                self._free_in[share] = (free_at - self._now).total_seconds()

    def _locked(self, rows: Sequence[_Due]) -> list[_Due]:
        """Lock `rows`; return those that are still due, and that no other transaction has locked."""
        free, every = set[int](), Timeout.objects.using(self._using).due().filter(_unclaimed(_longest_claim()))
        for ids in chunks(sorted(row.id for row in rows)):
            free.update(lock_free(every.filter(pk__in=ids), self._using))
        return [row for row in rows if row.id in free]

    def _store(self, free_in: Mapping[str, float]) -> None:
        """Store when the next slots of these values are free, in one statement."""
        self._free_in.update(free_in)
        times = {share: self._now + timedelta(milliseconds=ceil(1000 * each)) for share, each in free_in.items()}
        rows = [RateShare(policy=self._policy.label, share=share, free_at=times[share]) for share in sorted(times)]
        upsert(RateShare.objects.using(self._using), rows, ("policy", "share"), ("free_at",))

    def _seconds_left(self, left: Collection[str], known: Collection[str], *, is_all: bool) -> float:
        """Return for how long nothing can be claimed: until a value with due rows has a slot, or a row becomes due.

        Negative or 0: more may be claimed now.
        """
        times = [self._free_in[share] - TURN_SECONDS for share in left]
        coming = Timeout.objects.using(self._using).filter(state=Timeout.State.PENDING, run_at__gt=DatabaseNow())
        for label in self._policy.labels:
            next_at = coming.filter(policy=label).order_by("run_at", "id").values_list("run_at", flat=True)[:1]
            times += [(run_at - self._now).total_seconds() for run_at in next_at]
            if not is_all:
                # DISTINCT, or PostgreSQL would read all due rows again for each value that waits and has none.
                due = self._due(label).exclude(share__in=known).order_by().values("share").distinct()
                free_at = self._waiting().filter(share__in=due).aggregate(first=Min("free_at"))["first"]
                times += [(free_at - self._now).total_seconds() - TURN_SECONDS] if free_at else []
        return min(times, default=0.0)


def forget_free_shares(using: str) -> None:
    """Delete the rows of values whose next slot is free: without a row it is free, too.

    Not those that are locked: a firing has them until its handler has returned.
    """
    delete_free(RateShare.objects.using(using).filter(free_at__lte=DatabaseNow()).order_by("pk"), using)


def _mark_claimed(found: Mapping[int, int], now: datetime, seconds: timedelta, using: str) -> Claimed:
    """Claim the locked rows `found`, whose claims are given."""
    for ids in chunks(list(found), CHUNK):
        unspent = Timeout.objects.using(using).filter(pk__in=ids, claims__lt=MAX_STORED)
        unspent.update(claims=F("claims") + 1, claimed_until=now + seconds)
    return Claimed({id: count + 1 for id, count in found.items()}, now + seconds, now)


def extend(ids: Collection[int], until: datetime, seconds: timedelta, using: str) -> tuple[datetime, list[int]]:
    """Extend the claims of those of `ids` that are still claimed `until` then; return until when, and which.

    The new claims last `seconds` from now. Locked rows stay as they are: they are locked while their handler runs,
    and no worker claims a locked row. One transaction: pass at most `CHUNK` ids.
    """
    longer = database_now(using) + seconds
    rows = Timeout.objects.using(using).filter(pk__in=ids, claimed_until=until)
    return longer, update_free(rows, using, claimed_until=longer)


def release(again: Mapping[int, datetime], until: datetime, using: str) -> list[int]:
    """Release the rows that are still claimed `until` then, and do not count that claim; return the locked ones.

    Each may be claimed again from its datetime in `again`; at once if its `run_at` is not earlier, because the row may
    be moved forward. Rows that other transactions have locked stay as they are, which is often why they are released.
    """
    locked: list[int] = []
    for ids in chunks(list(again), CHUNK):
        claimed = Timeout.objects.using(using).filter(pk__in=ids, claimed_until=until, claims__gt=0)
        with transaction_of(using):
            rows = list(for_update(claimed.only("run_at", "claims").order_by("pk"), using, wait=False))
            for row in rows:
                row.claims -= 1
                row.claimed_until = None if row.run_at >= again[row.pk] else again[row.pk]
            update_each(rows, using, tuple(Timeout.State))
        if len(rows) < len(ids):
            locked += claimed.exclude(pk__in=[row.pk for row in rows]).values_list("pk", flat=True)
    return locked
