"""Make the ledger fit the tables again: after `QuerySet.update`, `bulk_create`, raw SQL, a crash, a restored backup.

Both ways, in pages: rows that match a policy but have no round get one, and pending rounds whose object no
longer matches are cancelled, after the same lock and look as on saving. Any number may run at once.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib.contenttypes.models import ContentType
from django.db.models import Exists, F, Model, OuterRef, Q, QuerySet

from django_delayq import clock
from django_delayq.arming.reconcile import Plan, arm_many, cancel_of_deleted
from django_delayq.arming.row_state import CLOSING
from django_delayq.conf import get_settings
from django_delayq.key_types import pk_of, root_of_key
from django_delayq.ledger.controls import read_delay
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.object_ids import key_of, object_id
from django_delayq.ledger.search import Count
from django_delayq.ledger.subjects import instances, objects_of
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy, get_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

PAGE = 500


class Synced(NamedTuple):
    """What a sync did, or with `dry_run` would have done."""

    armed: int = 0
    moved: int = 0
    cancelled: int = 0
    too_old: int = 0

    def plus(self, plan: Plan) -> Synced:
        """This and what `plan` adds."""
        return Synced(
            self.armed + len(plan.insert),
            self.moved + len(plan.move),
            self.cancelled + len(plan.cancel),
            self.too_old + len(plan.too_old),
        )


def sync_timeouts(target: Model | QuerySet[Any] | Iterable[Model]) -> int:
    """The timeouts of these objects are as if each had just been saved; returns how many changed.

    For after `QuerySet.update`, `bulk_create` and raw SQL. Takes an object, a queryset (evaluated anew) or an
    iterable of objects; timeouts stand for the objects that they are about. Each page of 500 is one transaction, or
    part of the caller's. Sends no signals.

    Raises:
        ValueError: an object without a primary key; nothing is written.
        TypeError: `target` is something else.
    """
    changed = 0
    oldest = get_settings().catch_up
    for model, using, objects in list(_targets(target)):
        for table, policies in _tables(model):
            for page in _pages(_keys(table, objects)):
                changed += arm_many(table, policies, page, using, oldest).size
    return changed


def sync_all(using: str, progress: Callable[[int], object] | None = None) -> Synced:
    """What the worker does every `SYNC_INTERVAL`: every automatic policy whose table is in database `using`.

    `progress`: as for `sync_policy`.
    """
    total = Synced()
    for policy in get_policies():
        if policy.is_automatic and database_of(policy.concrete_model) == using:
            done = sync_policy(policy, using, progress=progress)
            total = Synced(*(a + b for a, b in zip(total, done, strict=True)))
    return total


def sync_policy(
    policy: TimeoutPolicy[Any],
    using: str,
    *,
    backfill: bool = False,
    dry_run: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Synced:
    """The ledger fits the table of `policy`.

    Args:
        policy: an automatic one.
        using: the database.
        backfill: arm however old. Otherwise only what is not yet due, or overdue by less than two sync
            intervals: the first start on an old table must not cancel ten thousand forgotten orders.
        dry_run: write nothing, only count.
        progress: is called with the number of objects looked at, page by page.
    """
    oldest = None if backfill else 2 * get_settings().sync_interval
    done = Synced()
    for page in chain(_unarmed(policy, using, oldest), _mismatched(policy, using)):
        done = done.plus(arm_many(policy.concrete_model, [policy], page, using, oldest, dry_run=dry_run))
        if not dry_run:
            gone = cancel_of_deleted(policy.concrete_model, page, using)
            done = done._replace(cancelled=done.cancelled + gone)
        if progress is not None:
            progress(len(page))
    return done


def count_too_old(policy: TimeoutPolicy[Any], using: str, oldest: timedelta) -> Count:
    """How many objects match and have no round, and are overdue by `oldest` or more; up to one page. Reads only."""
    page = next(_unarmed(policy, using, None), [])
    plan = arm_many(policy.concrete_model, [policy], page, using, oldest, dry_run=True)
    return Count(len(plan.too_old), is_capped=len(page) == PAGE)


def _unarmed(policy: TimeoutPolicy[Any], using: str, oldest: timedelta | None) -> Iterator[list[Any]]:
    """Pages of keys of rows that match `policy` and have no round, found by the database itself."""
    model = policy.concrete_model
    pk = model._meta.pk
    assert pk is not None
    content_type = ContentType.objects.db_manager(using).get_for_model(model)
    own_id = object_id(OuterRef(pk.name), model, using)
    rounds = Timeout.objects.using(using).filter(
        content_type=content_type.pk, object_id=own_id, policy__in=policy.labels, key=""
    )
    present = Q(slot_taken=1)
    rows = policy.model._base_manager.using(using).filter(policy.when or Q())
    if isinstance(policy.since, str):
        present |= CLOSING & Q(since_at=OuterRef(policy.since))
        rows = rows.filter(**{f"{policy.since}__isnull": False})
        if oldest is not None and isinstance(policy.after, timedelta):
            in_force = read_delay(policy, using)
            after = policy.after if in_force is None else in_force
            rows = rows.filter(**{f"{policy.since}__gt": clock.now() - after - oldest})
    rows = rows.filter(~Exists(rounds.filter(present))).order_by("pk")
    yield from _key_pages(rows)


def _mismatched(policy: TimeoutPolicy[Any], using: str) -> Iterator[list[Any]]:
    """Pages of keys of rows whose pending round no longer fits them."""
    model = policy.concrete_model
    waiting = Timeout.objects.using(using).pending().of_labels(policy.labels).filter(key="").order_by("id")
    key = key_of(OuterRef("object_id"), model, using)
    if key is not None:  # the database finds them itself, mostly none, in one query
        waiting = waiting.filter(~Exists(_fitting(policy, using).filter(pk=key)))
    last = 0
    while page := list(waiting.filter(pk__gt=last).values_list("id", "object_id", "since_at")[:PAGE]):
        last = page[-1][0]
        counted: dict[Any, Any] = {}
        for _, text, since_at in page:
            with suppress(ValueError):  # unreadable: the firing settles it as gone
                counted[pk_of(model, text)] = since_at
        wrong = list(counted) if key is not None else _wrong(policy, counted, using)
        if wrong:
            yield wrong


def _fitting(policy: TimeoutPolicy[Any], using: str) -> QuerySet[Any]:
    """The rows that the round in the surrounding query fits, one of which must be its own."""
    rows: QuerySet[Any] = policy.model._base_manager.using(using).filter(policy.when or Q())
    return rows.filter(**{policy.since: OuterRef("since_at")}) if isinstance(policy.since, str) else rows


def _wrong(policy: TimeoutPolicy[Any], counted: dict[Any, Any], using: str) -> list[Any]:
    """Of the keys `counted`, with what their rounds count from, those that no longer fit."""
    rows = policy.model._base_manager.using(using).filter(pk__in=list(counted)).filter(policy.when or Q())
    since = F(policy.since) if isinstance(policy.since, str) else F("pk")
    to_python = root_of_key(policy.concrete_model).to_python
    holding = {to_python(pk): value for pk, value in rows.values_list("pk", since)}
    fits = holding if isinstance(policy.since, str) else {pk: counted[pk] for pk in holding}
    return [pk for pk, since_at in counted.items() if pk not in fits or fits[pk] != since_at]


def _key_pages(rows: QuerySet[Any]) -> Iterator[list[Any]]:
    keys = rows.values_list("pk", flat=True)
    page = list(keys[:PAGE])
    while page:
        yield page
        page = list(keys.filter(pk__gt=page[-1])[:PAGE]) if len(page) == PAGE else []


def _tables(model: type[Model]) -> Iterator[tuple[type[Model], list[TimeoutPolicy[Any]]]]:
    by_table: dict[type[Model], list[TimeoutPolicy[Any]]] = {}
    for policy in get_policies(model):
        if policy.is_automatic:
            by_table.setdefault(policy.concrete_model, []).append(policy)
    yield from by_table.items()


def _keys(table: type[Model], objects: QuerySet[Any] | list[Model]) -> Collection[Any]:
    """Return the keys that `objects` have in `table`; a multi-table child may have another one of its own."""
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
    for _, model, pks in objects_of(rows, using):
        yield model, using, model._base_manager.using(using).filter(pk__in=pks)


def _pages(pks: Collection[Any]) -> Iterator[list[Any]]:
    ordered = sorted(pks)
    for start in range(0, len(ordered), PAGE):
        yield ordered[start : start + PAGE]
