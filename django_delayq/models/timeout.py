"""The ledger: one row per timeout, written in the caller's transaction. It is the truth; Redis is an index.

Only `ledger` writes rows, each change a compare-and-set; what changes is decided in `rounds`. Constraints tie every
state to its columns, so that the database refuses an inconsistent row.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any, ClassVar, NoReturn, Self

from django.contrib.contenttypes.fields import GenericForeignKey
from django.contrib.contenttypes.models import ContentType
from django.db import models, router
from django.db.models import Field, Q
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_delayq.sql.key_types import (
    HAS_END_OF_HOLD,
    HAS_FAILED,
    HAS_KEY,
    HAS_OWN_QUEUE,
    HAS_SHARE,
    HexField,
    KindField,
    PartialIndex,
)
from django_delayq.sql.now import DatabaseNow

SLOT_BYTES = 16
"""With fewer, two slots could be made alike: see `slot_of`."""


def new_idempotency_key() -> str:
    """Return a key that is unique over all installations."""
    return uuid.uuid4().hex


def slot_of(label: str, content_type_id: int, object_id: str, key: str) -> str:
    """Return the slot that at most one pending timeout may hold: a digest of policy, object and key.

    `label`: the oldest one of the policy, see `TimeoutPolicy.oldest_label`, so that a rename changes no slot.
    A digest, because MySQL can neither index four long strings together nor compare them case-sensitively. A key that
    takes the slot of another object costs an attacker 2**128 attempts.
    """
    text = "\0".join((label, str(content_type_id), object_id, key))  # a format has the names of enumerations
    return hashlib.blake2b(text.encode(), digest_size=SLOT_BYTES).hexdigest()


class TimeoutQuerySet(models.QuerySet["Timeout"]):
    """Rows of the ledger, filtered by what happens to them."""

    def pending(self) -> TimeoutQuerySet:
        return self.filter(state=Timeout.State.PENDING, settled_at__isnull=True)

    def held(self) -> TimeoutQuerySet:
        """Return the rows whose clock is stopped."""
        return self.filter(state=Timeout.State.HELD, settled_at__isnull=True)

    def waiting(self) -> TimeoutQuerySet:
        """Return what still waits for its deadline: pending rows, and those whose clock is stopped."""
        return self.filter(state__in=WAITING, settled_at__isnull=True)

    def unsettled(self) -> TimeoutQuerySet:
        return self.filter(settled_at__isnull=True)

    def failing(self) -> TimeoutQuerySet:
        """Return pending rows of which an attempt has failed, and which are tried again, by `delayq_failing`."""
        return self.pending().filter(HAS_FAILED)

    def due(self) -> TimeoutQuerySet:
        """Return pending rows whose next attempt is due by the database's clock."""
        return self.pending().filter(run_at__lte=DatabaseNow())

    def of_labels(self, labels: Iterable[str]) -> TimeoutQuerySet:
        return self.filter(policy__in=tuple(labels))

    def of_key(self, key: str) -> TimeoutQuerySet:
        """Return the rows with this key, of all policies and objects, by `delayq_key`; none for the empty key."""
        return self.filter(HAS_KEY, key=key)


def refuse_write(*_: object, **__: object) -> NoReturn:
    """Raise TypeError. Replaces the writing methods of relations."""
    raise TypeError("Timeouts are not written through a relation. Use a function such as schedule_timeout.")


class RelatedTimeoutQuerySet(TimeoutQuerySet):
    """The read-only querysets of `order.timeouts`. Not created per model, so that they can be pickled."""

    # The async variants call these.
    create = get_or_create = update_or_create = bulk_create = bulk_update = update = delete = refuse_write


class Timeout(models.Model):
    """One round of one policy for one object (and key). Kept when its object or policy is deleted."""

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        HELD = "held", _("on hold")
        FIRING = "firing", _("firing")
        FIRED = "fired", _("fired")
        SKIPPED = "skipped", _("skipped")
        CANCELLED = "cancelled", _("cancelled")
        DEAD = "dead", _("dead")

        @property
        def is_settled(self) -> bool:
            return self not in {Timeout.State.PENDING, Timeout.State.HELD, Timeout.State.FIRING}

    class Cause(models.TextChoices):
        """Why a row was settled."""

        DUE = "due", _("it was due")
        HAND = "hand", _("by hand")
        CONDITION = "condition", _("the condition stopped holding")
        GONE = "gone", _("the object is gone")
        HANDLER = "handler", _("decided by the handler")
        RETRIES = "retries", _("all retries are used up")
        LATE = "late", _("it was too late")
        SUPERSEDED = "superseded", _("a newer round took its place")
        LIMIT = "limit", _("a limit of its policy")
        SHADOW = "shadow", _("its policy is in shadow mode")
        RETIRED = "retired", _("its policy was retired")

    id = models.BigAutoField(primary_key=True)
    policy: Field[str, str] = models.CharField(_("policy"), max_length=200)
    # Without a name in ContentType, where a model `Timeout` of the project may have its own.
    content_type = KindField(
        ContentType, models.DO_NOTHING, "+", verbose_name=_("kind of object"), db_constraint=False, db_index=False
    )
    object_id: Field[str, str] = models.CharField(_("object id"), max_length=255)
    content_object = GenericForeignKey("content_type", "object_id", for_concrete_model=True)
    key: Field[str, str] = models.CharField(_("key"), max_length=200, default="", blank=True)
    queue: Field[str, str] = models.CharField(_("queue"), max_length=100, default="default")
    state: Field[str, str] = models.CharField(_("state"), max_length=10, choices=State.choices, default=State.PENDING)
    cause: Field[str, str] = models.CharField(_("cause"), max_length=12, choices=Cause.choices, default="", blank=True)
    due_at: Field[datetime, datetime] = models.DateTimeField(_("deadline"))
    run_at: Field[datetime, datetime] = models.DateTimeField(_("next attempt"))
    since_at: Field[datetime | None, datetime | None] = models.DateTimeField(_("counts from"), null=True, blank=True)
    first_due_at: Field[datetime, datetime] = models.DateTimeField(_("first deadline"))
    terms: Field[str | None, str | None] = models.CharField(  # noqa: DJ001 - NULL is not empty
        max_length=200, null=True, default=None, editable=False
    )
    """The values with which its policy has computed its deadline, see `policy.terms`; NULL: it was set by hand."""
    computed_due_at: Field[datetime | None, datetime | None] = models.DateTimeField(
        null=True, default=None, editable=False
    )
    """What its policy has computed of them; the deadline is later if holds have moved it. NULL if `terms` is."""
    share: Field[str, str] = models.CharField(max_length=64, default="", editable=False)
    """The value by which its rate counts it, or of `batch_by`: see `ledger.shares`; empty: it has none."""
    trace: Field[str, str] = models.CharField(max_length=55, default="", editable=False)
    """The `traceparent` of the code that has begun its round, see `ledger.traces`; empty: it is not known."""
    step: Field[str, str] = models.CharField(_("next step"), max_length=60, default="", blank=True)
    """The step that is next, or that is firing; empty: the handler of the policy. See `ledger.planned`."""
    steps_over: Field[str, str] = models.CharField(max_length=1200, default="", editable=False)
    """The steps of this round that ran, are dead or were passed, as `steps.with_over` writes them."""
    extensions: Field[int, int] = models.PositiveSmallIntegerField(_("extensions"), default=0)
    attempts: Field[int, int] = models.PositiveSmallIntegerField(_("attempts"), default=0)
    payload: Field[Any, Any] = models.JSONField(_("payload"), null=True, blank=True, default=None)
    history: Field[Any, Any] = models.JSONField(_("history"), default=list, blank=True)
    reason: Field[str, str] = models.CharField(_("reason"), max_length=255, default="", blank=True)
    created_at: Field[datetime, datetime] = models.DateTimeField(_("created at"))
    settled_at: Field[datetime | None, datetime | None] = models.DateTimeField(_("settled at"), null=True, blank=True)
    idempotency_key: Field[str, str] = HexField(
        _("idempotency key"), max_length=32, default=new_idempotency_key, editable=False
    )

    # Of a stopped clock: see `rounds.events`. Mostly NULL, which takes no space.
    remaining: Field[timedelta | None, timedelta | None] = models.DurationField(
        _("rest of its time"), null=True, blank=True, default=None
    )
    """Of a row that is held, or was when it was cancelled: how long its deadline is ahead when its clock runs again.
    Negative if its clock was stopped within the grace of its policy. Only displayed: see `rounds.events`."""
    held_at: Field[datetime | None, datetime | None] = models.DateTimeField(
        _("on hold since"), null=True, blank=True, default=None
    )
    held_until: Field[datetime | None, datetime | None] = models.DateTimeField(
        _("on hold until"), null=True, blank=True, default=None
    )
    """When a hold by hand ends by itself."""
    held_by_hand = models.BooleanField(_("on hold by hand"), default=False)
    """Only `resume_timeout` or `held_until` ends it, also if the condition `hold_when` does not hold."""
    held_when = models.BooleanField(default=False, editable=False)
    """`hold_when` held for its object when it was compared last, beside a hold by hand: its clock stays stopped."""
    stops: Field[Any, Any] = models.JSONField(null=True, default=None, editable=False)
    """When its clock was stopped in this round, oldest first: see `memory.with_stop`. Its deadline is what its
    policy computes, moved by these, so that another calendar measures them again."""
    keeps_deadline = models.BooleanField(default=False, editable=False)
    """Of a row that is held by hand: it is paused, its clock runs, and its deadline stays where it is. `remaining` is
    how much later than the deadline its next attempt is."""

    # Internal: see `could_fire_at` for the first, and `ledger.claiming` for the last two.
    # The first is its last move, or the end of a snooze or a stop.
    ready_at = models.DateTimeField(null=True, default=None, editable=False)
    slot = HexField(max_length=32, editable=False)  # see `slot_of`
    slot_taken = models.PositiveSmallIntegerField(null=True, default=1, editable=False)  # NULL: firing or settled
    final_attempt = models.BooleanField(default=False, editable=False)  # cancelled while it was firing
    claims = models.PositiveSmallIntegerField(default=0, editable=False)  # without a result, as deliveries of an entry
    claimed_until = models.DateTimeField(null=True, default=None, editable=False)  # until then, no worker claims it

    # Internal: what the round has been through, as far as decisions depend on it. They do not read `history`, which
    # drops the oldest events. Mostly NULL, which takes no space. Replacing a row resets them: see `rounds.columns`.
    snoozes = models.PositiveSmallIntegerField(default=0, editable=False)
    """How often the handler has snoozed since the round began, or since an operator has retried it."""
    restarted_at = models.DateTimeField(null=True, default=None, editable=False)
    """When its deadline was last set independently of the former one. A hold before this time does not move it."""
    asked_due_at = models.DateTimeField(null=True, default=None, editable=False)
    """The deadline that the application or a save has set, if an operator or a hold has moved it since then."""
    hold_ended_at = models.DateTimeField(null=True, default=None, editable=False)
    """When the end of a hold has last moved it."""
    is_requested = models.BooleanField(default=False, editable=False)
    """An operator wants it fired, however late it is. A move or a snooze takes that back, but no move of all rows."""
    is_guarded = models.BooleanField(default=False, editable=False)
    """`before_deadline` has ended it. If it is armed again, that is most likely by a save of an old instance."""
    is_due_by_request = models.BooleanField(default=False, editable=False)
    """Its deadline is that of "fire now": no deadline that a caller has granted."""
    suspected_at = models.DateTimeField(null=True, default=None, editable=False)
    """Since when it is suspected that a process died of it. If it runs since then, it runs alone in its process; with
    `atomic=False` only while it is `firing`. None: the outcome is known, or it runs beside others."""
    deaths = models.PositiveSmallIntegerField(default=0, editable=False)
    """How many processes have died while it ran alone in them, since the round began or an operator retried it."""
    erased_at = models.DateTimeField(null=True, default=None, editable=False)
    """When its personal data was last erased, so that it cannot be attempted again. None: it was not."""
    first_failed_at: Field[Any, Any] = models.DateTimeField(null=True, default=None, editable=False)
    last_failed_at: Field[Any, Any] = models.DateTimeField(null=True, default=None, editable=False)

    objects: ClassVar[Any] = TimeoutQuerySet.as_manager()

    class Meta:
        verbose_name = _("timeout")
        verbose_name_plural = _("timeouts")
        default_permissions = ("view",)
        permissions = (
            ("cancel_timeout", _("Can cancel timeouts")),
            ("fire_timeout", _("Can have timeouts fired now")),
            ("postpone_timeout", _("Can postpone timeouts")),
            ("hold_timeout", _("Can hold, pause and resume timeouts")),
            ("retry_timeout", _("Can retry dead timeouts")),
            ("refire_timeout", _("Can fire settled timeouts again")),
            ("schedule_timeout", _("Can schedule timeouts for objects")),
            ("erase_timeout", _("Can erase the personal data of settled timeouts")),
        )
        constraints: ClassVar[list[models.BaseConstraint]] = [
            # NULLs are distinct on every supported database, so settled rows release the slot.
            models.UniqueConstraint(fields=["slot", "slot_taken"], name="delayq_one_pending_per_slot"),
            models.CheckConstraint(
                condition=(
                    # What several states have in common once: PostgreSQL reads the text of a check in each statement.
                    Q(
                        Q(state="firing", slot_taken__isnull=True)
                        | Q(
                            Q(state="pending", remaining__isnull=True) | Q(state="held", remaining__isnull=False),
                            slot_taken=1,
                            slot_taken__isnull=False,
                        ),
                        settled_at__isnull=True,
                        cause="",
                    )
                    | Q(
                        ~Q(cause=""),
                        state__in=["fired", "skipped", "cancelled", "dead"],
                        settled_at__isnull=False,
                        slot_taken__isnull=True,
                    )
                ),
                name="delayq_state_fits_its_columns",
            ),
        ]
        indexes: ClassVar[list[models.Index]] = [
            # For workers; without settled rows, which would slow the sweep.
            PartialIndex(fields=["state", "run_at", "id"], name="delayq_unsettled", rows=Q(settled_at__isnull=True)),
            models.Index(fields=["content_type", "object_id"], name="delayq_object"),
            # If it had all rows, SQLite would search it for pending rows, unsorted.
            PartialIndex(fields=["settled_at", "id"], name="delayq_settled", rows=Q(settled_at__isnull=False)),
            # For operators: pending, dead and fired rows of one policy. For a worker with a backlog: the policies that
            # have due rows.
            models.Index(fields=["policy", "state", "run_at", "id"], name="delayq_policy"),
            # For operators who search by deadline, key and queue. Few rows have a key or a queue of their own.
            models.Index(fields=["due_at", "id"], name="delayq_due"),
            # Failing rows of a policy, those with the most attempts last. They are few among its pending ones.
            PartialIndex(
                fields=["policy", "state", "attempts", "id"],
                name="delayq_failing",
                rows=Q(HAS_FAILED, settled_at__isnull=True),
            ),
            PartialIndex(fields=["key", "id"], name="delayq_key", rows=HAS_KEY),
            PartialIndex(fields=["queue", "state", "run_at", "id"], name="delayq_queue", rows=HAS_OWN_QUEUE),
            # For firings: the due rows of one value of `batch_by`.
            PartialIndex(
                fields=["share", "state", "run_at", "id"],
                name="delayq_share",
                rows=Q(HAS_SHARE, settled_at__isnull=True),
            ),
            # For workers: the holds by hand that end by themselves.
            PartialIndex(fields=["held_until", "id"], name="delayq_held_until", rows=HAS_END_OF_HOLD),
        ]

    def __str__(self) -> str:
        about = f"{self.object_id}{f' ({self.key})' if self.key else ''}"
        words = gettext("{policy} of {object}: {state}")
        return words.format(policy=self.policy, object=about, state=self.get_state_display())

    @classmethod
    def from_db(cls, *values: Any, **options: Any) -> Self:
        row = super().from_db(*values, **options)
        row.note_stored()
        return row

    def note_stored(self) -> None:
        """Remember the columns of the row as those that the ledger has."""
        stored = dict(vars(self))
        stored.pop("stored", None)
        del stored["_state"]
        vars(self)["stored"] = stored

    def refresh_from_db(
        self, using: str | None = None, fields: Iterable[str] | None = None, from_queryset: Any = None
    ) -> None:
        """Read the row, or a deferred column, from the writer: a replica may have an older state."""
        if using is None and from_queryset is None:
            using = router.db_for_write(type(self), instance=self)
        super().refresh_from_db(using, fields, from_queryset)

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Return the failed attempts in `history`, oldest first, with their tracebacks."""
        return [event for event in self.history if event.get("what") == "failed"]

    @property
    def last_error(self) -> str:
        """Return type and message of the last failed attempt, or an empty string if none has failed."""
        last = (self.errors or [{}])[-1]
        return ": ".join(last[name] for name in ("error", "message") if last.get(name))

    @property
    def is_settled(self) -> bool:
        return self.settled_at is not None

    @property
    def is_waiting(self) -> bool:
        """Return whether the row waits for its deadline: it is pending, or its clock is stopped."""
        return self.state in WAITING

    @property
    def is_paused(self) -> bool:
        """Return whether the row does not fire until it is resumed, but keeps its deadline."""
        return self.state == self.State.HELD and self.keeps_deadline

    @property
    def has_stopped_clock(self) -> bool:
        """Return whether its clock is stopped, so that it keeps the rest of its time and no deadline."""
        return self.state == self.State.HELD and not self.keeps_deadline

    @property
    def time_left(self) -> timedelta:
        """Return the rest of its time, if its clock is stopped; nothing if it was stopped after its deadline."""
        return max(self.remaining or timedelta(0), timedelta(0))

    def progress(self) -> Any:
        """Return how much of its time it has used and has left: a `Progress` or None, see `get_progress`."""
        return import_module("django_delayq").get_progress(self)  # which is above this room

    @property
    def is_computed(self) -> bool:
        """Return whether its policy has computed its deadline, which then follows its data; else it was set by hand."""
        return self.terms is not None

    @property
    def has_ended_in_time(self) -> bool:
        """Return whether its condition has ended the round before its deadline."""
        return self.is_settled and ending_of(self) == "in_time"

    @property
    def is_failing(self) -> bool:
        """Return whether an attempt of the pending row has failed, and it is tried again: see `failing`."""
        return self.state == self.State.PENDING and self.attempts > 0

    def lateness(self) -> float | None:
        """Return the seconds from when a row could fire to when it fired; None: it has not fired.

        They measure the workers and the handlers. So they do not contain what people or the handler have decided: see
        `could_fire_at`. Negative if an operator had it fired early.
        """
        if self.state != self.State.FIRED or not isinstance(self.settled_at, datetime):
            return None
        return (self.settled_at - self.could_fire_at()).total_seconds()

    def could_fire_at(self, run_at: datetime | None = None) -> datetime:
        """Return since when a row that fires, or has fired, could: the latest of some times.

        They are its deadline, when it was armed, when its deadline was moved, the end of its last snooze, that of the
        last stop of its policy, and, unless attempts have failed, the time of this one: the end of the grace, or when
        an operator retried it. The deadline does not matter to a step.
        """
        due_at = min(self.due_at, self.created_at) if self.step else self.due_at
        return could_fire_at(due_at, self.created_at, self.ready_at, run_at or self.run_at, self.attempts)


WAITING = (Timeout.State.PENDING, Timeout.State.HELD)
"""The states of rows that wait for their deadline, and have their slot."""


def could_fire_at(
    due_at: datetime, created_at: datetime, ready_at: datetime | None, run_at: datetime, attempts: int
) -> datetime:
    """Return since when a row with these columns could fire: see `Timeout.could_fire_at`."""
    return max(due_at, created_at, ready_at or due_at, run_at if attempts <= 1 else due_at)


def ending_of(row: Any) -> str:
    """Return as what a round has ended, for reports: of a settled `Timeout`, or its columns. See `rollups.COUNTS`."""
    if row.cause == Timeout.Cause.CONDITION:
        has_stopped_clock = row.remaining is not None and not row.keeps_deadline
        return "in_time" if has_stopped_clock or row.settled_at <= row.due_at else "ended_late"
    return "shadow" if row.cause == Timeout.Cause.SHADOW else str(row.state)


def attempt_expired(longest_lease: timedelta) -> Q:
    """Return a condition for rows that are firing: their lease has ended, or ends later than any may."""
    return Q(run_at__lte=DatabaseNow()) | Q(run_at__gt=DatabaseNow() + longest_lease)
