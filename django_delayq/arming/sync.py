"""Make the ledger fit the tables: after `QuerySet.update`, `bulk_create`, raw SQL, a crash, a restored backup.

In both directions, page by page: arm rows that match a policy but have no round, and cancel pending rounds whose object
no longer matches, after the same locked check as on saving. Several syncs may run at the same time.
"""

from __future__ import annotations

import operator
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from django.db.models import Exists, Model, OuterRef, Q, QuerySet

from django_delayq import clock
from django_delayq.arming.receivers import policies_by_table
from django_delayq.arming.reconcile import arm_many, cancel_of_deleted, changes_of, diff
from django_delayq.arming.row_state import CLOSING, Rounds
from django_delayq.clock import DatabaseNow, database_now
from django_delayq.conf import get_settings
from django_delayq.key_types import object_id_of, pk_of, root_of_key
from django_delayq.ledger.controls import read_delay
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.paging import chunks
from django_delayq.ledger.search import Count
from django_delayq.ledger.subjects import instances, key_of, kind_of, object_id, objects_of
from django_delayq.models import PolicySync, Timeout
from django_delayq.policies import TimeoutPolicy, get_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from datetime import datetime

PAGE = 500
LOCKED = 15
"""The number of objects that one transaction of the sync locks, so that others wait at most 20 ms of CPU time."""
SHARE = 0.05
"""The part of one core that the regular sync may use, in this process and in the database, over all workers."""
SLICE_SECONDS = 0.1
EARLY = 0.9
"""A pass may begin after this part of an interval, so that it is due when a worker comes back after one."""
CLAIM = 0.5
"""The part of an interval for which a worker has the claim. If it dies, another one continues soon."""
AWAY = 10
"""After so many intervals without a sync, workers were away. Deadlines that passed long before are left alone."""


class Synced(NamedTuple):
    """What a sync changed, or with `dry_run` would have changed."""

    armed: int = 0
    moved: int = 0
    cancelled: int = 0
    too_old: int = 0

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
    oldest = get_settings().catch_up
    for model, using, objects in list(_targets(target)):
        for table, policies, _fields in policies_by_table(model):
            pks = sorted(_keys(table, objects))
            for start in range(0, len(pks), PAGE):
                changed += arm_many(table, policies, pks[start : start + PAGE], using, oldest).size
    return changed


def automatic_policies(using: str) -> list[TimeoutPolicy[Any]]:
    """Return the automatic policies whose table is in database `using`."""
    return [each for each in get_policies() if each.is_automatic and database_of(each.concrete_model) == using]


def sync_policy(policy: TimeoutPolicy[Any], using: str, *, backfill: bool = False, dry_run: bool = False) -> Synced:
    """Make the ledger fit the table of `policy`, at once.

    Args:
        policy: an automatic one.
        using: the database.
        backfill: arm rounds of any age. Otherwise only those that are not yet due, or overdue by less than two sync
            intervals: the first start on an old table must not cancel ten thousand forgotten orders.
        dry_run: write nothing, only count.
    """
    oldest = None if backfill else 2 * get_settings().sync_interval
    return sum(
        (repair(policy, step, using, oldest, dry_run=dry_run) for step in steps(policy, using, oldest)), Synced()
    )


def repair(
    policy: TimeoutPolicy[Any], step: Step, using: str, oldest: timedelta | None, *, dry_run: bool = False
) -> Synced:
    """Change what `step` found, if that is still so: each object is locked and read again, a few at a time."""
    done, table = Synced(too_old=step.too_old), policy.concrete_model
    for pks in chunks(step.wrong, LOCKED):
        arm = changes_of if dry_run else arm_many
        changes = arm(table, [policy], pks, using, oldest)
        done += (len(changes.insert), len(changes.move), len(changes.cancel), changes.too_old)
        if step.may_be_gone and not dry_run:
            done += (0, 0, cancel_of_deleted(table, pks, using).cancelled, 0)
    return done


class Step(NamedTuple):
    """What one page of a scan shows. It was read without locks, so `repair` decides again."""

    wrong: list[Any]
    """The keys of objects whose timeouts do not fit, most likely."""
    place: Any = None
    """The key of the last object of the page, after which another scan can continue; None: it cannot."""
    checked: int = 0
    too_old: int = 0
    may_be_gone: bool = False


def steps(policy: TimeoutPolicy[Any], using: str, oldest: timedelta | None, after: Any = None) -> Iterator[Step]:
    """Compare the table of `policy` with the ledger, page by page and without locks.

    Where `since` and `after` are columns and constants, the database finds the few rows that do not fit. Where one of
    them is a callable, each object is read, page by page from the one after the key `after`.
    """
    if callable(policy.since) or callable(policy.after):
        yield from _checked(policy, using, oldest, after)
    else:
        yield from (Step(page) for page in _unarmed(policy, using, oldest))
    yield from (Step(page, may_be_gone=True) for page in _mismatched(policy, using))


def _checked(policy: TimeoutPolicy[Any], using: str, oldest: timedelta | None, place: Any) -> Iterator[Step]:
    """Read the objects that may lack a round, or have one of another `since`, and let the callables decide."""
    rows = _candidates(policy, using, oldest)
    in_force = None if policy.after is None else read_delay(policy, using)
    to_python = root_of_key(policy.concrete_model).to_python
    while True:
        page = list((rows if place is None else rows.filter(pk__gt=place))[:PAGE])
        objects = {to_python(obj.pk): obj for obj in page}  # fewer, if a condition on other rows repeats some
        rounds = Rounds([policy], objects if callable(policy.since) else (), using)
        states = [
            rounds.state(policy, pk, holds=True, since_at=policy.since_of(obj), after=in_force)
            for pk, obj in objects.items()
        ]
        changes = diff(states, using, oldest, objects)
        place = page[-1].pk if len(page) == PAGE else None
        yield Step(changes.pks, place, len(objects), changes.too_old)
        if place is None:
            return


class TableSync:
    """The regular sync of one worker, in slices; of many workers, one at a time has the claim to it.

    Each policy is compared with its table every `SYNC_INTERVAL`. After each slice the worker pauses for so long that
    reading and deciding take at most `SHARE` of one core; repairs are not slowed down. So a pass over a table that
    takes longer than `SHARE` of an interval takes longer than the interval. Its progress is stored in `PolicySync`,
    from which another worker continues it. Policies that are due begin before long passes continue.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._claim: datetime | None = None
        self._failed = set[str]()

    def run(self, between: Callable[[], object] = lambda: None, *, at_once: bool = False) -> float:
        """Sync a slice of the policies that are due; return in how many seconds to call again.

        `at_once`: all of them, without pauses. Calls `between` after each page. Raises the errors of the database, and
        of callables of policies; the other policies are then synced first.
        """
        policies = {policy.label: policy for policy in automatic_policies(self._using)}
        interval, spent = get_settings().sync_interval, 0.0
        while spent < SLICE_SECONDS or at_once:
            asked_at, now = clock.now(), database_now(self._using)
            due, wait = self._claim_due(list(policies), now, interval)
            if not due:
                return wait.total_seconds()
            for row in due:
                self._failed.add(row.policy)
                spent += self._advance(policies[row.policy], row, now, between, at_once=at_once)
                self._failed.discard(row.policy)
                is_over = spent >= SLICE_SECONDS and not at_once
                if is_over or clock.now() - asked_at > interval * CLAIM:  # another worker may have the claim now
                    break
        return spent / SHARE - spent

    def _claim_due(self, labels: list[str], now: datetime, interval: timedelta) -> tuple[list[PolicySync], timedelta]:
        """Claim the policies, and return those of which a pass is to begin or to continue, in this order.

        If there are none, also how long to wait: none is due, and then the claim ends; or another worker has it.
        """
        rows = PolicySync.objects.using(self._using).filter(policy__in=labels)
        found = list(rows)
        if missing := sorted(set(labels) - {row.policy for row in found}):
            new = [PolicySync(policy=label, before_at=now) for label in missing]
            PolicySync.objects.using(self._using).bulk_create(new, ignore_conflicts=True)
            found = list(rows.all())
        is_free = Q(claimed_until=None) | Q(claimed_until__lte=now) | Q(claimed_until=self._claim)
        away_since = now - AWAY * interval
        if left := [row for row in found if _was_left(row, away_since)]:
            anew: dict[str, Any] = {"before_at": away_since, "began_at": None, "place": "", "checked": 0}
            rows.filter(is_free, pk__in=[row.pk for row in left]).update(**anew)
            found = list(rows.all())
        free = [row for row in found if row.claimed_until in (None, self._claim) or row.claimed_until <= now]
        due = [row for row in free if row.is_running or row.began_at is None or row.began_at <= now - interval * EARLY]
        if not due and self._claim is None:
            others = [row.claimed_until - now for row in found if row not in free and row.claimed_until is not None]
            return [], min([interval, *others])
        self._claim = now + interval * CLAIM if due else None
        # A claim that ends keeps its time: workers ran until then, even if each of their passes failed.
        claimed = rows.filter(is_free, pk__in=[row.pk for row in free]).update(claimed_until=self._claim or now)
        if claimed < len(free):  # by another worker, between the two statements
            self._claim = None
            return [], interval * CLAIM
        long_ago = now - timedelta(days=1)
        due.sort(key=lambda row: (row.policy in self._failed, row.is_running, row.began_at or long_ago))
        return due, interval

    def _advance(
        self,
        policy: TimeoutPolicy[Any],
        row: PolicySync,
        now: datetime,
        between: Callable[[], object],
        *,
        at_once: bool,
    ) -> float:
        """Continue the pass of `policy`, or begin one; return how many seconds reading and deciding took.

        `now`: the time of the database when the policies were claimed.
        """
        interval = get_settings().sync_interval
        if not row.is_running:
            row.before_at = row.began_at or row.before_at
            row.began_at, row.place, row.checked = now, "", 0
        # What became due since the pass before began may have been missed by it, however long a pass takes.
        spent, oldest = 0.0, 2 * interval + (now - (row.before_at or now))
        place = pk_of(policy.concrete_model, row.place) if row.place else None
        found = steps(policy, self._using, oldest, place)
        while True:
            began = time.monotonic()
            step = next(found, None)
            spent += time.monotonic() - began
            if step is None:
                row.place, row.total, row.finished_at = "", row.checked, cast("Any", DatabaseNow())
                break
            repair(policy, step, self._using, oldest)
            row.checked += step.checked
            between()
            if step.place is not None:
                row.place = object_id_of(policy.concrete_model, step.place)
                if spent >= SLICE_SECONDS and not at_once:
                    break
        row.save(using=self._using, update_fields=("place", "checked", "total", "before_at", "began_at", "finished_at"))
        return spent


def _was_left(row: PolicySync, since: datetime) -> bool:
    """Return whether since then no worker had the claim, no pass began or ended, and the policy is not new."""
    times = (row.before_at, row.began_at, row.finished_at, row.claimed_until)
    return all(time is None or time < since for time in times)


def count_too_old(policy: TimeoutPolicy[Any], using: str, oldest: timedelta) -> Count:
    """Count the objects, up to one page, that match, have no round, and are overdue by `oldest` or more."""
    page = list(_candidates(policy, using, None).values_list("pk", flat=True)[:PAGE])
    changes = changes_of(policy.concrete_model, [policy], page, using, oldest)
    return Count(changes.too_old, is_capped=len(page) == PAGE)


def _candidates(policy: TimeoutPolicy[Any], using: str, oldest: timedelta | None) -> QuerySet[Any]:
    """Return the rows that match `policy`, by key, without those that fit according to the database."""
    model = policy.concrete_model
    rows: QuerySet[Any] = policy.model._base_manager.using(using).filter(policy.when or Q()).order_by("pk")
    if not isinstance(policy.since, str):
        return rows
    rounds = Timeout.objects.using(using).filter(
        content_type=kind_of(model, using),
        object_id=object_id(OuterRef(cast("Any", model._meta.pk).name), model, using),
        policy__in=policy.labels,
        key="",
    )
    rows = rows.filter(**{f"{policy.since}__isnull": False})
    if oldest is not None and isinstance(policy.after, timedelta):
        in_force = read_delay(policy, using)
        after = policy.after if in_force is None else in_force
        rows = rows.filter(**{f"{policy.since}__gt": clock.now() - after - oldest})
    return rows.filter(~Exists(rounds.filter(Q(slot_taken=1) | CLOSING & Q(since_at=OuterRef(policy.since)))))


def _unarmed(policy: TimeoutPolicy[Any], using: str, oldest: timedelta | None) -> Iterator[list[Any]]:
    """Yield pages of keys of rows that match `policy` and have no round. The database finds them.

    A condition on other rows may repeat a key within a page of rows.
    """
    keys = _candidates(policy, using, oldest).values_list("pk", flat=True)
    page = list(keys[:PAGE])
    while page:
        yield list(dict.fromkeys(page))
        page = list(keys.filter(pk__gt=page[-1])[:PAGE]) if len(page) == PAGE else []


def _mismatched(policy: TimeoutPolicy[Any], using: str) -> Iterator[list[Any]]:
    """Yield pages of keys of rows that no longer fit their pending round."""
    model = policy.concrete_model
    pending = Timeout.objects.using(using).pending().of_labels(policy.labels).filter(key="").order_by("id")
    key = key_of(OuterRef("object_id"), model, using)
    if key is not None:  # the database finds them, mostly none, in one query
        rows = policy.model._base_manager.using(using).filter(policy.when or Q(), pk=key)
        fitting = rows.filter(**{policy.since: OuterRef("since_at")}) if isinstance(policy.since, str) else rows
        pending = pending.filter(~Exists(fitting))
    last = 0
    while page := list(pending.filter(pk__gt=last).values_list("id", "object_id", "since_at")[:PAGE]):
        last = page[-1][0]
        rounds: dict[Any, Any] = {}
        for _, object_id_, since_at in page:
            with suppress(ValueError):  # unreadable: firing settles it as gone
                rounds[pk_of(model, object_id_)] = since_at
        wrong = list(rounds) if key is not None else _without_fit(policy, rounds, using)
        if wrong:
            yield wrong


def _without_fit(policy: TimeoutPolicy[Any], rounds: dict[Any, Any], using: str) -> list[Any]:
    """Return the keys of rows that do not fit their round; `rounds` has the `since_at` of each key's round."""
    rows = policy.model._base_manager.using(using).filter(pk__in=list(rounds)).filter(policy.when or Q())
    is_column = isinstance(policy.since, str)
    to_python = root_of_key(policy.concrete_model).to_python
    matching = {to_python(pk): value for pk, value in rows.values_list("pk", policy.since if is_column else "pk")}
    return [pk for pk, since_at in rounds.items() if pk not in matching or (is_column and matching[pk] != since_at)]


def _keys(table: type[Model], objects: QuerySet[Any] | list[Model]) -> Collection[Any]:
    """Return the keys of `objects` in `table`; a multi-table child may have a different key of its own."""
    key: Any = table._meta.pk
    if isinstance(objects, QuerySet):
        found = list(objects.values_list(key.name, flat=True))
    else:
        found = [getattr(obj, key.attname) for obj in objects]
    return set(map(root_of_key(table).to_python, found))


def _targets(target: Any) -> Iterator[tuple[type[Model], str, QuerySet[Any] | list[Model]]]:
    """Yield models, the databases that hold their rows, and the objects to check."""
    if isinstance(target, QuerySet):
        using = database_of(target.model, target)
        rows = target.using(using)
        if target.model is Timeout:
            yield from _objects_of(list(rows.only("policy", "content_type_id", "object_id")), using)
        else:
            yield target.model, using, rows
        return
    by_place: dict[tuple[type[Model], str], list[Any]] = {}
    for obj in instances(target):
        if obj.pk is None:
            raise ValueError(
                f"{obj!r} has no primary key: it is not saved, or comes from bulk_create() on a database that returns "
                "no keys, as MySQL. Pass a queryset that finds the new rows."
            )
        by_place.setdefault((type(obj), database_of(type(obj), obj)), []).append(obj)
    for (model, using), objects in by_place.items():
        if model is Timeout:
            yield from _objects_of(objects, using)
        else:
            yield model, using, objects


def _objects_of(rows: list[Any], using: str) -> Iterator[tuple[type[Model], str, QuerySet[Any]]]:
    for model, pks in objects_of(rows, using):
        yield model, using, model._base_manager.using(using).filter(pk__in=pks)
