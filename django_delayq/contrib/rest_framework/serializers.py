"""Timeouts and policies as JSON. Neither the objects that timeouts are about nor their policies are needed."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.contrib.contenttypes.models import ContentType
from django.utils.translation import gettext_lazy as _
from rest_framework import serializers

from django_delayq import clock
from django_delayq.ledger.controls import PolicyState
from django_delayq.models import PolicyControl, Timeout
from django_delayq.scheduling.story import explain_timeout


class ObjectSerializer(serializers.Serializer[Timeout]):
    """What a timeout is about, as its row has it. The object is not loaded; it may be gone."""

    model = serializers.SerializerMethodField(help_text=_("`app.model`; null: there is no such model any more."))
    id = serializers.CharField(source="object_id")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._models: dict[int, str | None] = {}

    def get_model(self, row: Timeout) -> str | None:
        # Django remembers the kinds that it has found. One that is gone would be looked for again for every row.
        if row.content_type_id not in self._models:
            self._models[row.content_type_id] = _model_label(row)
        return self._models[row.content_type_id]


def _model_label(row: Timeout) -> str | None:
    try:
        kind = ContentType.objects.db_manager(row._state.db).get_for_id(row.content_type_id)
    except ContentType.DoesNotExist:
        return None
    return f"{kind.app_label}.{kind.model}"


class NullForNothing(serializers.ChoiceField):
    """A choice whose empty text is null in JSON."""

    def to_representation(self, value: Any) -> Any:
        return value or None


class StopField(NullForNothing):
    """How a policy is stopped; null: it is not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(choices=PolicyControl.Stop.choices[1:], **options)


class TimeoutSerializer(serializers.ModelSerializer[Timeout]):
    """A row of the list."""

    object = ObjectSerializer(source="*", read_only=True)
    cause = NullForNothing(choices=Timeout.Cause.choices, allow_null=True, read_only=True)

    class Meta:
        model = Timeout
        fields = [
            *("id", "policy", "object", "key", "queue", "state", "cause", "due_at", "run_at", "since_at"),
            *("first_due_at", "extensions", "attempts", "reason", "created_at", "settled_at"),
        ]
        read_only_fields = fields


class EventSerializer(serializers.Serializer[Any]):
    """One thing that happened to a timeout."""

    at = serializers.DateTimeField()
    what = serializers.CharField()
    by = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    text = serializers.CharField(source="__str__", help_text=_("All of it as a line for people."))


class StorySerializer(serializers.Serializer[Any]):
    """What happened, oldest first, and how things stand."""

    events = EventSerializer(many=True)
    outlook = serializers.CharField()


class ErrorSerializer(serializers.Serializer[Any]):
    """A failed attempt."""

    at = serializers.CharField()
    error = serializers.CharField(default="")
    message = serializers.CharField(default="")
    traceback = serializers.CharField(default="")


class TimeoutDetailSerializer(TimeoutSerializer):
    """One row, with its story, its failures and its payload."""

    story = serializers.SerializerMethodField()
    errors = ErrorSerializer(many=True, read_only=True)  # type: ignore[assignment] # hides DRF's own, unused here
    server_time = serializers.SerializerMethodField()

    class Meta(TimeoutSerializer.Meta):
        fields = [*TimeoutSerializer.Meta.fields, "payload", "idempotency_key", "errors", "story", "server_time"]
        read_only_fields = fields

    def get_story(self, row: Timeout) -> dict[str, Any]:
        return dict(StorySerializer(explain_timeout(row)).data)

    def get_server_time(self, row: Timeout) -> datetime:
        return clock.now()


class PolicySerializer(serializers.Serializer[PolicyState]):
    """A declared policy, and what operators have put in force for it."""

    label = serializers.CharField()  # type: ignore[assignment] # DRF's types have a text of that name
    name = serializers.CharField(source="policy.name")
    model = serializers.CharField(source="policy.model._meta.label_lower")
    former_labels = serializers.SerializerMethodField()
    queue = serializers.CharField(source="policy.queue")
    automatic = serializers.BooleanField(
        source="policy.is_automatic", help_text=_("Armed and cancelled by saving its object.")
    )
    declared_seconds = serializers.SerializerMethodField(
        help_text=_("null: a function says so, or each scheduling does.")
    )
    seconds = serializers.SerializerMethodField(help_text=_("The delay in force, where every object has the same."))
    since = serializers.SerializerMethodField(
        help_text=_("The field that it counts from; null: a function, or nothing.")
    )
    condition = serializers.SerializerMethodField(help_text=_("null: none."))
    handler = serializers.SerializerMethodField()
    atomic = serializers.BooleanField(source="policy.atomic")
    batch = serializers.IntegerField(source="policy.batch", allow_null=True)
    max_extensions = serializers.IntegerField(source="policy.max_extensions", allow_null=True)
    stop = StopField(allow_null=True)
    stopped_at = serializers.DateTimeField(allow_null=True)
    until = serializers.DateTimeField(allow_null=True, help_text=_("When a pause ends by itself."))
    by = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)
    changed_at = serializers.DateTimeField(allow_null=True)

    def get_former_labels(self, state: PolicyState) -> list[str]:
        return list(state.policy.labels[1:])

    def get_declared_seconds(self, state: PolicyState) -> float | None:
        return _seconds(state.policy.after)

    def get_seconds(self, state: PolicyState) -> float | None:
        return _seconds(state.delay)

    def get_since(self, state: PolicyState) -> str | None:
        return state.policy.since if isinstance(state.policy.since, str) else None

    def get_condition(self, state: PolicyState) -> str | None:
        return None if state.policy.when is None else str(state.policy.when)

    def get_handler(self, state: PolicyState) -> str:
        handler = state.policy.handler
        return f"{getattr(handler, '__module__', '?')}.{getattr(handler, '__qualname__', state.policy.name)}"


def _seconds(length: object) -> float | None:
    return length.total_seconds() if isinstance(length, timedelta) else None


class CountdownSerializer(serializers.Serializer[Any]):
    """What an object's owner may know of a deadline."""

    due_at = serializers.DateTimeField(allow_null=True)
    seconds_left = serializers.FloatField(allow_null=True, help_text=_("null: nothing is pending."))
    state = serializers.ChoiceField(Timeout.State.choices, allow_null=True, help_text=_("null: there never was one."))
    server_time = serializers.DateTimeField(source="now")
