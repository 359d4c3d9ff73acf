"""The ledger: one row per timeout, written in the caller's transaction. It is the truth; Redis is an index.

Only `ledger.py` changes rows, each change a compare-and-set. The constraints below tie every state to its
columns, so that a row which lies about itself cannot be stored by anybody.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from django.contrib.contenttypes.fields import GenericForeignKey
from django.contrib.contenttypes.models import ContentType
from django.db import models, router
from django.db.models import Func, Q
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_delayq import clock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.backends.ddl_references import Statement


class _PartialIndex(models.Index):
    """An index over some rows, where the database can leave the others out.

    MySQL and MariaDB, which know no partial indexes, get the same columns in full. The conditions name no
    parameter, because SQLite cannot match a partial index by a bound one.
    """

    rows: ClassVar[Q]

    def create_sql(
        self, model: type[models.Model], schema_editor: BaseDatabaseSchemaEditor, using: str = "", **kwargs: Any
    ) -> Statement:
        """The index with its condition, or without if the database has no partial indexes."""
        partial = schema_editor.connection.features.supports_partial_indexes
        plain = models.Index(fields=self.fields, name=self.name, condition=self.rows if partial else None)
        return plain.create_sql(model, schema_editor, using, **kwargs)


class _Nothing(Func):
    """The empty text, written out: a parameter in its place would hide `KeyIndex` from SQLite."""

    template, arity, output_field = "''", 0, models.CharField()


class UnsettledIndex(_PartialIndex):
    """Over the rows that still wait: a year of history costs the sweep nothing."""

    rows = Q(settled_at__isnull=True)


class SettledIndex(_PartialIndex):
    """Over the settled rows only. With the others in it, SQLite would look for those that wait in here, unsorted."""

    rows = Q(settled_at__isnull=False)


class KeyIndex(_PartialIndex):
    """Over the rows that have a key: most have none, and an index of empty texts would only cost."""

    rows = Q(key__gt=_Nothing())


def new_idempotency_key() -> str:
    """A key that no other timeout of any installation has."""
    return uuid.uuid4().hex


def slot_of(label: str, content_type_id: int, object_id: str, key: str) -> str:
    """The place that at most one pending timeout may hold: a digest of policy, object and key.

    A digest, because MySQL can neither index four long texts together nor compare them case by case;
    160 bits, because keys may come from strangers who would look for a collision.
    """
    parts = (label, str(content_type_id), object_id, key)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()


class TimeoutQuerySet(models.QuerySet["Timeout"]):
    """Reads of the ledger by what a row is doing."""

    def pending(self) -> TimeoutQuerySet:
        """Rows that wait to be fired."""
        return self.filter(state=Timeout.State.PENDING, settled_at__isnull=True)

    def unsettled(self) -> TimeoutQuerySet:
        """Rows that wait or are being fired."""
        return self.filter(settled_at__isnull=True)

    def due(self) -> TimeoutQuerySet:
        """Pending rows whose next attempt is due by the database's clock."""
        return self.pending().filter(run_at__lte=clock.DatabaseNow())

    def of_labels(self, labels: Iterable[str]) -> TimeoutQuerySet:
        """Rows of a policy under its present and former labels."""
        return self.filter(policy__in=tuple(labels))

    def of_key(self, key: str) -> TimeoutQuerySet:
        """Rows of every policy and object with this key; none for the empty one. Found by its index."""
        return self.filter(KeyIndex.rows, key=key)


def refuse_write(*_: object, **__: object) -> NoReturn:
    """What stands in the place of every writing method of a relation: raises TypeError."""
    raise TypeError("Timeouts are not written through a relation: use schedule_timeout, cancel_timeout and the like.")


class RelatedTimeoutQuerySet(TimeoutQuerySet):
    """What `order.timeouts` and its filters give: rows to read and to hand to the verbs; writing methods refuse.

    A class of a module, and not made on the fly, so that objects with prefetched timeouts can be pickled.
    """

    # Their async twins call these.
    create = get_or_create = update_or_create = bulk_create = bulk_update = update = delete = refuse_write


class Timeout(models.Model):
    """One round of one policy for one object (and key). Outlives its object and its policy."""

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        FIRING = "firing", _("firing")
        FIRED = "fired", _("fired")
        SKIPPED = "skipped", _("skipped")
        CANCELLED = "cancelled", _("cancelled")
        DEAD = "dead", _("dead")

        @property
        def is_settled(self) -> bool:
            """Whether nothing more will happen by itself."""
            return self not in {Timeout.State.PENDING, Timeout.State.FIRING}

    class Cause(models.TextChoices):
        """Why a row is settled as it is."""

        DUE = "due", _("it was due")
        HAND = "hand", _("by hand")
        CONDITION = "condition", _("the condition stopped holding")
        GONE = "gone", _("the object is gone")
        HANDLER = "handler", _("the handler said so")
        RETRIES = "retries", _("all retries are used up")
        LATE = "late", _("it was too late")
        SUPERSEDED = "superseded", _("a newer round took its place")

    id = models.BigAutoField(primary_key=True)
    policy = models.CharField(_("policy"), max_length=200)
    content_type = models.ForeignKey(
        ContentType, verbose_name=_("kind of object"), on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    object_id = models.CharField(_("object id"), max_length=255)
    content_object = GenericForeignKey("content_type", "object_id", for_concrete_model=True)
    key = models.CharField(_("key"), max_length=200, default="", blank=True)
    queue = models.CharField(_("queue"), max_length=100, default="default")
    state = models.CharField(_("state"), max_length=10, choices=State.choices, default=State.PENDING)
    cause = models.CharField(_("cause"), max_length=12, choices=Cause.choices, default="", blank=True)
    due_at = models.DateTimeField(_("deadline"))
    run_at = models.DateTimeField(_("next attempt"))
    since_at = models.DateTimeField(_("counts from"), null=True, blank=True)
    first_due_at = models.DateTimeField(_("first deadline"))
    extensions = models.PositiveSmallIntegerField(_("extensions"), default=0)
    attempts = models.PositiveSmallIntegerField(_("attempts"), default=0)
    payload = models.JSONField(_("payload"), null=True, blank=True, default=None)
    history = models.JSONField(_("history"), default=list, blank=True)
    reason = models.CharField(_("reason"), max_length=255, default="", blank=True)
    created_at = models.DateTimeField(_("created at"))
    settled_at = models.DateTimeField(_("settled at"), null=True, blank=True)
    idempotency_key = models.CharField(_("idempotency key"), max_length=32, default=new_idempotency_key, editable=False)

    # Internal: who holds the slot, and what the firing path remembers.
    slot = models.CharField(max_length=40, editable=False)
    slot_taken = models.PositiveSmallIntegerField(null=True, default=1, editable=False)
    final_attempt = models.BooleanField(default=False, editable=False)
    claims = models.PositiveSmallIntegerField(default=0, editable=False)
    claimed_until = models.DateTimeField(null=True, default=None, editable=False)

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
        )
        constraints: ClassVar[list[models.BaseConstraint]] = [
            # NULLs do not collide on any supported database, so settled rows leave the slot free.
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
            UnsettledIndex(fields=["state", "run_at", "id"], name="delayq_unsettled"),
            models.Index(fields=["content_type", "object_id"], name="delayq_object"),
            SettledIndex(fields=["settled_at", "id"], name="delayq_settled"),
            # What operators ask: how many wait, died or fired of one policy, and when; and what a worker asks that is
            # behind: of which policies something is due.
            models.Index(fields=["policy", "state", "run_at", "id"], name="delayq_policy"),
            # For people, who look by date and by key, in a table of any length.
            models.Index(fields=["due_at", "id"], name="delayq_due"),
            KeyIndex(fields=["key", "id"], name="delayq_key"),
        ]

    def __str__(self) -> str:
        about = f"{self.object_id}{f' ({self.key})' if self.key else ''}"
        words = gettext("{policy} of {object}: {state}")
        return words.format(policy=self.policy, object=about, state=self.get_state_display())

    def refresh_from_db(
        self, using: str | None = None, fields: Iterable[str] | None = None, from_queryset: Any = None
    ) -> None:
        """Read the row, or one of its deferred columns, from the writer: a replica may know an older state."""
        if using is None and from_queryset is None:
            using = router.db_for_write(type(self), instance=self)
        super().refresh_from_db(using, fields, from_queryset)

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The failed attempts among the events of `history`, oldest first, with their tracebacks."""
        return [event for event in self.history if event.get("what") == "failed"]

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.settled_at is not None

    def lateness(self) -> float | None:
        """Seconds between the deadline and the settling, for a row that fired; else None."""
        if self.state != self.State.FIRED or not isinstance(self.settled_at, datetime):
            return None
        return (self.settled_at - self.due_at).total_seconds()


class PolicyControl(models.Model):
    """What operators have put in force for one policy: whether it is stopped, and another delay.

    At most one row per policy, and none for those that nobody ever touched. `PolicyChange` has the history.
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
    changed_at = models.DateTimeField(_("changed at"))
    by = models.CharField(_("by"), max_length=150, default="", blank=True)
    reason = models.CharField(_("reason"), max_length=255, default="", blank=True)

    class Meta:
        verbose_name = _("policy control")
        verbose_name_plural = _("policy controls")
        default_permissions = ("view",)
        permissions = (
            ("pause_policy", _("Can pause, hold and resume policies")),
            ("change_policy_delay", _("Can change the delay of policies")),
        )

    def __str__(self) -> str:
        return f"{self.policy}: {self.get_stop_display()}"


class PolicyChange(models.Model):
    """One thing that an operator did to a policy: who, when, what and why. Never changed afterwards.

    One that moves pending rows keeps its place among them here, written in the transaction that moves them: so
    whoever goes on after a crash moves no row twice.
    """

    class What(models.TextChoices):
        PAUSED = "paused", _("paused")
        HELD = "held", _("held")
        RESUMED = "resumed", _("resumed")
        DELAY = "delay", _("delay changed")

    id = models.BigAutoField(primary_key=True)
    policy = models.CharField(_("policy"), max_length=200)
    what = models.CharField(_("what"), max_length=10, choices=What.choices)
    at = models.DateTimeField(_("at"))
    by = models.CharField(_("by"), max_length=150, default="", blank=True)
    reason = models.CharField(_("reason"), max_length=255, default="", blank=True)
    details = models.JSONField(_("details"), default=dict, blank=True)
    moved = models.PositiveIntegerField(_("rows moved"), default=0)
    unmoved = models.PositiveIntegerField(_("rows left as they were"), default=0)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)

    # Internal: the last row that was looked at, and the last one to look at.
    place = models.BigIntegerField(default=0, editable=False)
    last_place = models.BigIntegerField(default=0, editable=False)
    touched_at = models.DateTimeField(editable=False)

    class Meta:
        verbose_name = _("policy change")
        verbose_name_plural = _("policy changes")
        default_permissions = ("view",)
        indexes: ClassVar[list[models.Index]] = [models.Index(fields=["policy", "id"], name="delayq_changes")]

    def __str__(self) -> str:
        return f"{self.policy}: {self.get_what_display()}"


class WorkerSeen(models.Model):
    """A worker that lives, or lived until lately: it says so every few seconds, and takes the row along when it ends.

    In the database and not in Redis: whether workers live is asked most urgently while Redis does not.
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
    started_at = models.DateTimeField(_("started at"))
    seen_at = models.DateTimeField(_("seen at"), db_index=True)
    passed_at = models.DateTimeField(_("last look for due timeouts"))

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"
