"""Make the ledger fit the tables: after `QuerySet.update`, `bulk_create`, raw SQL, a crash, a restored backup.

In both directions, page by page: arm rows that match a policy but have no round, and cancel pending rounds whose object
no longer matches, after the same locked check as on saving. Several syncs may run at the same time.

An object for which a callable of the policy raises stays as it is, and the sync continues with the others.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from django.db.models import Model, Q, QuerySet

from django_delayq.arming.changes import Arming, Failures
from django_delayq.arming.reconcile import arm_many, arm_readable, oldest_in_sync
from django_delayq.arming.scan import Step, candidates, steps
from django_delayq.backoff import Backoff
from django_delayq.conf import get_settings
from django_delayq.ledger import declarations, writing
from django_delayq.ledger.db_connections import needs_new_connection, transient_reason
from django_delayq.ledger.error_texts import message_of, shown
from django_delayq.ledger.locking import lock_in_slot_order, rows_of, transaction_of
from django_delayq.ledger.outbox import line_of
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import Count
from django_delayq.ledger.subjects import instances, kind_of, objects_of
from django_delayq.models import PolicySync, Timeout
from django_delayq.policy.policies import TimeoutPolicy, get_policies
from django_delayq.policy.reads import policies_by_table
from django_delayq.sql.key_types import object_id_of, pk_of, root_of_key
from django_delayq.sql.now import DatabaseNow, database_now
from django_delayq.sql.statements import CHUNK, chunks
from django_delayq.times import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

logger = logging.getLogger("django_delayq.worker")

LOCKED = 15
"""The number of objects that one transaction of the sync locks, so that others wait at most 20 ms of CPU time."""
SHARE = 0.05
"""The part of one core that the regular sync may use, in this process and in the database, over all workers."""
SLICE_SECONDS = 0.1
"""After so much work the regular sync pauses: without pauses it would take a core for a large table."""
EARLY = 0.9
"""A pass may begin after this part of an interval, so that it is due when a worker comes back after one."""
CLAIM = 0.5
"""The part of an interval for which a worker has the claim. If it dies, another one continues soon."""
PROGRESS = ("place", "checked", "total", "failed", "failed_total", "before_at", "began_at", "finished_at")
"""The columns of `PolicySync` that a slice writes."""
AWAY = 10
"""After so many intervals without a sync, workers were away. Deadlines that passed long before are left alone."""


class Synced(NamedTuple):
    """What a sync changed, or with `dry_run` would have changed."""

    armed: int = 0
    moved: int = 0
    cancelled: int = 0
    too_old: int = 0
    held: int = 0
    resumed: int = 0

    def __add__(self, other: tuple[int, ...]) -> Synced:  # type: ignore[override]
        """Return the sums, not a longer tuple."""
        return Synced(*map(operator.add, self, other))


def sync_timeouts(target: Model | QuerySet[Any] | Iterable[Model]) -> int:
    """Arm, move and cancel the timeouts of these objects as saving each would; return how many changed.

    For after `QuerySet.update`, `bulk_create` and raw SQL. Takes an object, a queryset (evaluated again) or an
    iterable of objects; a `Timeout` means its object. Each page of 500 is one transaction, or part of the caller's.
    Sends no signals.

    Raises:
        ValueError: an object without a primary key; nothing is written.
        TypeError: `target` is something else.
    """
    changed = 0
    for model, using, objects in list(_targets(target)):
        for policies in policies_by_table(model):
            table: Any = policies[0].concrete_model
            if isinstance(objects, QuerySet):
                found: Iterable[Any] = objects.values_list(table._meta.pk.name, flat=True)
            else:
                found = map(policies[0].pk_of, objects)
            for pks in chunks(sorted(set(map(root_of_key(table).to_python, found)))):
                changed += len(arm_many(policies, pks, Arming(using, get_settings().catch_up)).pks)
    return changed


def automatic_policies(using: str) -> list[TimeoutPolicy[Any]]:
    """Return the automatic policies whose table is in database `using`."""
    return [each for each in get_policies() if each.is_automatic and database_of(each.concrete_model) == using]


def sync_policy(
    policy: TimeoutPolicy[Any],
    using: str,
    failures: Failures | None = None,
    *,
    backfill: bool = False,
    newer_than: timedelta | None = None,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda _: None,
) -> Synced:
    """Make the ledger fit the table of `policy`, at once.

    Args:
        policy: an automatic one.
        using: the database.
        failures: gets the objects for which a callable raises. None: the first exception is raised after the sync.
        backfill: arm rounds of any age. Otherwise only those that are not yet due, or overdue by less than two sync
            intervals: the first start on an old table must not cancel ten thousand forgotten orders. Those that have
            a row, because their condition had ended them, are armed as by saving.
        newer_than: with `backfill`, arm only rounds that are not yet due, or overdue by less than this.
        dry_run: write nothing, only count.
        progress: called with the number of objects, page by page.
    """
    oldest = newer_than if backfill else oldest_in_sync(policy)
    found, done = Failures(policy) if failures is None else failures, Synced()
    # The next sync of a worker arms no round that is as old as those of a backfill, so that a backfill waits.
    how = Arming(using, oldest, found, wait=backfill, dry_run=dry_run)
    for step in steps(policy, how):
        done += repair(step, policy, how)
        progress(max(step.checked, len(step.wrong)))
    if failures is None and found.first is not None:
        raise found.first[1]
    return done


def repair(step: Step, policy: TimeoutPolicy[Any], how: Arming) -> Synced:
    """Change what `step` found, if that is still so: each object is locked and read again, a few at a time.

    Unless `how` waits, objects that other transactions have locked are left to the next sync of a worker.
    """
    done = Synced(too_old=step.too_old)
    for pks in chunks(step.wrong, LOCKED):
        changes = arm_readable(policy, pks, how)
        found = (changes.insert, {**changes.move, **changes.recompute}, changes.cancel)
        done += (*map(len, found), changes.too_old, len(changes.hold), len(changes.resume))
        if step.may_be_gone:
            gone, _left = cancel_of_deleted(policy.concrete_model, pks, how.using, dry_run=how.dry_run)
            done += Synced(cancelled=gone)
    return done


def cancel_of_deleted(
    model: type[Model], pks: Collection[Any], using: str, *, dry_run: bool = False
) -> tuple[int, set[Any]]:
    """Cancel the pending timeouts, of every policy and key, of those rows `pks` of `model` that are deleted.

    Return how many there were, and the keys of the rows that are not deleted. A row that the base manager hides is not
    deleted: a tenant that other code has left behind in this thread may hide it. Sends no signals, as there may be very
    many. `dry_run`: only count.
    """
    kind = kind_of(model, using)
    cancelled, left = 0, set[Any]()
    with nullcontext() if dry_run else transaction_of(using):
        for chunk in chunks(sorted(pks, key=str)):
            there = rows_of(model, using).filter(pk__in=chunk).values_list("pk", flat=True)
            ids = {object_id_of(model, pk) for pk in there}
            left |= {pk for pk in chunk if object_id_of(model, pk) in ids}
            gone = {object_id_of(model, pk) for pk in chunk} - ids
            rows = Timeout.objects.using(using).filter(content_type=kind, object_id__in=gone, slot_taken=1)
            rows = rows.only("id", "queue", "policy", "slot")
            entries = {row.pk: line_of(row) for row in (rows if dry_run else lock_in_slot_order(rows, using))}
            cancelled += len(entries) if dry_run else writing.cancel_ids(entries, using, Timeout.Cause.GONE)
    return cancelled, left


class TableSync:
    """The regular sync of one worker, in slices; of many workers, one at a time has the claim to it.

    Each policy is compared with its table every `SYNC_INTERVAL`. After each slice the worker pauses for so long that
    reading and deciding take at most `SHARE` of one core; repairs are not slowed down. So a pass over a table that
    takes longer than `SHARE` of an interval takes longer than the interval. Its progress is stored in `PolicySync`,
    from which another worker continues it. Policies that are due begin before long passes continue. Policies of which
    other workers have a newer declaration are left to them.

    A pass is complete although callables have raised for some objects, or other transactions have locked them, so that
    each object is tried once an interval. What becomes due meanwhile is not too old: `PolicySync.before_at` stays where
    it is until a pass without such objects, for `CATCH_UP` at most. By then the rounds that it would arm again may have
    fired, and their rows been pruned.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._claims: set[datetime] = set()
        """When the claim of this worker ends; two if it is not known whether the last one was stored."""
        self._failed = dict[str, Backoff]()
        """When to try again, for the policies whose last slice failed."""
        self._reported = set[str]()
        self._left = set[str]()
        """The policies of which this worker has left objects alone in the present or last pass: they were locked."""

    def run(self, between: Callable[[], object] = lambda: None, *, at_once: bool = False) -> float:
        """Sync a slice of the policies that are due; return in how many seconds to call again.

        `at_once`: all of them, without pauses. Calls `between` after each page. Raises an error that needs another
        connection. Others are logged: the policy is tried again soon, and the others are synced.
        """
        others = declarations.register(self._using)
        policies = {each.label: each for each in automatic_policies(self._using) if each.label not in others}
        interval, spent, limit = get_settings().sync_interval, 0.0, math.inf if at_once else SLICE_SECONDS
        while spent < limit:
            asked_at, now = clock.now(), database_now(self._using)
            due, wait = self._claim_due(list(policies), now, interval)
            if not due:
                return min([wait.total_seconds(), *(each.seconds_left for each in self._failed.values())])
            for row in due:
                try:
                    spent += self._advance(policies[row.policy], row, now, between, limit)
                    self._failed.pop(row.policy, None)
                except Exception as error:
                    if needs_new_connection(error):
                        raise
                    self._failed.setdefault(row.policy, Backoff(1.0, interval.total_seconds())).failed()
                    self._log_failure(row.policy, f"{row.policy}: the sync failed: {message_of(error)}", error)
                if spent >= limit or clock.now() - asked_at > interval * CLAIM:  # another worker may have the claim now
                    break
        return spent / SHARE - spent

    def _claim_due(self, labels: list[str], now: datetime, interval: timedelta) -> tuple[list[PolicySync], timedelta]:
        """Claim the policies, and return those of which a pass is to begin or to continue, in this order.

        If there are none, also how long to wait: none is due, and then the claim ends; or another worker has it.
        """
        rows = PolicySync.objects.using(self._using).filter(policy__in=labels)
        found = list(rows)
        self._claims = {claim for claim in self._claims if claim > now}
        away_since, latest = now - AWAY * interval, now + interval
        is_free = ~Q(claimed_until__gt=now, claimed_until__lte=latest) | Q(claimed_until__in=self._claims)
        if left := [row for row in found if _was_left(row, away_since, latest)]:
            anew = {"before_at": away_since, "began_at": None, "finished_at": None, "claimed_until": None}
            rows.filter(is_free, pk__in=[row.pk for row in left]).update(**anew)
            found = list(rows.all())
        free = [row for row in found if (at := row.claimed_until) is None or at in self._claims or at <= now]
        begun_by = now - interval * EARLY
        due = [
            row for row in free if row.is_running or row.is_asked or row.began_at is None or row.began_at <= begun_by
        ]
        due = [row for row in due if row.policy not in self._failed or not self._failed[row.policy].seconds_left]
        if not due and not self._claims:
            others = [row.claimed_until - now for row in found if row not in free and row.claimed_until is not None]
            return [], min([interval, *others])
        claims = {now + interval * CLAIM} if due else set()
        self._claims |= claims
        # A claim that ends keeps its time: workers ran until then, even if each of their passes failed.
        claimed = rows.filter(is_free, pk__in=[row.pk for row in free]).update(claimed_until=max(claims, default=now))
        self._claims = claims if claimed == len(free) else set()
        if claimed < len(free):  # by another worker, between the two statements
            return [], interval * CLAIM
        long_ago = now - timedelta(days=1)
        due.sort(key=lambda row: (row.is_running, row.policy in self._failed, row.began_at or long_ago))
        return due, interval

    def _advance(
        self, policy: TimeoutPolicy[Any], row: PolicySync, now: datetime, between: Callable[[], object], limit: float
    ) -> float:
        """Continue the pass of `policy`, or begin one; return how many seconds reading and deciding took.

        `now`: the time of the database when the policies were claimed. `limit`: pause after so many seconds.
        """
        if not row.is_running:
            _begin(row, now, stays=bool(row.failed_total) or row.policy in self._left)
            self._left.discard(row.policy)
        # What became due since the pass before began may have been missed by it, however long a pass takes.
        spent, oldest = 0.0, oldest_in_sync(policy, now - (row.before_at or now))
        place = None
        with suppress(ValueError):  # if a migration has given the keys another type, the pass begins again
            place = pk_of(policy.concrete_model, row.place) if row.place else None
        failures = Failures(policy)
        how = Arming(self._using, oldest, failures, wait=False)
        found = steps(policy, how, place)
        while True:
            began = time.monotonic()
            step = next(found, None)
            spent += time.monotonic() - began
            if step is None:
                row.place, row.total, row.finished_at = "", row.checked, cast("Any", DatabaseNow())
                break
            repair(step, policy, how)
            row.checked += max(step.checked, len(step.wrong))
            if step.wrong:  # there may be very many: `delayq_status` shows how far it is
                row.save(using=self._using, update_fields=PROGRESS)
            between()
            if step.place is not None:
                row.place = object_id_of(policy.concrete_model, step.place)
                if spent >= limit:
                    break
        row.failed += failures.count
        if failures.locked:
            self._left.add(row.policy)
        if step is None:
            row.failed_total = row.failed
        row.save(using=self._using, update_fields=PROGRESS)
        self._report(failures, row, is_complete=step is None)
        return spent

    def _report(self, failures: Failures, row: PolicySync, *, is_complete: bool) -> None:
        """Log the first object for which a callable raises, once until a complete pass has none."""
        if failures.first is not None:
            pk, error = failures.first
            about = object_id_of(failures.policy.concrete_model, pk)
            self._log_failure(row.policy, str(failures), error, object_id=about)
        elif row.policy in self._reported and is_complete and not row.failed:
            self._reported.discard(row.policy)
            logger.info("%s: the sync works again", row.policy, extra={"event": "sync_back", "policy": row.policy})

    def _log_failure(self, label: str, words: str, error: BaseException, **facts: str) -> None:
        is_known = label in self._reported
        self._reported.add(label)
        is_transient = transient_reason(error, self._using) is not None  # not the policy, but a busy database
        level = logging.DEBUG if is_known else logging.WARNING if is_transient else logging.ERROR
        cause = None if is_known or is_transient else shown(error)
        logger.log(level, "%s", words, exc_info=cause, extra={"event": "sync_failed", "policy": label, **facts})


def _begin(row: PolicySync, now: datetime, *, stays: bool) -> None:
    """Begin a pass at `now`. `stays`: the pass before has left objects, so that `before_at` stays, if it can."""
    before_at = row.began_at or row.before_at
    if stays and row.before_at is not None and before_at is not None:
        before_at = min(before_at, max(row.before_at, now - get_settings().catch_up))
    row.before_at, row.began_at, row.place, row.checked, row.failed = before_at, now, "", 0, 0


def _was_left(row: PolicySync, since: datetime, latest: datetime) -> bool:
    """Return whether since then no worker had the claim, no pass began or ended, and the policy is not new.

    Also if one of these times is after `latest`. Then the clock was set back, and no pass would begin until it shows
    that time again.
    """
    newest = max(filter(None, (row.before_at, row.began_at, row.finished_at, row.claimed_until)), default=None)
    return newest is None or not since <= newest <= latest


def count_too_old(policy: TimeoutPolicy[Any], using: str) -> Count:
    """Count the objects, up to one page, that match, have no round, and are overdue by too long to be armed."""
    page = list(candidates(policy, using).values_list("pk", flat=True)[:CHUNK])
    how = Arming(using, oldest_in_sync(policy), Failures(policy), dry_run=True)
    changes = arm_readable(policy, sorted(set(page)), how)
    return Count(changes.too_old, is_capped=len(page) == CHUNK)


def _targets(target: Any) -> Iterator[tuple[type[Model], str, QuerySet[Any] | list[Model]]]:
    """Yield models, the databases that hold their rows, and the objects to check."""
    if isinstance(target, QuerySet):
        using = database_of(target.model, target)
        target = target.using(using)
        if target.model is not Timeout:
            yield target.model, using, target
            return
        target = target.only("policy", "content_type_id", "object_id")
    by_place: dict[tuple[type[Model], str], list[Any]] = {}
    for obj in instances(target):
        if obj.pk is None:
            raise ValueError(
                f"{obj!r} has no primary key: it is not saved, or comes from bulk_create() on a database that returns "
                "no keys, as MySQL. Pass a queryset that finds the new rows."
            )
        by_place.setdefault((obj.__class__, database_of(obj.__class__, obj)), []).append(obj)
    for (model, using), objects in by_place.items():
        if model is not Timeout:
            yield model, using, objects
            continue
        for about, pks in objects_of(objects, using):
            yield about, using, about._base_manager.using(using).filter(pk__in=pks)
