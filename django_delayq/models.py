"""The ledger: one row per timeout, written in the caller's transaction. It is the truth; Redis is an index.

Only modules of `ledger` change rows, each change a compare-and-set. Constraints tie every state to its columns, so
that the database refuses an inconsistent row.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import Any, ClassVar, NoReturn

from django.contrib.contenttypes.fields import GenericForeignKey
from django.contrib.contenttypes.models import ContentType
from django.db import models, router
from django.db.models import Field, Q
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_delayq import clock
from django_delayq.key_types import HAS_FAILED, HAS_KEY, HAS_OWN_QUEUE, HexField, KindField, PartialIndex

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

    def unsettled(self) -> TimeoutQuerySet:
        return self.filter(settled_at__isnull=True)

    def failing(self) -> TimeoutQuerySet:
        """Return pending rows of which an attempt has failed, and which are tried again, by `delayq_failing`."""
        return self.pending().filter(HAS_FAILED)

    def due(self) -> TimeoutQuerySet:
        """Return pending rows whose next attempt is due by the database's clock."""
        return self.pending().filter(run_at__lte=clock.DatabaseNow())

    def of_labels(self, labels: Iterable[str]) -> TimeoutQuerySet:
        return self.filter(policy__in=tuple(labels))

    def of_key(self, key: str) -> TimeoutQuerySet:
        """Return the rows with this key, of all policies and objects, by `delayq_key`; none for the empty key."""
        return self.filter(HAS_KEY, key=key)

    def of_queue(self, queue: str) -> TimeoutQuerySet:
        """Return the rows of this queue, by `delayq_queue`."""
        rows = self.filter(queue=queue)
        return rows if queue == "default" else rows.filter(HAS_OWN_QUEUE)


def refuse_write(*_: object, **__: object) -> NoReturn:
    """Raise TypeError. Replaces the writing methods of relations."""
    raise TypeError(
        "Timeouts are not written through a relation. Use schedule_timeout, cancel_timeout or a similar function."
    )


class RelatedTimeoutQuerySet(TimeoutQuerySet):
    """The read-only querysets of `order.timeouts`. Not created per model, so that they can be pickled."""

    # The async variants call these.
    create = get_or_create = update_or_create = bulk_create = bulk_update = update = delete = refuse_write


class Timeout(models.Model):
    """One round of one policy for one object (and key). Kept when its object or policy is deleted."""

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        FIRING = "firing", _("firing")
        FIRED = "fired", _("fired")
        SKIPPED = "skipped", _("skipped")
        CANCELLED = "cancelled", _("cancelled")
        DEAD = "dead", _("dead")

        @property
        def is_settled(self) -> bool:
            return self not in {Timeout.State.PENDING, Timeout.State.FIRING}

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

    # Internal: see `could_fire_at` for the first, and `ledger.claiming` for the last two.
    ready_at = models.DateTimeField(null=True, default=None, editable=False)  # its last move, or the end of a snooze
    slot = HexField(max_length=32, editable=False)  # see `slot_of`
    slot_taken = models.PositiveSmallIntegerField(null=True, default=1, editable=False)  # NULL: firing or settled
    final_attempt = models.BooleanField(default=False, editable=False)  # cancelled while it was firing
    claims = models.PositiveSmallIntegerField(default=0, editable=False)  # without a result, as deliveries of an entry
    claimed_until = models.DateTimeField(null=True, default=None, editable=False)  # until then, no worker claims it

    # Internal: what the round has been through, as far as decisions depend on it. They do not read `history`, which
    # drops the oldest events. Mostly NULL, which takes no space. Replacing a row resets them: see `ROUND_FIELDS`.
    snoozes = models.PositiveSmallIntegerField(default=0, editable=False)
    """How often the handler has snoozed since the round began, or since an operator has retried it."""
    retried_at: Field[Any, Any] = models.DateTimeField(null=True, default=None, editable=False)
    """When an operator has last retried it: see `began_at`."""
    restarted_at = models.DateTimeField(null=True, default=None, editable=False)
    """When its deadline was last set independently of the former one. A hold before this time does not move it."""
    asked_due_at = models.DateTimeField(null=True, default=None, editable=False)
    """The deadline that the application or a save has set, if an operator or a hold has moved it since then."""
    hold_ended_at = models.DateTimeField(null=True, default=None, editable=False)
    """When the end of a hold has last moved it."""
    is_requested = models.BooleanField(default=False, editable=False)
    """An operator wants it fired, however late it is. A move or a snooze takes that back, but no move of all rows."""
    is_due_by_request = models.BooleanField(default=False, editable=False)
    """Its deadline is that of "fire now": no deadline that a caller has granted."""
    suspected_at = models.DateTimeField(null=True, default=None, editable=False)
    """Since when it is suspected that a process died of it. If it runs since then, it runs alone in its process; with
    `atomic=False` only while it is `firing`. None: the outcome is known, or it runs beside others."""
    deaths = models.PositiveSmallIntegerField(default=0, editable=False)
    """How many processes have died while it ran alone in them, since the round began or an operator retried it."""
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
            ("retry_timeout", _("Can retry dead timeouts")),
            ("refire_timeout", _("Can fire settled timeouts again")),
        )
        constraints: ClassVar[list[models.BaseConstraint]] = [
            # NULLs are distinct on every supported database, so settled rows release the slot.
            models.UniqueConstraint(fields=["slot", "slot_taken"], name="delayq_one_pending_per_slot"),
            models.CheckConstraint(
                condition=(
                    Q(state="pending", settled_at__isnull=True, cause="", slot_taken=1, slot_taken__isnull=False)
                    | Q(state="firing", settled_at__isnull=True, cause="", slot_taken__isnull=True)
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
        ]

    def __str__(self) -> str:
        about = f"{self.object_id}{f' ({self.key})' if self.key else ''}"
        words = gettext("{policy} of {object}: {state}")
        return words.format(policy=self.policy, object=about, state=self.get_state_display())

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
    def began_at(self) -> datetime:
        """Return when the round was scheduled, or when an operator has retried it."""
        return self.retried_at or self.created_at

    @property
    def is_settled(self) -> bool:
        return self.settled_at is not None

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

    def could_fire_at(self) -> datetime:
        """Return since when a row that fires, or has fired, could: the latest of some times.

        They are its deadline, when it was armed, when its deadline was moved, the end of its last snooze, and, unless
        attempts have failed, the time of this one: when an operator retried it.
        """
        # While it is `firing`, `run_at` is when that expires: see `settling.mark_firing`.
        run_at = vars(self).get("planned_at", self.run_at)
        return could_fire_at(self.due_at, self.created_at, self.ready_at, run_at, self.attempts)


def could_fire_at(
    due_at: datetime, created_at: datetime, ready_at: datetime | None, run_at: datetime, attempts: int
) -> datetime:
    """Return since when a row with these columns could fire: see `Timeout.could_fire_at`."""
    return max(due_at, created_at, ready_at or due_at, run_at if attempts <= 1 else due_at)


class PolicyControl(models.Model):
    """What operators have changed for one policy: whether it is stopped, its delay and its guard rails.

    One row for each label; none if no operator ever changed it. `PolicyChange` has the history.
    """

    class Stop(models.TextChoices):
        NONE = "", _("not stopped")
        PAUSED = "paused", _("paused")
        HELD = "held", _("held")
        RELEASING = "releasing", _("being released")

    id = models.BigAutoField(primary_key=True)
    policy = models.CharField(_("policy"), max_length=200, unique=True)
    stop = models.CharField(_("stop"), max_length=10, choices=Stop.choices, default=Stop.NONE, blank=True)
    stopped_at = models.DateTimeField(_("stopped at"), null=True, blank=True)
    until = models.DateTimeField(_("until"), null=True, blank=True)
    after = models.DurationField(_("delay in force"), null=True, blank=True)
    guards = models.JSONField(_("guard rails in force"), default=dict, blank=True)
    """What operators have set instead of the declared guard rails: see `ledger.controls.PolicyState`."""
    changed_at = models.DateTimeField(_("changed at"))
    by = models.CharField(_("by"), max_length=150, default="", blank=True)
    reason = models.CharField(_("reason"), max_length=255, default="", blank=True)

    class Meta:
        verbose_name = _("policy")
        verbose_name_plural = _("Policies")  # a title, as on its page
        default_permissions = ("view",)
        permissions = (
            ("pause_policy", _("Can pause, hold and resume policies")),
            ("change_policy_delay", _("Can change the delay of policies")),
            ("change_policy_guards", _("Can change the guard rails of policies")),
        )

    def __str__(self) -> str:
        return f"{self.policy}: {self.get_stop_display()}"


class PolicyChange(models.Model):
    """One change of a policy by an operator: who, when, what and why.

    A change that moves pending rows stores its progress here, in the transaction that moves them. So a process that
    continues it after a crash moves no row twice.
    """

    class What(models.TextChoices):
        PAUSED = "paused", _("paused")
        HELD = "held", _("held")
        RESUMED = "resumed", _("resumed")
        DELAY = "delay", _("delay changed")
        LATE = "late", _("limit of lateness changed")
        BRAKE = "brake", _("brake changed")
        SHADOW = "shadow", _("shadow mode changed")
        RETIRED = "retired", _("retired")

    id = models.BigAutoField(primary_key=True)
    policy = models.CharField(_("policy"), max_length=200)
    what = models.CharField(_("what"), max_length=10, choices=What.choices)
    at = models.DateTimeField(_("at"))
    by = models.CharField(_("by"), max_length=150, default="", blank=True)
    reason = models.CharField(_("reason"), max_length=255, default="", blank=True)
    details = models.JSONField(_("details"), default=dict, blank=True)  # for people: no decision reads it
    moved = models.PositiveIntegerField(_("rows moved"), default=0)
    unmoved = models.PositiveIntegerField(_("rows left as they were"), default=0)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    # Internal: the ids of the last row that was processed, and of the last row to process.
    cursor = models.BigIntegerField(default=0, editable=False)
    last_id = models.BigIntegerField(default=0, editable=False)
    touched_at = models.DateTimeField(editable=False)
    # Internal, of a change that moves rows: the hold, or the difference, by which it moves their deadlines. With
    # neither it computes them again.
    held_from: Field[Any, Any] = models.DateTimeField(null=True, default=None, editable=False)
    held_until: Field[Any, Any] = models.DateTimeField(null=True, default=None, editable=False)
    shift = models.DurationField(null=True, default=None, editable=False)
    former_delay = models.DurationField(null=True, default=None, editable=False)  # NULL: it differed between objects

    class Meta:
        verbose_name = _("policy change")
        verbose_name_plural = _("policy changes")
        default_permissions = ("view",)
        indexes: ClassVar[list[models.Index]] = [models.Index(fields=["policy", "id"], name="delayq_changes")]

    def __str__(self) -> str:
        return f"{self.policy}: {self.get_what_display()}"


class PolicySync(models.Model):
    """How far the sync of one automatic policy has come. One worker at a time claims all rows and continues."""

    id = models.BigAutoField(primary_key=True)
    policy = models.CharField(max_length=200, unique=True)
    oldest_label = models.CharField(max_length=200)
    """That of the policy when a worker first met this label: see `ledger.declarations.wrong_names`."""
    place = models.CharField(max_length=255, default="", blank=True)
    """The key, as text, of the last object that the present pass has checked; empty: none yet."""
    checked = models.PositiveBigIntegerField(default=0)
    total = models.PositiveBigIntegerField(null=True, default=None)
    """How many objects the present and the last complete pass have checked; None: there was none."""
    failed = models.PositiveBigIntegerField(default=0)
    failed_total = models.PositiveBigIntegerField(default=0)
    """For how many objects `since` or `after` raised, in the present and in the last complete pass."""
    before_at = models.DateTimeField(null=True, default=None)
    """The start of the last complete pass without failures before; later after an absence, or of a new policy."""
    began_at = models.DateTimeField(null=True, default=None)
    finished_at = models.DateTimeField(null=True, default=None)
    """The start of the present or last pass, and the end of the last complete one."""
    claimed_until = models.DateTimeField(null=True, default=None)
    declarations: Field[Any, Any] = models.JSONField(default=list)
    """The fingerprints of the declarations that workers had, the newest first: see `ledger.declarations`."""
    confirmed_at: Field[Any, Any] = models.DateTimeField(null=True, default=None)
    """When a worker has last confirmed that the first of them is its own."""

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.policy

    @property
    def is_running(self) -> bool:
        """Return whether a pass has begun and is not complete."""
        return self.began_at is not None and (self.finished_at is None or self.finished_at < self.began_at)


class PolicyMeter(models.Model):
    """A counter of one policy that all workers share: its rate, or its brake."""

    id = models.BigAutoField(primary_key=True)
    policy = models.CharField(max_length=200)
    name = models.CharField(max_length=10)
    state = models.JSONField(default=dict)

    class Meta:
        default_permissions = ()
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["policy", "name"], name="delayq_one_meter"),
        ]

    def __str__(self) -> str:
        return f"{self.policy}: {self.name}"


class UnfinishedRun(models.Model):
    """How far an operation has come that would change rows a second time if it were repeated. Deleted at its end.

    Each page of rows advances it in the transaction that changes them: see `operations.runs`.
    """

    id = models.BigAutoField(primary_key=True)
    verb = models.CharField(max_length=20)
    digest = models.CharField(max_length=64, unique=True)
    """Of the operation, its arguments and the statement that selects its rows."""
    by = models.CharField(max_length=150)
    at = models.DateTimeField()
    touched_at = models.DateTimeField()
    cursor = models.BigIntegerField()
    newest_id = models.BigIntegerField()
    """The ids of the last row that was examined, and of the newest row at the beginning."""
    changed = models.PositiveBigIntegerField(default=0)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.verb} by {self.by}"


class Installation(models.Model):
    """The name of the installation that this ledger belongs to: the setting `INSTALLATION` of the first worker.

    At most one row. A copy of the database has the same name, so workers of another installation refuse it.
    """

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    name = models.CharField(max_length=100)
    since_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.name


class WorkerSeen(models.Model):
    """The heartbeat of a worker, written every few seconds and deleted when the worker stops.

    In the database and not in Redis, so that it is available while Redis is not.
    """

    id = models.CharField(primary_key=True, max_length=32)
    host = models.CharField(_("host"), max_length=100)
    pid = models.PositiveIntegerField(_("process"))
    queues = models.JSONField(_("queues"), null=True, blank=True, default=None)
    """None: all of them."""
    concurrency = models.PositiveSmallIntegerField(_("threads"))
    version = models.CharField(_("version"), max_length=30)
    uses_redis = models.BooleanField(_("uses Redis"))
    held = models.PositiveIntegerField(_("timeouts under way"), default=0)
    stuck_threads = models.PositiveSmallIntegerField(_("stuck threads"), default=0)
    """Threads that still run a handler after its time limit."""
    started_at = models.DateTimeField(_("started at"))
    seen_at = models.DateTimeField(_("seen at"), db_index=True)
    passed_at = models.DateTimeField(_("last look for due timeouts"))

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"
