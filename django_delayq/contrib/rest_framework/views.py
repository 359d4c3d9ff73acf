"""The operator's addresses: timeouts and policies, for staff with the permissions of Django's admin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.http import Http404
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet, ViewSet

from django_delayq.contrib.rest_framework.pagination import KeysetPagination
from django_delayq.contrib.rest_framework.permissions import VIEW, StaffWithPermission
from django_delayq.contrib.rest_framework.selecting import Selection
from django_delayq.contrib.rest_framework.serializers import (
    PolicySerializer,
    TimeoutDetailSerializer,
    TimeoutSerializer,
)
from django_delayq.contrib.rest_framework.throttling import OptionalScope
from django_delayq.ledger.locking import database_of
from django_delayq.models import Timeout
from django_delayq.policies import get_policies, registry

if TYPE_CHECKING:
    from rest_framework.request import Request

    from django_delayq.models import TimeoutQuerySet

    _Timeouts = GenericViewSet[Timeout]
else:
    _Timeouts = GenericViewSet

LARGE = ("history", "payload")


class TimeoutViewSet(OptionalScope, RetrieveModelMixin, _Timeouts):
    """The ledger: who waits for what until when, and what happened."""

    queryset = Timeout.objects.all()
    serializer_class = TimeoutDetailSerializer
    permission_classes = [StaffWithPermission]
    pagination_class = KeysetPagination
    filter_backends = []
    lookup_value_regex = "[^/]+"
    needed_permission = VIEW

    def get_queryset(self) -> TimeoutQuerySet:
        """All rows, read where they are written: who has just acted must see it."""
        rows: TimeoutQuerySet = Timeout.objects.using(database_of(Timeout))
        return rows

    def list(self, request: Request) -> Response:
        """A page of timeouts, without what may be large.

        All of them newest first; what waits soonest first; what is settled latest first.
        """
        selection = Selection.of(request.query_params)
        rows, narrow = selection.rows(database_of(Timeout))
        page = KeysetPagination()
        found = page.page_of(rows.defer(*LARGE), narrow, request)
        context = self.get_serializer_context()
        return page.get_paginated_response(TimeoutSerializer(found, many=True, context=context).data)


class PolicyViewSet(OptionalScope, ViewSet):
    """The declared policies."""

    permission_classes = [StaffWithPermission]
    lookup_field = "label"
    lookup_value_regex = "[^/]+"
    needed_permission = VIEW

    def list(self, request: Request) -> Response:
        """Every declared policy, by label."""
        declared: Any = sorted(get_policies(), key=lambda policy: policy.label)
        return Response(PolicySerializer(declared, many=True).data)

    def retrieve(self, request: Request, label: str) -> Response:
        """One policy, under its present label or a former one."""
        policy = registry.get(label)
        if policy is None:
            raise Http404
        return Response(PolicySerializer(policy).data)
