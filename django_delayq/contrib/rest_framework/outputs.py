"""What responses contain. Timeouts are shown without loading their objects or policies."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from contextlib import suppress
from datetime import date, datetime, timedelta
from types import NoneType
from typing import Any, Final

from django.contrib.auth.models import AnonymousUser
from django.contrib.contenttypes.models import ContentType
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _
from rest_framework import ISO_8601, serializers

from django_delayq.arming.holding import Facts, Progress
from django_delayq.contrib.rest_framework.fields import Instant, SecondsField, serialized_by, shown_time
from django_delayq.ledger.controls import GUARDS, PolicyState
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import NOTHING, Count
from django_delayq.models import PolicyControl, Timeout
from django_delayq.monitoring import reports, snapshot
from django_delayq.operations.previews import preview_resume
from django_delayq.operations.runner import Refusal
from django_delayq.policy.options import Brake, Late, Limits, Rate, Then
from django_delayq.policy.reads import condition_text
from django_delayq.rounds.memory import moment
from django_delayq.scheduling.story import explain_timeout
from django_delayq.times import clock
from django_delayq.times.lengths import length_text

STOPS: Final = PolicyControl.Stop.choices[1:]
"""How a policy is stopped; null: it is not."""


class NullableChoice(serializers.ChoiceField):
    """A choice whose empty string is null in JSON."""

    def to_representation(self, value: Any) -> Any:
        return value or None


class StatusPart(serializers.Serializer[Any]):
    """A serializer with the fields of a dataclass or named tuple of `monitoring`, by their types."""

    shows: type[Any] = object
    leaves_out: tuple[str, ...] = ()
    _kinds: typing.ClassVar[dict[Any, Any]] = {
        str: lambda **options: serializers.CharField(allow_blank=True, **options),
        int: serializers.IntegerField,
        float: serializers.FloatField,
        bool: serializers.BooleanField,
        timedelta: SecondsField,
        datetime: serializers.DateTimeField,
        date: serializers.DateField,
    }

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        StatusPart._kinds[cls.shows] = cls

    def get_fields(self) -> dict[str, Any]:
        declared = super().get_fields()
        types = typing.get_type_hints(self.shows)
        shown = {name: kind for name, kind in types.items() if name not in self.leaves_out}
        return {name: declared.get(name) or self._field(kind) for name, kind in shown.items()} | declared

    def _field(self, kind: Any) -> Any:
        inner = [argument for argument in typing.get_args(kind) if argument is not NoneType]
        options = {"allow_null": True} if NoneType in typing.get_args(kind) else {}
        kind = inner[0] if options else kind
        if typing.get_origin(kind) is tuple:
            return self._kinds[typing.get_args(kind)[0]](many=True, **options)
        return self._kinds[kind](**options)


class ProgressSerializer(StatusPart):
    """How much of its time a timeout has used and has left; durations in seconds."""

    shows = Progress

    @cached_property
    def _together(self) -> dict[int, Facts]:
        """Return the facts of all rows that are serialized together, by the ids of the rows."""
        rows = [row for row in serialized_by(self.parent) if isinstance(row, Timeout)]
        return dict.fromkeys([row.pk for row in rows], Facts(rows, database_of(Timeout), locks=False))

    def get_attribute(self, row: Timeout) -> Progress | None:
        facts = self._together.get(row.pk) or Facts([row], database_of(Timeout), locks=False)
        return facts.progress(row)


class ObjectSerializer(serializers.Serializer[Timeout]):
    """The object of a timeout, as its row names it; it may no longer exist."""

    model = serializers.SerializerMethodField(help_text=_("`app.model`; null: the model no longer exists."))
    id = serializers.CharField(source="object_id")

    @cached_property
    def _gone(self) -> set[int]:
        return set()

    def get_model(self, row: Timeout) -> str | None:
        # Django caches existing content types only. A deleted one would be queried again for each row.
        if row.content_type_id not in self._gone:
            with suppress(ContentType.DoesNotExist):
                kind = ContentType.objects.db_manager(row._state.db).get_for_id(row.content_type_id)
                return f"{kind.app_label}.{kind.model}"
            self._gone.add(row.content_type_id)
        return None


class TimeoutSerializer(serializers.ModelSerializer[Timeout]):
    """A timeout in a list."""

    object = ObjectSerializer(source="*", read_only=True)
    cause = NullableChoice(choices=Timeout.Cause.choices, allow_null=True, read_only=True)
    failing = serializers.BooleanField(
        source="is_failing",
        read_only=True,
        help_text=_("It is pending, and an attempt has failed; the next one follows at `run_at`."),
    )

    remaining = SecondsField(
        allow_null=True,
        read_only=True,
        help_text=_("The seconds that are left when its clock runs again, if it is or was stopped."),
    )

    is_computed = serializers.BooleanField(
        read_only=True, help_text=_("Its policy has computed its deadline, which follows its data; false: set by hand.")
    )

    progress = ProgressSerializer(allow_null=True, read_only=True, help_text=_("null: it is settled."))

    class Meta:
        model = Timeout
        fields = [
            *("id", "policy", "object", "key", "queue", "state", "cause", "failing", "due_at", "run_at", "step"),
            "since_at",
            *("first_due_at", "extensions", "attempts", "reason", "created_at", "settled_at"),
            *("remaining", "held_at", "held_until", "held_by_hand", "keeps_deadline", "is_computed", "progress"),
        ]
        read_only_fields = fields
        extra_kwargs: typing.ClassVar[dict[str, Any]] = {
            "run_at": {"allow_null": True},
            "step": {"help_text": _("What happens at `run_at`; empty: the handler of the policy acts.")},
        }

    def to_representation(self, row: Timeout) -> dict[str, Any]:
        """Return no next attempt while the clock is stopped: there is none."""
        shown = super().to_representation(row)
        if shown["remaining"] is not None:
            shown["remaining"] = None if row.keeps_deadline else row.time_left.total_seconds()
        return {**shown, "run_at": None} if row.state == Timeout.State.HELD else shown


class EventSerializer(serializers.Serializer[Any]):
    """An event in the history of a timeout."""

    at = serializers.DateTimeField()
    what = serializers.CharField()
    by = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    text = serializers.CharField(source="__str__", help_text=_("The event as a line of text."))


class StorySerializer(serializers.Serializer[Any]):
    """The history of a timeout, oldest event first, and its present state."""

    events = EventSerializer(many=True)
    outlook = serializers.CharField()
    deadline = serializers.CharField(
        allow_blank=True, help_text=_("Who has set the deadline of a pending timeout, as a sentence.")
    )

    def to_representation(self, row: Timeout) -> dict[str, Any]:
        return super().to_representation(explain_timeout(row))


class StoredMoment(serializers.DateTimeField):
    """A datetime that the history of a row has as a string."""

    def to_representation(self, value: Any) -> Any:
        return super().to_representation(moment(value))


class ErrorSerializer(serializers.Serializer[Any]):
    """A failed attempt."""

    at = StoredMoment()
    error = serializers.CharField(default="")
    message = serializers.CharField(default="")
    traceback = serializers.CharField(default="")


class TimeoutDetailSerializer(TimeoutSerializer):
    """One timeout, with its history, its failed attempts and its payload."""

    story = StorySerializer(source="*", read_only=True)
    errors = ErrorSerializer(many=True, read_only=True)  # type: ignore[assignment] # hides DRF's own, unused here
    obstacles = serializers.SerializerMethodField(
        help_text=_("Why it does not fire although it is due: no worker is running, or its policy is stopped.")
    )
    server_time = serializers.SerializerMethodField()

    class Meta(TimeoutSerializer.Meta):
        fields = [
            *TimeoutSerializer.Meta.fields,
            *("payload", "idempotency_key", "errors", "story", "obstacles", "server_time"),
        ]
        read_only_fields = fields

    def get_obstacles(self, row: Timeout) -> list[dict[str, Any]]:
        return [dict(each) for each in ObstacleSerializer(obstacles_of([row]), many=True).data]

    def get_server_time(self, row: Timeout) -> str:
        return str(shown_time(clock.now()))


class LateSerializer(serializers.Serializer[Late]):
    """What happens to timeouts whose first attempt would begin later than this after their deadline."""

    after_seconds = SecondsField(source="after")
    then = serializers.ChoiceField(typing.get_args(Then))


class BrakeSerializer(serializers.Serializer[Brake]):
    """After how many firings within a period the policy pauses itself."""

    most = serializers.IntegerField()
    per_seconds = SecondsField(source="per")


class RateSerializer(serializers.Serializer[Rate]):
    """How many attempts may begin within a period."""

    count = serializers.IntegerField()
    per_seconds = SecondsField(source="per")
    by = serializers.CharField(allow_null=True, help_text=_("A column: each of its values has this rate."))


class StepSerializer(serializers.Serializer[Any]):
    """What happens before the handler of a policy acts."""

    name = serializers.CharField()
    when = serializers.CharField(source="__str__", help_text=_("Such as `3 d before the deadline`."))
    atomic = serializers.BooleanField()


class LimitsSerializer(serializers.Serializer[Limits]):
    """What the handler of a policy may use, and how far the application may move a deadline."""

    run_seconds = SecondsField(source="run", allow_null=True)
    rate = RateSerializer(allow_null=True)
    snoozes = serializers.IntegerField(allow_null=True)
    total_seconds = SecondsField(source="total", allow_null=True)


class PolicySerializer(serializers.Serializer[PolicyState]):
    """A declared policy, and what operators have put in force for it."""

    label = serializers.CharField()  # type: ignore[assignment] # DRF's types have a string of that name
    name = serializers.CharField(source="policy.name")
    model = serializers.CharField(source="policy.model._meta.label_lower")
    former_labels = serializers.SerializerMethodField()
    queue = serializers.CharField(source="policy.queue")
    automatic = serializers.BooleanField(
        source="policy.is_automatic", help_text=_("Armed and cancelled by saving its object.")
    )
    declared_seconds = serializers.SerializerMethodField(
        help_text=_("null: a function computes it, or each call sets its own.")
    )
    seconds = SecondsField(
        source="delay", allow_null=True, help_text=_("The delay in force, if every object has the same.")
    )
    delay = serializers.SerializerMethodField(
        help_text=_("The delay in force, such as `4 working hours, Europe/Berlin`; null: it differs, or there is none.")
    )
    since = serializers.SerializerMethodField(
        help_text=_("The field that it counts from; null: a function, or nothing.")
    )
    condition = serializers.SerializerMethodField(help_text=_("null: none."))
    handler = serializers.CharField(source="policy.handler_path")
    confirm_seconds = serializers.FloatField(
        source="policy.confirmation.seconds",
        default=None,
        allow_null=True,
        help_text=_("How long its `confirm` function may take, which is asked first; null: it has none."),
    )
    atomic = serializers.BooleanField(source="policy.atomic")
    batch = serializers.IntegerField(source="policy.batch", allow_null=True)
    batch_by = serializers.CharField(source="policy.batch_by", allow_null=True)
    together = serializers.IntegerField(source="policy.together", allow_null=True)
    max_extensions = serializers.IntegerField(source="policy.max_extensions", allow_null=True)
    grace = serializers.SerializerMethodField(
        help_text=_("How long after the deadline the handler acts, such as `3 d`; null: at the deadline.")
    )
    steps = StepSerializer(source="policy.steps", many=True)
    limits = LimitsSerializer(source="policy.limits", allow_null=True)
    stop = NullableChoice(choices=STOPS, allow_null=True)
    stopped_at = serializers.DateTimeField(allow_null=True)
    until = serializers.DateTimeField(allow_null=True, help_text=_("When a pause or hold ends automatically."))
    by = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    changed_at = serializers.DateTimeField(allow_null=True)
    failing = serializers.SerializerMethodField(
        help_text=_("How many pending timeouts are tried again after a failure, up to 10,000.")
    )
    braked = serializers.BooleanField(source="is_braked", help_text=_("Its own brake has paused it."))
    preview = serializers.SerializerMethodField(
        help_text=_("What resuming it would do now: how many timeouts fire, and sentences; null: it is not stopped.")
    )
    late = LateSerializer(allow_null=True)
    brake = BrakeSerializer(allow_null=True)
    shadow = serializers.IntegerField(help_text=_("The percentage of objects in shadow mode."))
    guards_set_by = serializers.SerializerMethodField(
        help_text=_("Who has set `late`, `brake` or `shadow`; without one, it is as declared.")
    )

    def get_preview(self, state: PolicyState) -> dict[str, Any] | None:
        if not state.is_stopped:
            return None
        preview = preview_resume(state.policy)
        # An unknown caller gets the keys of the objects: it may not see their names.
        text = " ".join(preview.sentences(self.context.get("user", AnonymousUser())))
        return {"due": (preview.due or NOTHING).value, "text": text}

    def get_failing(self, state: PolicyState) -> int:
        counts = self.context.get("failing") or snapshot.count_failing([state], database_of(Timeout))
        return int(counts[state.label].value)

    def get_guards_set_by(self, state: PolicyState) -> dict[str, str]:
        return {guard: actor for guard in GUARDS if (actor := state.set_by(guard))}

    def get_former_labels(self, state: PolicyState) -> list[str]:
        return list(state.policy.labels[1:])

    def get_declared_seconds(self, state: PolicyState) -> float | None:
        return state.policy.after.total_seconds() if isinstance(state.policy.after, timedelta) else None

    def get_delay(self, state: PolicyState) -> str | None:
        return None if state.length is None else length_text(state.length)

    def get_grace(self, state: PolicyState) -> str | None:
        return None if state.policy.grace is None else length_text(state.policy.grace)

    def get_since(self, state: PolicyState) -> str | None:
        return state.policy.since if isinstance(state.policy.since, str) else None

    def get_condition(self, state: PolicyState) -> str | None:
        return None if state.policy.when is None else condition_text(state.policy.when)


class CountdownSerializer(serializers.Serializer[Any]):
    """What the owner of an object may know of its deadline. Its times have a format that scripts can read."""

    due_at = Instant(allow_null=True, format=ISO_8601)
    seconds_left = serializers.IntegerField(allow_null=True, help_text=_("null: nothing is pending."))
    is_paused = serializers.BooleanField(help_text=_("It does not fire now, but its deadline stays."))
    state = NullableChoice(Timeout.State.choices, allow_null=True, help_text=_("null: there has been none."))
    server_time = Instant(source="now", format=ISO_8601)


class TroubleSerializer(serializers.Serializer[Any]):
    """Why nothing was changed."""

    detail = serializers.CharField()


class RefusalSerializer(TroubleSerializer):
    """Why a timeout was not changed."""

    code = serializers.ChoiceField(Refusal.choices)


class ActedSerializer(serializers.Serializer[Any]):
    """The result of an operation on a timeout, and its present state."""

    verb = serializers.CharField()
    changed = serializers.BooleanField()
    dry_run = serializers.BooleanField()
    due_at_once = serializers.BooleanField(help_text=_("Another deadline has made it due now, or would."))
    refusal = RefusalSerializer(allow_null=True)
    timeout = TimeoutSerializer()


class PolicyRefusalSerializer(TroubleSerializer):
    """Why a policy was not changed."""

    code = serializers.CharField(help_text=_("`in_force`: there was nothing to change."))


class PolicyActedSerializer(serializers.Serializer[Any]):
    """The result of an operation on a policy, and its present state."""

    changed = serializers.BooleanField()
    finished = serializers.BooleanField(help_text=_("false: its rows are still being moved."))
    refusal = PolicyRefusalSerializer(allow_null=True)
    policy = PolicySerializer()


class RootSerializer(serializers.Serializer[Any]):
    """The addresses of the API."""

    timeouts = serializers.URLField()
    policies = serializers.URLField()
    status = serializers.URLField()


class CountSerializer(StatusPart):
    """A number of rows; if `is_capped`, there are more."""

    shows = Count


class WorkerSerializer(StatusPart):
    """A running worker."""

    shows = snapshot.WorkerStatus
    queues = serializers.ListField(child=serializers.CharField(), allow_null=True, help_text=_("null: all."))


class QueueSerializer(StatusPart):
    """The entries of one queue in Redis."""

    shows = snapshot.QueueStatus


class RedisSerializer(StatusPart):
    """The content of Redis, and whether it has the timeouts that are due next."""

    shows = snapshot.RedisStatus
    is_in_step = serializers.BooleanField()


class SyncSerializer(StatusPart):
    """How far the workers have compared the policy with its table."""

    shows = snapshot.SyncStatus


class ObstacleSerializer(StatusPart):
    """A reason why due timeouts do not fire."""

    shows = snapshot.Obstacle
    text = serializers.CharField(source="__str__", help_text=_("The reason as a sentence."))


def obstacles_of(rows: Iterable[Timeout]) -> list[snapshot.Obstacle]:
    """Return why those of `rows` that are not settled do not fire although they are due."""
    unsettled = [row for row in rows if not row.is_settled]
    if not unsettled:
        return []
    policies, queues = {row.policy for row in unsettled}, {row.queue for row in unsettled}
    return snapshot.obstacles(database_of(Timeout), policies, queues)


class PolicyStatusSerializer(StatusPart):
    """The counts of one policy; `fired` and `skipped` are those of the last day."""

    shows = snapshot.PolicyStatus
    leaves_out = ("state", "hours")
    is_declared = serializers.SerializerMethodField()
    stop = NullableChoice(choices=STOPS, source="state.stop", default=None, allow_null=True)

    def get_is_declared(self, policy: snapshot.PolicyStatus) -> bool:
        return policy.state is not None


class StatusSerializer(StatusPart):
    """A snapshot, at a time of the database's clock."""

    shows = snapshot.Snapshot
    leaves_out = ("database",)


class FiguresSerializer(StatusPart):
    """How the rounds of a day, a month, or a value have ended; durations in seconds, to 2.5 %."""

    shows = reports.Figures


class ReportSerializer(StatusPart):
    """How the rounds of a policy have ended."""

    shows = reports.Report
    total = FiguresSerializer()


class HourSerializer(StatusPart):
    """How many rounds have ended in an hour."""

    shows = snapshot.Hour
