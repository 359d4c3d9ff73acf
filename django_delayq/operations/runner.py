"""Run an operation on timeouts page by page: lock the objects, lock the rows, refuse or change each, report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from django.db.models import QuerySet, TextChoices
from django.utils.translation import gettext_lazy as _

from django_delayq.clock import database_now
from django_delayq.ledger.controls import Stopped, stop_cache
from django_delayq.ledger.history import clean
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.paging import Page, each_page
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from django.dispatch import Signal

    Target = Timeout | QuerySet[Timeout] | Iterable[Timeout]
    Progress = Callable[["Result"], object]

logger = logging.getLogger("django_delayq.steering")

MAX_IDS: Final = 1_000
"""A result lists at most this many changed and as many refused rows. It counts all of them."""
MAX_ACTOR_LENGTH: Final = 150


class Refusal(TextChoices):
    """The reason why an operation leaves a row unchanged."""

    MISSING = "missing", _("it no longer exists")
    SETTLED = "settled", _("it is already settled")
    FIRING = "firing", _("it is firing now")
    DEAD = "dead", _("it is dead: retry it")
    NOT_DEAD = "not_dead", _("it is not dead")
    OBJECT_GONE = "object_gone", _("its object is gone")
    SLOT_TAKEN = "slot_taken", _("a newer round is pending")
    POLICY_UNKNOWN = "policy_unknown", _("its policy is no longer declared")
    POLICY_STOPPED = "policy_stopped", _("its policy is stopped: resume it first")
    NOT_LATER = "not_later", _("the new time is not later than its deadline")
    TOO_FAR = "too_far", _("the new deadline is too far in the future")


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
        ids: the first `MAX_IDS` changed rows. Each page that `progress` receives lists all of its rows.
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
class Context:
    """What an operation knows about the page whose rows it changes."""

    page: Page
    by: str
    reason: str
    now: datetime
    """The time of the database."""
    stopped: Stopped
    slots: set[str] = field(default_factory=set)
    """Slots that a row of this page takes."""

    @property
    def using(self) -> str:
        """The database."""
        return self.page.using

    @property
    def event(self) -> EventDetails:
        """The part of an event that is the same for all rows."""
        return {"at": self.now, "by": self.by, "reason": self.reason}


class EventDetails(TypedDict):
    """When, who and why."""

    at: datetime
    by: str
    reason: str


class Action(NamedTuple):
    """What an operation does with the rows of a page."""

    name: str
    signal: Signal
    refuse: Callable[[Timeout, Context], Refusal | None]
    """Return why a row must stay unchanged, or None."""
    write: Callable[[list[Timeout], list[Timeout], Context], None]
    """Change the first rows in ledger and Redis. The second ones were refused."""


def run(target: Target, action: Action, *, by: str, reason: str, dry_run: bool, progress: Progress | None) -> Result:
    """Run `action` on each row of `target` and return what changed and what did not.

    Each page of 500 rows is one transaction, or part of the caller's transaction. Outside a transaction it may be
    interrupted between two pages and repeated. A single `Timeout` sends the action's signal; many send none.
    """
    by = checked_actor(by)
    if isinstance(target, Timeout) and target.pk is None:
        raise ValueError("This Timeout is not a row of the ledger.")

    def change(page: Page) -> Result:
        context = Context(page, by, reason, database_now(page.using), stop_cache.read(page.using))
        refusals = [
            Refused(row_id, Refusal.MISSING) for row_id in sorted(set(page.ids) - {row.pk for row in page.rows})
        ]
        accepted, refused = [], []
        for row in sorted(page.rows, key=lambda row: -row.pk):  # the newest round first: only one can be retried
            if why := action.refuse(row, context):
                refused.append(row)
                refusals.append(Refused(row.pk, why))
            else:
                accepted.append(row)
        accepted.sort(key=lambda row: (row.slot, row.pk))
        if not dry_run:
            action.write(accepted, refused, context)
            for row in accepted if isinstance(target, Timeout) else ():
                announce(action.signal, row, page.using)
        counts = dict(Counter(why for _, why in refusals))
        return Result(action.name, len(accepted), counts, tuple(row.pk for row in accepted), tuple(refusals), dry_run)

    total = Result(action.name, dry_run=dry_run)
    for result in each_page(target, change, pending_only=False, by_id=True, dry_run=dry_run):
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


def checked_actor(by: str) -> str:
    """Return `by` as it is stored, such as `admin:alice`, `rest:bob` or `cli:root`, at most 150 characters.

    Raises:
        ValueError: it is empty or not a string; every change needs an actor in its history.
    """
    if not isinstance(by, str) or not by.strip():
        raise ValueError(f"by= names who does it, such as 'admin:alice', and must not be {by!r}.")
    return clean(by.strip())[:MAX_ACTOR_LENGTH]
