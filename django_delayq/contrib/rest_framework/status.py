"""The response of the status view. Its fields follow from the types of `monitoring.snapshot`."""

from __future__ import annotations

import typing
from datetime import datetime
from types import NoneType
from typing import Any

from django.utils.translation import gettext_lazy as _
from rest_framework import serializers

from django_delayq.contrib.rest_framework.serializers import STOPS, NullableChoice
from django_delayq.ledger.search import Count
from django_delayq.monitoring import snapshot


class StatusPart(serializers.Serializer[Any]):
    """A serializer with the fields of a dataclass or named tuple of `monitoring`, by their types."""

    shows: type[Any] = object
    leaves_out: tuple[str, ...] = ()
    _kinds: typing.ClassVar[dict[Any, Any]] = {
        str: lambda **options: serializers.CharField(allow_blank=True, **options),
        int: serializers.IntegerField,
        float: serializers.FloatField,
        bool: serializers.BooleanField,
        datetime: serializers.DateTimeField,
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
