"""Many rows, page by page: lock their objects, then themselves, judge each, write, and say what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from django.db import connections
from django.db.models import QuerySet

from django_delayq.clock import database_now
from django_delayq.key_types import object_id_of
from django_delayq.ledger import writing
from django_delayq.ledger.announcing import announce
from django_delayq.ledger.controls import Stopped, stop_cache
from django_delayq.ledger.locking import database_of, lock_objects, transaction_of
from django_delayq.ledger.subjects import objects_of
from django_delayq.models import Timeout
from django_delayq.operations.results import Refusal, Refused, Steered, steered
from django_delayq.scheduling.bulk import ids_in_lock_order

logger = logging.getLogger("django_delayq.steering")

if TYPE_CHECKING:
    from django.dispatch import Signal

    from django_delayq.models import TimeoutQuerySet

    Target = Timeout | QuerySet[Timeout] | Iterable[Timeout]
    Progress = Callable[[Steered], object]


Living = dict[tuple[int, str], Any]
"""The objects that are there, by content type and id as rows have them; None for one that was only looked for."""


@dataclass(slots=True)
class Around:
    """What a verb has to know besides the row itself. Objects and rows are locked, unless it is a dry run."""

    using: str
    by: str
    reason: str
    now: datetime
    """The database's moment."""
    stopped: Stopped
    living: Living = field(default_factory=dict)
    slots: set[str] = field(default_factory=set)
    """Taken on this page already."""

    def is_living(self, row: Timeout) -> bool:
        """Whether the object of `row` is there."""
        return (row.content_type_id, row.object_id) in self.living


class Verb(Protocol):
    """One operator's verb: what it refuses, and what it does with the rows that it does not refuse."""

    @property
    def name(self) -> str: ...

    @property
    def signal(self) -> Signal: ...

    def refusal(self, row: Timeout, around: Around) -> Refusal | None:
        """Why `row` stays as it is; None: it does not."""

    def write(self, rows: list[Timeout], refused: list[Timeout], around: Around) -> None:
        """`rows`, locked, are changed, and Redis learns of it. `refused` stay as they are, in what matters."""


def steer(
    target: Target, verb: Verb, *, by: str, reason: str, dry_run: bool = False, progress: Progress | None = None
) -> Steered:
    """`verb` is done to each row of `target`; says to which, and why not to the others.

    Each page of 500 is one transaction, or part of the caller's. Outside a transaction it may be stopped anywhere
    between two of them and started again. A single `Timeout` sends its signal; many send none, as all bulk verbs.
    """
    total = Steered(verb.name, dry_run=dry_run)
    using, pages = _pages_of(target)
    for ids in pages:
        page = _steer_page(ids, verb, using, by, reason, dry_run=dry_run, tell=isinstance(target, Timeout))
        total += page
        if progress is not None:
            progress(page)
    if not dry_run:
        logger.info(
            "%s by %s: %d timeouts changed, %d did not",
            verb.name,
            by,
            total.changed,
            total.unchanged,
            extra={"event": "timeouts_steered", "verb": verb.name, "by": by, "reason": reason},
        )
    return total


def _pages_of(target: Target) -> tuple[str, Iterator[Sequence[int]]]:
    """The database to write to, and pages of ids.

    Inside a caller's transaction all pages lock together, so they come in the order in which everybody locks. Outside,
    each page is let go before the next, and going by id needs no list of a million of them.
    """
    if isinstance(target, Timeout):
        if target.pk is None:
            raise ValueError("This Timeout is not a row of the ledger.")
        return database_of(Timeout, target), iter([[target.pk]])
    if not isinstance(target, QuerySet):
        using, ids = ids_in_lock_order(target)
        return using, writing.chunks(ids)
    using = database_of(Timeout, target)
    if target.model is not Timeout or target.query.is_sliced or connections[using].in_atomic_block:
        using, ids = ids_in_lock_order(target)
        return using, writing.chunks(ids)
    return using, _pages_by_id(target.using(using).order_by("pk"))


def _pages_by_id(rows: QuerySet[Timeout]) -> Iterator[list[int]]:
    last = 0
    while page := list(rows.filter(pk__gt=last).values_list("pk", flat=True)[: writing.CHUNK]):
        yield page
        last = page[-1]


def _steer_page(
    ids: Sequence[int], verb: Verb, using: str, by: str, reason: str, *, dry_run: bool, tell: bool
) -> Steered:
    rows: TimeoutQuerySet = Timeout.objects.using(using).filter(pk__in=ids)
    around = Around(using, by, reason, database_now(using), stop_cache.read(using))
    if dry_run:
        around.living = living_of(rows, using, lock=False)
        chosen, _, refusals = _judged(list(rows), ids, verb, around)
        return steered(verb.name, [row.pk for row in chosen], refusals, dry_run=True)
    with transaction_of(using):
        around.living = living_of(rows, using, lock=True)
        chosen, refused, refusals = _judged(writing.locked(rows, using), ids, verb, around)
        verb.write(chosen, refused, around)
        if tell:
            for row in chosen:
                announce(verb.signal, row, using)
    return steered(verb.name, [row.pk for row in chosen], refusals, dry_run=False)


def living_of(rows: TimeoutQuerySet, using: str, *, lock: bool) -> Living:
    """The objects of `rows` that are there; with `lock` fresh, and locked in the order in which everybody locks."""
    living: Living = {}
    for kind, model, pks in objects_of(rows.only("policy", "content_type_id", "object_id"), using):
        if lock:
            found: dict[Any, Any] = lock_objects(model, pks, using)
        else:
            found = dict.fromkeys(model._base_manager.using(using).filter(pk__in=pks).values_list("pk", flat=True))
        living.update(((kind, object_id_of(model, pk)), obj) for pk, obj in found.items())
    return living


def _judged(
    rows: list[Timeout], ids: Sequence[int], verb: Verb, around: Around
) -> tuple[list[Timeout], list[Timeout], list[Refused]]:
    """Which rows are to be changed, and which are not and why. The newest of several rounds comes first."""
    missing = set(ids) - {row.pk for row in rows}
    refusals = [Refused(row_id, Refusal.MISSING) for row_id in sorted(missing)]
    chosen, refused = [], []
    for row in sorted(rows, key=lambda row: -row.pk):
        why = verb.refusal(row, around)
        if why is None:
            chosen.append(row)
        else:
            refused.append(row)
            refusals.append(Refused(row.pk, why))
    chosen.sort(key=lambda row: (row.slot, row.pk))
    return chosen, refused, refusals
