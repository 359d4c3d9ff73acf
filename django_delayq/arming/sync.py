"""Make the ledger fit the tables: after `QuerySet.update`, `bulk_create`, raw SQL, a crash, a restored backup.

In both directions, page by page: arm rows that match a policy but have no round, and cancel pending rounds whose object
no longer matches, after the same locked check as on saving. Several syncs may run at the same time.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib.contenttypes.models import ContentType
from django.db.models import Exists, Model, OuterRef, Q, QuerySet

from django_delayq import clock
from django_delayq.arming.receivers import groups_of
from django_delayq.arming.reconcile import arm_many, cancel_of_deleted
from django_delayq.arming.row_state import CLOSING
from django_delayq.conf import get_settings
from django_delayq.key_types import pk_of, root_of_key
from django_delayq.ledger.controls import read_delay
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import Count
from django_delayq.ledger.subjects import instances, key_of, object_id, objects_of
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy, get_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

PAGE = 500


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
        for table, policies, _fields in groups_of(model):
            pks = sorted(_keys(table, objects))
            for start in range(0, len(pks), PAGE):
                changed += arm_many(table, policies, pks[start : start + PAGE], using, oldest).size
    return changed


def sync_all(using: str, progress: Callable[[int], object] | None = None) -> Synced:
    """Sync every automatic policy whose table is in database `using`, as the worker does every `SYNC_INTERVAL`.

    `progress`: as for `sync_policy`.
    """
    total = Synced()
    for policy in get_policies():
        if policy.is_automatic and database_of(policy.concrete_model) == using:
            total += sync_policy(policy, using, progress=progress)
    return total


def sync_policy(
    policy: TimeoutPolicy[Any],
    using: str,
    *,
    backfill: bool = False,
    dry_run: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Synced:
    """Make the ledger fit the table of `policy`.

    Args:
        policy: an automatic one.
        using: the database.
        backfill: arm rounds of any age. Otherwise only those that are not yet due, or overdue by less than two sync
            intervals: the first start on an old table must not cancel ten thousand forgotten orders.
        dry_run: write nothing, only count.
        progress: is called after each page with its number of objects.
    """
    oldest = None if backfill else 2 * get_settings().sync_interval
    done = Synced()
    for page in chain(_unarmed(policy, using, oldest), _mismatched(policy, using)):
        changes = arm_many(policy.concrete_model, [policy], page, using, oldest, dry_run=dry_run)
        done += (len(changes.insert), len(changes.move), len(changes.cancel), changes.too_old)
        if not dry_run:
            done += (0, 0, cancel_of_deleted(policy.concrete_model, page, using), 0)
        if progress is not None:
            progress(len(page))
    return done


def count_too_old(policy: TimeoutPolicy[Any], using: str, oldest: timedelta) -> Count:
    """Count the objects, up to one page, that match, have no round, and are overdue by `oldest` or more."""
    page = next(_unarmed(policy, using, None), [])
    changes = arm_many(policy.concrete_model, [policy], page, using, oldest, dry_run=True)
    return Count(changes.too_old, is_capped=len(page) == PAGE)


def _unarmed(policy: TimeoutPolicy[Any], using: str, oldest: timedelta | None) -> Iterator[list[Any]]:
    """Yield pages of keys of rows that match `policy` and have no round. The database finds them."""
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
    keys = rows.filter(~Exists(rounds.filter(present))).order_by("pk").values_list("pk", flat=True)
    page = list(keys[:PAGE])
    while page:
        yield page
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
    for _, model, pks in objects_of(rows, using):
        yield model, using, model._base_manager.using(using).filter(pk__in=pks)
