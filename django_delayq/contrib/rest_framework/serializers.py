"""Requests and responses of the views. Timeouts are shown without loading their objects or policies."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from django.contrib.contenttypes.models import ContentType
from django.utils.translation import gettext_lazy as _
from rest_framework import serializers
from rest_framework.exceptions import ValidationError

from django_delayq import clock
from django_delayq.conditions import condition_text
from django_delayq.contrib.rest_framework.openapi import describe_field
from django_delayq.delays import UNITS
from django_delayq.guard_rails import MAX_COUNT, MAX_PERIOD, Brake, Late, Limits, Rate, Then
from django_delayq.ledger.controls import GUARDS, PolicyState
from django_delayq.ledger.history import MAX_REASON
from django_delayq.ledger.search import YEARS
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations import Refusal
from django_delayq.scheduling.story import explain_timeout

MAX_UNITS: Final = 1e9
"""More than any deadline allows in every unit, and less than Python's limit."""
CSRF_FIELD: Final = "csrfmiddlewaretoken"
"""The field of a form that Django's CSRF check reads."""
STOPS: Final = PolicyControl.Stop.choices[1:]
"""How a policy is stopped; null: it is not."""


class Moment(serializers.DateTimeField):
    """A datetime in the years that every database can compare."""

    def to_internal_value(self, value: Any) -> datetime:
        moment = super().to_internal_value(value)
        if moment.year not in YEARS:
            raise serializers.ValidationError(_("This time is too far away."))
        return moment


class NullableChoice(serializers.ChoiceField):
    """A choice whose empty string is null in JSON."""

    def to_representation(self, value: Any) -> Any:
        return value or None


class ObjectSerializer(serializers.Serializer[Timeout]):
    """The object of a timeout, as its row names it; it may no longer exist."""

    model = serializers.SerializerMethodField(help_text=_("`app.model`; null: the model no longer exists."))
    id = serializers.CharField(source="object_id")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._models: dict[int, str | None] = {}

    def get_model(self, row: Timeout) -> str | None:
        # Django caches existing content types only. A deleted one would be queried again for each row.
        if row.content_type_id not in self._models:
            try:
                kind = ContentType.objects.db_manager(row._state.db).get_for_id(row.content_type_id)
                self._models[row.content_type_id] = f"{kind.app_label}.{kind.model}"
            except ContentType.DoesNotExist:
                self._models[row.content_type_id] = None
        return self._models[row.content_type_id]


class TimeoutSerializer(serializers.ModelSerializer[Timeout]):
    """A timeout in a list."""

    object = ObjectSerializer(source="*", read_only=True)
    cause = NullableChoice(choices=Timeout.Cause.choices, allow_null=True, read_only=True)

    class Meta:
        model = Timeout
        fields = [
            *("id", "policy", "object", "key", "queue", "state", "cause", "due_at", "run_at", "since_at"),
            *("first_due_at", "extensions", "attempts", "reason", "created_at", "settled_at"),
        ]
        read_only_fields = fields


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


class ErrorSerializer(serializers.Serializer[Any]):
    """A failed attempt."""

    at = serializers.CharField()
    error = serializers.CharField(default="")
    message = serializers.CharField(default="")
    traceback = serializers.CharField(default="")


class TimeoutDetailSerializer(TimeoutSerializer):
    """One timeout, with its history, its failed attempts and its payload."""

    story = serializers.SerializerMethodField()
    errors = ErrorSerializer(many=True, read_only=True)  # type: ignore[assignment] # hides DRF's own, unused here
    server_time = serializers.SerializerMethodField()

    class Meta(TimeoutSerializer.Meta):
        fields = [*TimeoutSerializer.Meta.fields, "payload", "idempotency_key", "errors", "story", "server_time"]
        read_only_fields = fields

    @describe_field(StorySerializer)
    def get_story(self, row: Timeout) -> dict[str, Any]:
        return dict(StorySerializer(explain_timeout(row)).data)

    def get_server_time(self, row: Timeout) -> datetime:
        return clock.now()


class SecondsField(serializers.FloatField):
    """A duration, shown in seconds."""

    def to_representation(self, value: Any) -> Any:
        return float(value.total_seconds())


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


class LimitsSerializer(serializers.Serializer[Limits]):
    """What the handler of a policy may use."""

    run_seconds = SecondsField(source="run", allow_null=True)
    rate = RateSerializer(allow_null=True)
    snoozes = serializers.IntegerField(allow_null=True)


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
    seconds = serializers.SerializerMethodField(help_text=_("The delay in force, if every object has the same."))
    since = serializers.SerializerMethodField(
        help_text=_("The field that it counts from; null: a function, or nothing.")
    )
    condition = serializers.SerializerMethodField(help_text=_("null: none."))
    handler = serializers.CharField(source="policy.handler_path")
    atomic = serializers.BooleanField(source="policy.atomic")
    batch = serializers.IntegerField(source="policy.batch", allow_null=True)
    max_extensions = serializers.IntegerField(source="policy.max_extensions", allow_null=True)
    limits = LimitsSerializer(source="policy.limits", allow_null=True)
    stop = NullableChoice(choices=STOPS, allow_null=True)
    stopped_at = serializers.DateTimeField(allow_null=True)
    until = serializers.DateTimeField(allow_null=True, help_text=_("When a pause ends automatically."))
    by = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    changed_at = serializers.DateTimeField(allow_null=True)
    braked = serializers.BooleanField(source="is_braked", help_text=_("Its own brake has paused it."))
    late = LateSerializer(allow_null=True)
    brake = BrakeSerializer(allow_null=True)
    shadow = serializers.IntegerField(help_text=_("The percentage of objects in shadow mode."))
    guards_set_by = serializers.SerializerMethodField(
        help_text=_("Who has set `late`, `brake` or `shadow`; without one, it is as declared.")
    )

    @describe_field(serializers.DictField(child=serializers.CharField()))
    def get_guards_set_by(self, state: PolicyState) -> dict[str, str]:
        return {guard: actor for guard in GUARDS if (actor := state.set_by(guard))}

    def get_former_labels(self, state: PolicyState) -> list[str]:
        return list(state.policy.labels[1:])

    def get_declared_seconds(self, state: PolicyState) -> float | None:
        return state.policy.after.total_seconds() if isinstance(state.policy.after, timedelta) else None

    def get_seconds(self, state: PolicyState) -> float | None:
        return state.delay.total_seconds() if state.delay is not None else None

    def get_since(self, state: PolicyState) -> str | None:
        return state.policy.since if isinstance(state.policy.since, str) else None

    def get_condition(self, state: PolicyState) -> str | None:
        return None if state.policy.when is None else condition_text(state.policy.when)


class CountdownSerializer(serializers.Serializer[Any]):
    """What the owner of an object may know of its deadline."""

    due_at = serializers.DateTimeField(allow_null=True)
    seconds_left = serializers.IntegerField(allow_null=True, help_text=_("null: nothing is pending."))
    state = serializers.ChoiceField(Timeout.State.choices, allow_null=True, help_text=_("null: there has been none."))
    server_time = serializers.DateTimeField(source="now")


class ReasonSerializer(serializers.Serializer[Any]):
    """An operation with a reason, which is stored with the change. Unknown fields are refused."""

    reason = serializers.CharField(required=False, allow_blank=True, default="", max_length=MAX_REASON)

    def to_internal_value(self, data: Any) -> Any:
        """Return the checked fields. Raises ValidationError for unknown ones, such as a misspelt `until`."""
        unknown = set(data) - {*self.fields, CSRF_FIELD} if isinstance(data, Mapping) else ()
        if unknown:
            words = _("There is no such field. This action accepts {names}.")
            complaint = words.format(names=", ".join(f'"{name}"' for name in self.fields))
            # JSON may contain lone surrogates, which no response can.
            names = sorted(name.encode(errors="replace").decode() for name in unknown)
            raise ValidationError({name: [complaint] for name in names})
        return super().to_internal_value(data)


class VerbSerializer(ReasonSerializer):
    """An operation on a timeout."""

    dry_run = serializers.BooleanField(required=False, default=False, help_text=_("Only report what would happen."))


class PostponeSerializer(VerbSerializer):
    """How much later, counted from the deadline, or from now if that has passed; or until when."""

    at = Moment(required=False)

    def get_fields(self) -> dict[str, Any]:
        units = {unit: serializers.FloatField(required=False, min_value=0, max_value=MAX_UNITS) for unit in UNITS}
        return super().get_fields() | units

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        delay = attrs.keys() & {*UNITS, "at"}
        if not delay or ("at" in delay and len(delay) > 1):
            raise ValidationError({"delay": [_("Give either a duration or a time.")]})
        return attrs


class RefireSerializer(VerbSerializer):
    """The deadline of the new round; without it, now."""

    at = Moment(required=False)


class PauseSerializer(ReasonSerializer):
    """The end of a pause; null: until it is resumed. Without it, a pause that is in force keeps its end."""

    until = Moment(required=False, allow_null=True)


class ResumeSerializer(ReasonSerializer):
    """Whether, after a hold, pending deadlines move by its length."""

    shift = serializers.BooleanField(required=False, default=True)


class GuardSerializer(ReasonSerializer):
    """A guard rail: its values, or `off`, or `declared`: as the code declares it."""

    values: typing.ClassVar[tuple[str, ...]] = ()
    """The fields that are required unless it is off or declared."""
    off = serializers.BooleanField(required=False, default=False)
    declared = serializers.BooleanField(required=False, default=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the operation. Raises ValidationError unless one of the three is given."""
        off, declared = attrs.pop("off"), attrs.pop("declared")
        given = {name for name in self.values if name in attrs}
        if off + declared + bool(given) != 1 or (given and given != {*self.values}):
            words = _("Give either {values}, or `off`, or `declared`.")
            raise ValidationError({"guard": [words.format(values=", ".join(f"`{name}`" for name in self.values))]})
        if not given:
            return {"reason": attrs["reason"], "off": off}
        return {name.removesuffix("_seconds"): self._plain(name, value) for name, value in attrs.items()}

    def _plain(self, name: str, value: Any) -> Any:
        if not name.endswith("_seconds"):
            return value
        try:
            return timedelta(seconds=value)
        except ValueError:  # not a number, which no limit refuses
            raise ValidationError({name: [self.fields[name].error_messages["invalid"]]}) from None


class SetLateSerializer(GuardSerializer):
    """How late a first attempt may begin, and what happens to timeouts that are later."""

    values = ("after_seconds",)
    after_seconds = serializers.FloatField(required=False, min_value=0, max_value=MAX_PERIOD.total_seconds())
    then = serializers.ChoiceField(typing.get_args(Then), required=False, default="skip")


class SetBrakeSerializer(GuardSerializer):
    """After how many firings within a period the policy pauses itself."""

    values = ("most", "per_seconds")
    most = serializers.IntegerField(required=False, min_value=1, max_value=MAX_COUNT)
    per_seconds = serializers.FloatField(required=False, min_value=1, max_value=MAX_PERIOD.total_seconds())


class SetShadowSerializer(ReasonSerializer):
    """For which percentage of the objects everything happens but the handler."""

    share = serializers.IntegerField(
        min_value=0, max_value=100, allow_null=True, help_text=_("100: for all; 0: off; null: as declared.")
    )


class RefusalSerializer(serializers.Serializer[Any]):
    """Why a timeout was not changed."""

    code = serializers.ChoiceField(Refusal.choices)
    detail = serializers.CharField()


class ActedSerializer(serializers.Serializer[Any]):
    """The result of an operation on a timeout, and its present state."""

    verb = serializers.CharField()
    changed = serializers.BooleanField()
    dry_run = serializers.BooleanField()
    refusal = RefusalSerializer(allow_null=True)
    timeout = TimeoutSerializer()


class PolicyActedSerializer(serializers.Serializer[Any]):
    """The result of an operation on a policy, and its present state."""

    changed = serializers.BooleanField()
    finished = serializers.BooleanField(help_text=_("false: its rows are still being moved."))
    policy = PolicySerializer()


class TroubleSerializer(serializers.Serializer[Any]):
    """Why nothing was changed."""

    detail = serializers.CharField()
