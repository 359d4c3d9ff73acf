"""Run an operation on timeouts page by page: lock the objects, lock the rows, refuse or change each row, report.

An interrupted call that is repeated continues. Postponed twice, a timeout would be an hour too late. So an operation
that would change a row a second time stores after each page how far it has come, in the transaction of that page. The
same call, within a day, continues behind it: the same operation and arguments, for what the same statement selects. Two
such calls at a time share the rows.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final, NamedTuple, Required, TypeAlias, TypedDict

from django.db import connections
from django.db.models import Max, Q, QuerySet, TextChoices
from django.dispatch import Signal
from django.utils.translation import gettext_lazy as _

from django_delayq.arming.holding import Facts
from django_delayq.ledger.controls import Stopped, stop_cache
from django_delayq.ledger.locking import for_update, read_committed, transaction_of
from django_delayq.ledger.outbox import announce
from django_delayq.ledger.paging import Page, each_page, newest_id, read_page
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import order_matters
from django_delayq.models import Timeout, UnfinishedRun
from django_delayq.policy.policies import labels_of, registry
from django_delayq.rounds.memory import clean, clipped
from django_delayq.sql import statements
from django_delayq.sql.now import DatabaseNow, database_now

State = Timeout.State
logger = logging.getLogger("django_delayq.operations")

MAX_IDS: Final = 1_000
"""A result lists at most this many changed and as many refused rows. It counts all of them."""
FORGOTTEN_AFTER: Final = timedelta(days=1)
"""An operator who repeats an operation on another day means to do it again."""
BY_STATE: Final = ("policy", "state", "slot", "due_at")
"""The columns that a dry run reads if its operation depends on the state: of all 50, it takes three times as long."""
MAX_ACTOR_LENGTH: Final = 150
"""The length of the column `by`, and of user names in Django."""


class Refusal(TextChoices):
    """The reason why an operation leaves a row unchanged."""

    MISSING = "missing", _("no longer in the database")
    SETTLED = "settled", _("already settled")
    FIRING = "firing", _("firing now")
    NO_RETRY = "no_retry", _("firing now, without a further attempt")
    DEAD = "dead", _("dead: retry instead")
    NOT_DEAD = "not_dead", _("not dead")
    OBJECT_GONE = "object_gone", _("the object is gone")
    NOT_SETTLED = "not_settled", _("not settled yet")
    SLOT_TAKEN = "slot_taken", _("a newer round is pending")
    SUPERSEDED = "superseded", _("there is a newer round: fire that one again")
    POLICY_UNKNOWN = "policy_unknown", _("the policy is no longer declared")
    POLICY_STOPPED = "policy_stopped", _("the policy is stopped: resume it first")
    NOT_LATER = "not_later", _("the new time is not later than the deadline")
    TOO_FAR = "too_far", _("the new deadline is too far in the future")
    SAME_DEADLINE = "same_deadline", _("the deadline is this one already")
    HELD = "held", _("on hold or paused: resume it first")
    NOT_HELD = "not_held", _("not on hold or paused by hand")
    HAND_SET = "hand_set", _("its deadline was set by hand")
    ERASED = "erased", _("its data was erased")
    NO_DEADLINE = "no_deadline", _("its policy computes no deadline for it")


class Refused(NamedTuple):
    """A row that an operation left unchanged."""

    id: int
    why: Refusal


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an operation on timeouts; with `dry_run`, the result that it would have.

    Attributes:
        verb: the name of the function, such as `fire_now`.
        changed: the number of changed rows.
        refused: the number of unchanged rows by reason.
        ids: the first `MAX_IDS` changed rows. Each page that `progress` receives lists all of its rows.
        refusals: the first `MAX_IDS` unchanged rows.
        dry_run: nothing was written.
        due: how many of the changed rows of each policy are due now because of it. Empty in the pages of `progress`.
        continued: how many rows the same call had changed before it was interrupted; they are not among `changed`.
        first: the three changed rows that had the earliest deadlines. Empty in the pages of `progress`.
    """

    verb: str
    changed: int = 0
    refused: Mapping[Refusal, int] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    refusals: tuple[Refused, ...] = ()
    dry_run: bool = False
    due: Mapping[str, int] = field(default_factory=dict)
    continued: int = 0
    first: tuple[int, ...] = ()

    @property
    def due_at_once(self) -> int:
        return sum(self.due.values())

    @property
    def unchanged(self) -> int:
        return sum(self.refused.values())

    def __add__(self, other: Result) -> Result:
        return Result(
            self.verb,
            self.changed + other.changed,
            dict(Counter(self.refused) + Counter(other.refused)),
            (self.ids + other.ids)[:MAX_IDS],
            (self.refusals + other.refusals)[:MAX_IDS],
            self.dry_run,
        )


Target: TypeAlias = Timeout | QuerySet[Timeout] | Iterable[Timeout]
Progress: TypeAlias = Callable[[Result], object]


class How(TypedDict, total=False):
    """Who operates on timeouts and why; with `dry_run` they are counted only; `progress` gets each page's result."""

    by: Required[str]
    reason: str
    dry_run: bool
    progress: Progress | None


@dataclass
class Action:
    """What an operation does with the rows of a page. Each call has its own."""

    name: str
    signal: Signal | None
    """Sent for a single timeout, with the row, or with the one that `write` returns; None: nothing is sent."""
    refuse: Callable[[Timeout, Context], Refusal | None]
    """Return why a row must stay unchanged, or None."""
    write: Callable[[list[Timeout], Context], Sequence[Timeout] | None]
    """Change the rows in ledger and Redis. Return those for which the signal is sent; None: for these rows."""
    is_by_state: bool = False
    """`refuse` reads the policy and the state of a row, and nothing else of it."""
    begins_rounds: bool = False
    """Read the newest rows first: of several rounds of one object only the newest can begin again."""
    newest: int | None = None
    """If it begins rounds: the id of the newest row before the first page."""
    begun: set[str] = field(default_factory=set)
    """The slots in which it has begun rounds, or in a dry run would have; about 150 bytes each."""
    due: Counter[str] = field(default_factory=Counter)
    """How many rows of each policy it has made due now, or in a dry run would have."""
    continued: int = 0
    """How many rows the same call had changed before it was interrupted."""
    first: list[tuple[datetime, int]] = field(default_factory=list)
    """The earliest deadlines of rows that it has changed, or in a dry run would have: three, as a preview names."""
    arguments: object = None
    """What distinguishes the call from others, if it would change a row a second time. See `_begin_or_continue`."""

    def run(
        self, target: Target, *, by: str, reason: str = "", dry_run: bool = False, progress: Progress | None = None
    ) -> Result:
        """Change each row of `target` that is not refused, and return what changed and what did not.

        Each page of 500 rows is one transaction, or part of the caller's transaction. Outside a transaction it may be
        interrupted between two pages and repeated: no row of a queryset is changed a second time. A single `Timeout`
        sends the signal; many send none.
        """
        by, reason = checked_actor(by), clipped(reason)

        def change(page: Page) -> Result:
            context, accepted = Context(self, Facts.of_page(page), by, reason), []
            missing = set(page.ids) - {row.pk for row in page.rows}
            refusals = [Refused(row_id, Refusal.MISSING) for row_id in sorted(missing)]
            for row in sorted(page.rows, key=lambda row: -row.pk):  # the newest round first: only one can be retried
                if why := self.refuse(row, context):
                    context.refused.append(row)
                    refusals.append(Refused(row.pk, why))
                else:
                    accepted.append(row)
            accepted.sort(key=lambda row: (row.slot, row.pk))
            self.first = heapq.nsmallest(3, [*self.first, *((row.due_at, row.pk) for row in accepted)])
            if not dry_run:
                new = self.write(accepted, context)
                if self.signal is not None and isinstance(target, Timeout):
                    for row in accepted if new is None else new:
                        announce(self.signal, row, page.using)
            counts = dict(Counter(why for _, why in refusals))
            return Result(self.name, len(accepted), counts, tuple(row.pk for row in accepted), tuple(refusals), dry_run)

        total = Result(self.name, dry_run=dry_run)
        for result in self._pages(target, change, by, dry_run=dry_run):
            total += result
            if progress is not None:
                progress(result)
        if not dry_run:
            logger.info(
                "%s by %s: %d changed, %d unchanged",
                *(self.name, by, total.changed, total.unchanged),
                extra={"event": "timeouts_operated", "verb": self.name, "by": by, "reason": reason},
            )
        return replace(total, due=dict(self.due), continued=self.continued, first=tuple(pk for _, pk in self.first))

    def _pages(self, target: Any, change: Callable[[Page], Result], by: str, *, dry_run: bool) -> Iterator[Result]:
        """Return the results of all pages, or of those that an interrupted call has left."""
        by_id = "-pk" if self.begins_rounds else "pk"
        if self.arguments is None or dry_run or not _may_continue(target):
            columns = BY_STATE if dry_run and self.is_by_state else ()
            return each_page(target, change, only=Q(), by_id=by_id, dry_run=dry_run, columns=columns)
        rows = target.using(database_of(Timeout, target)).order_by(by_id)
        run = _begin_or_continue(rows, self.name, self.arguments, by)
        self.newest, self.continued = run.newest_id, run.changed
        return _each_page_of(rows, run, change)


@dataclass
class Context:
    """What an operation knows about the page whose rows it changes."""

    action: Action
    facts: Facts
    """Of the page."""
    by: str
    reason: str
    refused: list[Timeout] = field(default_factory=list)
    """The rows of the page that stay unchanged."""

    def fires(self, row: Timeout, is_due: bool = True) -> None:
        """Note whether the operation makes `row`, which it does not refuse, due now."""
        self.action.due[labels_of(row.policy)[0]] += is_due

    @property
    def using(self) -> str:
        return self.facts.using

    @property
    def now(self) -> datetime:
        """Return the time of the database."""
        return self.facts.now

    @cached_property
    def stopped(self) -> Stopped:
        return stop_cache.read(self.using)

    @cached_property
    def rounds(self) -> dict[str, dict[str, Any]]:
        """Return for each slot of the page's rows the `newest` id, and whether it is `taken`."""
        slots = {row.slot for row in self.facts.rows}
        rows = Timeout.objects.using(self.using).filter(slot__in=slots).exclude(cause=Timeout.Cause.SUPERSEDED)
        by_slot: Any = read_committed(rows.order_by("slot"), self.using).values("slot")
        found = by_slot.annotate(newest=Max("pk"), taken=Max("slot_taken"))
        return {each["slot"]: each for each in found}

    @property
    def event(self) -> dict[str, Any]:
        return {"at": self.now, "by": self.by, "reason": self.reason}


def refuse_round(row: Timeout, context: Context, *, is_same_round: bool = False) -> Refusal | None:
    """Return why no round can begin for the object of `row`, or None: then the slot is taken for the whole call.

    A slot is taken while a round is pending, and by rounds that were scheduled since the call began: they may have
    fired between two pages. `is_same_round`: that of `row` continues, which no newer round may have followed.
    """
    if row.erased_at is not None:
        return Refusal.ERASED
    if registry.get(row.policy) is None:
        return Refusal.POLICY_UNKNOWN
    if context.facts.of(row) is None:
        return Refusal.OBJECT_GONE
    action, found = context.action, context.rounds.get(row.slot)
    if action.newest is None:
        action.newest = newest_id(context.using)
    if row.slot in action.begun or (found and (found["taken"] or found["newest"] > action.newest)):
        return Refusal.SLOT_TAKEN
    # As `marking.is_superseded`, for all rows of the page in one query.
    if is_same_round and found and found["newest"] > row.pk:
        return Refusal.SUPERSEDED
    action.begun.add(row.slot)
    return None


def refuse_unless_pending(row: Timeout, context: Context) -> Refusal | None:
    """Return why `row` is not pending, or None."""
    return Refusal.HELD if row.state == State.HELD else refuse_unless_waiting(row, context)


def refuse_unless_waiting(row: Timeout, context: Context) -> Refusal | None:
    """Return why `row` is neither pending nor held, or None."""
    if row.is_waiting:
        return None
    return {State.FIRING: Refusal.FIRING, State.DEAD: Refusal.DEAD}.get(State(row.state), Refusal.SETTLED)


def checked_actor(by: str) -> str:
    """Return `by` as it is stored, such as `admin:alice`. Raises ValueError if it is empty or not a string."""
    if not isinstance(by, str) or not by.strip():
        raise ValueError(f"by= names who does it, such as 'admin:alice', and must not be {by!r}.")
    return clean(by.strip())[:MAX_ACTOR_LENGTH]


def _may_continue(target: object) -> bool:
    """Return whether `target` is a selection whose rows can be read in the order of their ids, page by page."""
    if not isinstance(target, QuerySet) or target.model is not Timeout or order_matters(target):
        return False
    return not connections[database_of(Timeout, target)].in_atomic_block


def _begin_or_continue(rows: QuerySet[Timeout], verb: str, arguments: object, by: str) -> UnfinishedRun:
    """Return the run of this operation that was interrupted, or a new one, which is not saved yet.

    Raises the database's errors.
    """
    using = rows.db
    sql, parameters = rows.order_by().values("pk").query.get_compiler(using).as_sql()
    digest = hashlib.blake2b(repr((verb, arguments, sql, parameters)).encode(), digest_size=32).hexdigest()
    recent = Q(touched_at__gt=DatabaseNow() - FORGOTTEN_AFTER)
    found = UnfinishedRun.objects.using(using).filter(recent, digest=digest).first()
    if found is not None:
        return found
    newest = newest_id(using)
    cursor = newest + 1 if _is_descending(rows) else 0
    return UnfinishedRun(verb=verb, digest=digest, by=by, cursor=cursor, newest_id=newest)


def _is_descending(rows: QuerySet[Timeout]) -> bool:
    return rows.query.order_by == ("-pk",)


def _each_page_of(rows: QuerySet[Timeout], run: UnfinishedRun, change: Callable[[Page], Result]) -> Iterator[Result]:
    """Call `change` for each page of `rows`, ordered by id, behind the place of `run`; yield its results.

    Each page is a transaction of its own, which also stores the place, and how many rows were changed; the last one
    deletes the run. One page alone stores nothing.
    """
    using, beyond, is_last = rows.db, "pk__lt" if _is_descending(rows) else "pk__gt", False
    while not is_last:
        with transaction_of(using):
            if run.pk is not None:
                place = next(iter(for_update(UnfinishedRun.objects.using(using).filter(pk=run.pk), using)), None)
                if place is None:  # another call has completed it
                    return
                run = place
            behind = rows.filter(pk__lte=run.newest_id, **{beyond: run.cursor})
            page: list[int] = list(behind.values_list("pk", flat=True)[: statements.CHUNK])
            result = change(read_page(list(dict.fromkeys(page)), using, only=Q()))
            is_last = len(page) < statements.CHUNK
            if not is_last:
                run.cursor, run.changed = page[-1], run.changed + result.changed
                run.touched_at = database_now(using)
                if run.pk is None:  # the first time, those are forgotten that no call has continued
                    runs = UnfinishedRun.objects.using(using)
                    runs.filter(touched_at__lte=run.touched_at - FORGOTTEN_AFTER).delete()
                    run.at = run.touched_at
                run.save(using=using)
            elif run.pk is not None:
                run.delete(using=using)
        yield result
