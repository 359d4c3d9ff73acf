"""Many rows, page by page: lock their objects, then themselves, judge each, write, and say what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TypedDict

from django_delayq.clock import database_now
from django_delayq.ledger.controls import Stopped, read_stopped
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.paging import Page, each_page
from django_delayq.models import Timeout
from django_delayq.operations.results import Refusal, Refused, Steered, steered

logger = logging.getLogger("django_delayq.steering")

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.dispatch import Signal

    Target = Timeout | QuerySet[Timeout] | Iterable[Timeout]
    Progress = Callable[[Steered], object]


class Said(TypedDict):
    """The part of an event that is the same for all rows."""

    at: datetime
    by: str
    reason: str


@dataclass(slots=True)
class Around:
    """What a verb has to know besides the row itself. Objects and rows are locked, unless it is a dry run."""

    page: Page
    by: str
    reason: str
    now: datetime
    """The database's moment."""
    stopped: Stopped
    slots: set[str] = field(default_factory=set)
    """Taken on this page already."""

    @property
    def using(self) -> str:
        return self.page.using

    @property
    def said(self) -> Said:
        """Return what each event in a history says: when, who and why."""
        return {"at": self.now, "by": self.by, "reason": self.reason}


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
    if isinstance(target, Timeout) and target.pk is None:
        raise ValueError("This Timeout is not a row of the ledger.")

    def change(page: Page) -> Steered:
        around = Around(page, by, reason, database_now(page.using), read_stopped(page.using))
        chosen, refused, refusals = _judged(page, verb, around)
        if not dry_run:
            verb.write(chosen, refused, around)
            for row in chosen if isinstance(target, Timeout) else ():
                announce(verb.signal, row, page.using)
        return steered(verb.name, [row.pk for row in chosen], refusals, dry_run=dry_run)

    total = Steered(verb.name, dry_run=dry_run)
    for page in each_page(target, change, pending_only=False, by_id=True, dry_run=dry_run):
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


def _judged(page: Page, verb: Verb, around: Around) -> tuple[list[Timeout], list[Timeout], list[Refused]]:
    """Which rows are to be changed, and which are not and why. The newest of several rounds comes first."""
    missing = set(page.ids) - {row.pk for row in page.rows}
    refusals = [Refused(row_id, Refusal.MISSING) for row_id in sorted(missing)]
    chosen, refused = [], []
    for row in sorted(page.rows, key=lambda row: -row.pk):
        why = verb.refusal(row, around)
        if why is None:
            chosen.append(row)
        else:
            refused.append(row)
            refusals.append(Refused(row.pk, why))
    chosen.sort(key=lambda row: (row.slot, row.pk))
    return chosen, refused, refusals
