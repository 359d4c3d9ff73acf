"""Run an operation on timeouts page by page: lock the objects, lock the rows, refuse or change each, report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db import connections
from django.db.models import QuerySet, TextChoices
from django.utils.translation import gettext_lazy as _

from django_delayq.clock import database_now
from django_delayq.key_types import object_id_of
from django_delayq.ledger import writing
from django_delayq.ledger.announcing import announce
from django_delayq.ledger.controls import Stopped, stop_cache
from django_delayq.ledger.history import appended, clean, event
from django_delayq.ledger.locking import database_of, lock_objects, transaction_of
from django_delayq.ledger.subjects import objects_of
from django_delayq.models import Timeout
from django_delayq.scheduling.bulk import ids_in_lock_order

if TYPE_CHECKING:
    from django.dispatch import Signal

    from django_delayq.models import TimeoutQuerySet

    Target = Timeout | QuerySet[Timeout] | Iterable[Timeout]
    Progress = Callable[["Result"], object]

logger = logging.getLogger("django_delayq.steering")

MAX_IDS: Final = 1_000
"""A result lists at most this many changed and as many refused rows. It counts all of them."""
MAX_ACTOR_LENGTH: Final = 150

Objects = dict[tuple[int, str], Any]
"""Existing objects by content type and object id; the value is None if the object was not loaded."""


class Refusal(TextChoices):
    """The reason why an operation leaves a row unchanged."""

    MISSING = "missing", _("there is no such timeout any more")
    SETTLED = "settled", _("it is settled already")
    FIRING = "firing", _("it is firing just now")
    DEAD = "dead", _("it is dead: retry it")
    NOT_DEAD = "not_dead", _("it is not dead")
    OBJECT_GONE = "object_gone", _("its object is gone")
    SLOT_TAKEN = "slot_taken", _("a newer round is pending")
    POLICY_UNKNOWN = "policy_unknown", _("its policy is not declared any more")
    POLICY_STOPPED = "policy_stopped", _("its policy is paused: resume that first")
    NOT_LATER = "not_later", _("its deadline is not earlier than that")
    TOO_FAR = "too_far", _("that is farther away than a deadline can be")


class Refused(NamedTuple):
    """A row that an operation left unchanged."""

    id: int
    why: Refusal


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an operation on timeouts; with `dry_run`, the result that it would have.

    Attributes:
        verb: `cancel`, `fire_now`, `postpone` or `retry`.
        changed: the number of changed rows.
        refused: the number of unchanged rows by reason.
        ids: the first `MAX_IDS` changed rows. The pages that `progress` receives list all of theirs.
        refusals: the first `MAX_IDS` unchanged rows.
        dry_run: nothing was written.
    """

    verb: str
    changed: int = 0
    refused: Mapping[Refusal, int] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    refusals: tuple[Refused, ...] = ()
    dry_run: bool = False

    @property
    def unchanged(self) -> int:
        """The number of rows that were left unchanged."""
        return sum(self.refused.values())

    def __add__(self, other: Result) -> Result:
        """Return the result of both pages."""
        return Result(
            self.verb,
            self.changed + other.changed,
            dict(Counter(self.refused) + Counter(other.refused)),
            (self.ids + other.ids)[:MAX_IDS],
            (self.refusals + other.refusals)[:MAX_IDS],
            self.dry_run,
        )


@dataclass(slots=True)
class Page:
    """The context of one page: one transaction in which objects and rows are locked, unless it is a dry run."""

    using: str
    by: str
    reason: str
    now: datetime
    """The time of the database."""
    stopped: Stopped
    objects: Objects = field(default_factory=dict)
    slots: set[str] = field(default_factory=set)
    """Slots that a row of this page takes."""

    def note(self, row: Timeout, what: str, **details: Any) -> None:
        """Add an event with actor and reason to the history of `row`, in memory."""
        row.history = appended(row.history, event(what, self.now, by=self.by, reason=self.reason, **details))


class Action(NamedTuple):
    """What an operation does with the rows of a page."""

    name: str
    signal: Signal
    refuse: Callable[[Timeout, Page], Refusal | None]
    """Return why a row must stay unchanged, or None."""
    write: Callable[[list[Timeout], list[Timeout], Page], None]
    """Change the first rows in ledger and Redis. The second ones were refused."""


def run(target: Target, action: Action, *, by: str, reason: str, dry_run: bool, progress: Progress | None) -> Result:
    """Run `action` on each row of `target` and return what changed and what did not.

    Each page of 500 rows is one transaction, or part of the caller's transaction. Outside a transaction it may be
    interrupted between two pages and repeated. A single `Timeout` sends the action's signal; many send none.
    """
    by = checked_actor(by)
    total = Result(action.name, dry_run=dry_run)
    using, pages = _pages_of(target)
    for ids in pages:
        rows = Timeout.objects.using(using).filter(pk__in=ids)
        page = Page(using, by, reason, database_now(using), stop_cache.read(using))
        with nullcontext() if dry_run else transaction_of(using):
            page.objects = objects_by_id(rows, using, lock=not dry_run)
            found = list(rows) if dry_run else writing.locked(rows, using)
            refusals = [Refused(row_id, Refusal.MISSING) for row_id in sorted(set(ids) - {row.pk for row in found})]
            accepted, refused = [], []
            for row in sorted(found, key=lambda row: -row.pk):  # the newest round first: only one can be retried
                if why := action.refuse(row, page):
                    refused.append(row)
                    refusals.append(Refused(row.pk, why))
                else:
                    accepted.append(row)
            accepted.sort(key=lambda row: (row.slot, row.pk))
            if not dry_run:
                action.write(accepted, refused, page)
                for row in accepted if isinstance(target, Timeout) else ():
                    announce(action.signal, row, using)
        counts = dict(Counter(why for _, why in refusals))
        changed = tuple(row.pk for row in accepted)
        result = Result(action.name, len(changed), counts, changed, tuple(refusals), dry_run)
        total += result
        if progress is not None:
            progress(result)
    if not dry_run:
        logger.info(
            "%s by %s: %d timeouts changed, %d did not",
            *(action.name, by, total.changed, total.unchanged),
            extra={"event": "timeouts_steered", "verb": action.name, "by": by, "reason": reason},
        )
    return total


def _pages_of(target: Target) -> tuple[str, Iterable[Sequence[int]]]:
    """Return the database and pages of ids.

    In a caller's transaction the locks of all pages add up, so they follow the lock order. Otherwise each page is
    committed before the next one is read, and the order of ids needs no list of a million of them.
    """
    if isinstance(target, Timeout):
        if target.pk is None:
            raise ValueError("This Timeout is not a row of the ledger.")
        return database_of(Timeout, target), [[target.pk]]
    if isinstance(target, QuerySet) and target.model is Timeout and not target.query.is_sliced:
        using = database_of(Timeout, target)
        if not connections[using].in_atomic_block:
            return using, _pages_by_id(target.using(using).order_by("pk"))
    using, ids = ids_in_lock_order(target)
    return using, writing.chunks(ids)


def _pages_by_id(rows: QuerySet[Timeout]) -> Iterator[list[int]]:
    last = 0
    while page := list(rows.filter(pk__gt=last).values_list("pk", flat=True)[: writing.CHUNK]):
        yield page
        last = page[-1]


def objects_by_id(rows: TimeoutQuerySet, using: str, *, lock: bool) -> Objects:
    """Return the existing objects of `rows`; with `lock` fresh, and locked in lock order."""
    objects: Objects = {}
    for kind, model, pks in objects_of(rows.only("policy", "content_type_id", "object_id"), using):
        if lock:
            found: dict[Any, Any] = lock_objects(model, pks, using)
        else:
            found = dict.fromkeys(model._base_manager.using(using).filter(pk__in=pks).values_list("pk", flat=True))
        objects.update(((kind, object_id_of(model, pk)), obj) for pk, obj in found.items())
    return objects


def checked_actor(by: str) -> str:
    """Return `by` as it is stored, such as `admin:alice`, `rest:bob` or `cli:root`, at most 150 characters.

    Raises:
        ValueError: it is empty or not a string; every change needs an actor in its history.
    """
    if not isinstance(by, str) or not by.strip():
        raise ValueError(f"by= names who does it, such as 'admin:alice', and must not be {by!r}.")
    return clean(by.strip())[:MAX_ACTOR_LENGTH]
