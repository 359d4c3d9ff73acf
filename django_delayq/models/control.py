"""The models of policies, and of time in staging: what operators have changed, how far the sync has come, counters.

A module of their own, so that `models` has those of timeouts and workers. Import them from `django_delayq.models`.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any, ClassVar

from django.db import models
from django.db.models import Field
from django.utils.translation import gettext_lazy as _

from django_delayq.times.clock import duration_text


class _Record(models.Model):
    """What the models here have in common: only the library reads and writes them, unless their `Meta` permits more."""

    id = models.BigAutoField(primary_key=True)

    class Meta:
        abstract = True
        default_permissions = ()


class PolicyControl(_Record):
    """What operators have changed for one policy: whether it is stopped, its delay and its guard rails.

    One row for each label; none if no operator ever changed it. `PolicyChange` has the history.
    """

    class Stop(models.TextChoices):
        NONE = "", _("not stopped")
        PAUSED = "paused", _("paused")
        HELD = "held", _("on hold")
        RELEASING = "releasing", _("being released")

    policy = models.CharField(_("policy"), max_length=200, unique=True)
    stop = models.CharField(_("stop"), max_length=10, choices=Stop.choices, default=Stop.NONE, blank=True)
    stopped_at = models.DateTimeField(_("stopped at"), null=True, blank=True)
    until = models.DateTimeField(_("until"), null=True, blank=True)
    resumed_at = models.DateTimeField(null=True, default=None, editable=False)
    """When its last stop ended, except a pause that has reached its end and is still stored: see `resumed_at`."""
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


class PolicyChange(_Record):
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
    hand_set = models.BooleanField(default=False, editable=False)  # also those that were set by hand

    class Meta:
        verbose_name = _("policy change")
        verbose_name_plural = _("policy changes")
        default_permissions = ("view",)
        indexes: ClassVar[list[models.Index]] = [models.Index(fields=["policy", "id"], name="delayq_changes")]

    def __str__(self) -> str:
        return f"{self.policy}: {self.get_what_display()}"


class PolicySync(_Record):
    """How far the sync of one automatic policy has come. One worker at a time claims all rows and continues."""

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
    asked_at = models.DateTimeField(null=True, default=None)
    """When a write that concerns very many objects has last asked for a pass."""
    declarations: Field[Any, Any] = models.JSONField(default=list)
    """The fingerprints of the declarations that workers had, the newest first: see `ledger.declarations`."""
    confirmed_at: Field[Any, Any] = models.DateTimeField(null=True, default=None)
    """When a worker has last confirmed that the first of them is its own."""

    def __str__(self) -> str:
        return self.policy

    @property
    def is_asked(self) -> bool:
        """Return whether a pass was asked for since the present or last one began."""
        return self.asked_at is not None and (self.began_at is None or self.began_at <= self.asked_at)

    @property
    def is_running(self) -> bool:
        """Return whether a pass has begun and is not complete."""
        return self.began_at is not None and (self.finished_at is None or self.finished_at < self.began_at)


class PolicyMeter(_Record):
    """A counter of one policy that all workers share, such as that of its brake."""

    policy = models.CharField(max_length=200)
    name = models.CharField(max_length=10)
    state = models.JSONField(default=dict)

    class Meta(_Record.Meta):
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["policy", "name"], name="delayq_one_meter"),
        ]

    def __str__(self) -> str:
        return f"{self.policy}: {self.name}"


class RateShare(_Record):
    """When the next slot of a policy with a rate is free, or that of one value by which it counts. Deleted when it is.

    Or of one value of `batch_by`: a firing locks the row, so that no other one fires timeouts of the value meanwhile.
    """

    policy = models.CharField(max_length=200)
    share = models.CharField(max_length=64)
    free_at = models.DateTimeField()

    class Meta(_Record.Meta):
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["policy", "share"], name="delayq_one_share"),
        ]

    def __str__(self) -> str:
        return f"{self.policy}: {self.share}"


class UnfinishedRun(_Record):
    """How far an operation has come that would change rows a second time if it were repeated. Deleted at its end.

    Each page of rows advances it in the transaction that changes them: see `operations.runner`.
    """

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

    def __str__(self) -> str:
        return f"{self.verb} by {self.by}"


class StoredAnswer(_Record):
    """The answer to a REST request with an `Idempotency-Key`, so that its repetition changes nothing.

    Deleted when it is older than `answers.KEPT`: see `ledger.answers`.
    """

    digest = models.CharField(max_length=32, unique=True)
    """Of the user and the key of the request."""
    request = models.CharField(max_length=32)
    """Of the content of the request."""
    status: Field[Any, Any] = models.PositiveSmallIntegerField(null=True, default=None)
    """Of the answer; None: no request with this key was completed."""
    body = models.TextField(default="", blank=True)
    """The answer as JSON, in ASCII, which each database can store."""
    timeout_id = models.BigIntegerField(null=True, db_index=True)
    """The row that `body` shows as `timeout`, so that it can be emptied there, too."""
    at = models.DateTimeField(db_index=True)

    def __str__(self) -> str:
        return self.digest


class PolicyDay(_Record):
    """How the rounds have ended that were settled on one day, by label: see `ledger.rollups`.

    Of rows that were deleted, or of those that the ledger still has. Of these, the row with an empty `policy` states
    until when the day is counted; a label without a row has settled nothing.
    """

    policy = models.CharField(max_length=200)
    day: Field[Any, Any] = models.DateField()
    """In the time zone `zone`: `TIME_ZONE` when it was counted."""
    zone = models.CharField(max_length=64)
    is_deleted = models.BooleanField(default=False)
    until: Field[Any, Any] = models.DateTimeField(null=True, default=None)
    counted_at: Field[Any, Any] = models.DateTimeField(null=True, default=None)
    """When the count of the day has begun."""
    version = models.UUIDField(default=uuid.uuid4)
    """Another one after each change, for a count that runs meanwhile."""
    in_time = models.BigIntegerField(default=0)
    ended_late = models.BigIntegerField(default=0)
    fired = models.BigIntegerField(default=0)
    shadow = models.BigIntegerField(default=0)
    skipped = models.BigIntegerField(default=0)
    cancelled = models.BigIntegerField(default=0)
    dead = models.BigIntegerField(default=0)
    lateness: Field[Any, Any] = models.JSONField(default=dict)
    """Histograms: how late the rounds fired, and how long those that ended in time took."""
    waits: Field[Any, Any] = models.JSONField(default=dict)
    hours: Field[Any, Any] = models.JSONField(default=dict)
    """How many rounds have ended in each hour, as `rollups.Tally` has them."""

    class Meta(_Record.Meta):
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["policy", "day", "is_deleted"], name="delayq_one_day"),
        ]

    def __str__(self) -> str:
        return f"{self.policy}: {self.day}"


class ClockAdvance(_Record):
    """A duration that has passed for the timeouts of a staging installation: see `ledger.advances`."""

    at: Field[datetime, datetime] = models.DateTimeField()
    length: Field[timedelta, timedelta] = models.DurationField()
    by = models.CharField(max_length=150)
    reason = models.CharField(max_length=255, default="", blank=True)

    def __str__(self) -> str:
        return f"{duration_text(self.length)} by {self.by}"


class Installation(_Record):
    """The name of the installation that this ledger belongs to: the setting `INSTALLATION` of the first worker.

    At most one row. A copy of the database has the same name, so workers of another installation refuse it.
    """

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    name = models.CharField(max_length=100)
    since_at = models.DateTimeField()

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
    version = models.CharField(_("version"), max_length=50)
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
