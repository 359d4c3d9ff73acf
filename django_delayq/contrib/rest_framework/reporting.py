"""How everything stands, as JSON: what `delayq_status` tells, for probes and dashboards of one's own."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_delayq.contrib.rest_framework.permissions import StaffWithPermission
from django_delayq.contrib.rest_framework.serializers import StopField
from django_delayq.contrib.rest_framework.throttling import OptionalScope
from django_delayq.ledger.locking import database_of
from django_delayq.models import Timeout
from django_delayq.monitoring.snapshot import snapshot


class CountSerializer(serializers.Serializer[Any]):
    """A number, or the most that is counted, and the word that there are more."""

    value = serializers.IntegerField()
    is_capped = serializers.BooleanField()


class WorkerSerializer(serializers.Serializer[Any]):
    """A worker that lives."""

    name = serializers.CharField()
    queues = serializers.ListField(child=serializers.CharField(), allow_null=True, help_text=_("null: all."))
    concurrency = serializers.IntegerField()
    held = serializers.IntegerField()
    uses_redis = serializers.BooleanField()
    version = serializers.CharField(allow_blank=True)
    started_at = serializers.DateTimeField()
    seen_at = serializers.DateTimeField()
    stuck_seconds = serializers.FloatField()


class QueueSerializer(serializers.Serializer[Any]):
    """The entries of one queue in Redis."""

    name = serializers.CharField()
    entries = serializers.IntegerField()
    due = serializers.IntegerField()
    leased = serializers.IntegerField()


class RedisSerializer(serializers.Serializer[Any]):
    """What Redis holds, and whether it knows what falls due next."""

    is_configured = serializers.BooleanField()
    is_reachable = serializers.BooleanField()
    is_in_step = serializers.BooleanField()
    error = serializers.CharField(allow_blank=True)
    queues = QueueSerializer(many=True)
    compared = serializers.IntegerField()
    missing = serializers.IntegerField()


class PolicyStatusSerializer(serializers.Serializer[Any]):
    """One policy's numbers; what has fired or was skipped is that of the last day."""

    label = serializers.CharField()  # type: ignore[assignment] # DRF's types have a text of that name
    is_declared = serializers.SerializerMethodField()
    stop = StopField(source="state.stop", default=None, allow_null=True)
    pending = CountSerializer()
    due = CountSerializer()
    overdue = CountSerializer()
    firing = CountSerializer()
    dead = CountSerializer()
    fired = CountSerializer()
    skipped = CountSerializer()
    oldest_due_at = serializers.DateTimeField(allow_null=True)
    lag_p50 = serializers.FloatField(allow_null=True)
    lag_p99 = serializers.FloatField(allow_null=True)

    def get_is_declared(self, policy: Any) -> bool:
        return policy.state is not None


class StatusSerializer(serializers.Serializer[Any]):
    """One moment, by the database's clock."""

    at = serializers.DateTimeField()
    workers = WorkerSerializer(many=True)
    redis = RedisSerializer()
    pending = CountSerializer()
    due = CountSerializer()
    overdue = CountSerializer()
    firing = CountSerializer()
    dead = CountSerializer()
    oldest_overdue_seconds = serializers.FloatField()
    lag_p50 = serializers.FloatField(allow_null=True)
    lag_p99 = serializers.FloatField(allow_null=True)
    policies = PolicyStatusSerializer(many=True)


class StatusView(OptionalScope, APIView):
    """Workers, depth, lateness, Redis: at a cost that a million rows do not change."""

    permission_classes = [StaffWithPermission]

    def permissions_of(self, action: str | None) -> tuple[str, ...]:
        """Who may see the ledger may see how it stands."""
        return ("view_timeout",)

    def get(self, request: Request) -> Response:
        """How everything stands now."""
        return Response(StatusSerializer(snapshot(database_of(Timeout))).data)
