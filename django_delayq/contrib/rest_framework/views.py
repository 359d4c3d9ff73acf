"""The operator's addresses: timeouts and policies, for staff with the permissions of Django's admin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.http import Http404
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet, ViewSet

from django_delayq import operations
from django_delayq.contrib.rest_framework import acting
from django_delayq.contrib.rest_framework.pagination import KeysetPagination
from django_delayq.contrib.rest_framework.permissions import StaffWithPermission
from django_delayq.contrib.rest_framework.selecting import Selection
from django_delayq.contrib.rest_framework.serializers import (
    PolicySerializer,
    TimeoutDetailSerializer,
    TimeoutSerializer,
)
from django_delayq.contrib.rest_framework.throttling import OptionalScope
from django_delayq.ledger import controls
from django_delayq.ledger.locking import database_of
from django_delayq.models import Timeout
from django_delayq.policies import TimeoutPolicy, registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from rest_framework.request import Request

    from django_delayq.models import PolicyChange, TimeoutQuerySet

    _Timeouts = GenericViewSet[Timeout]
else:
    _Timeouts = GenericViewSet

LARGE: Final = ("history", "payload")


class TimeoutViewSet(OptionalScope, RetrieveModelMixin, _Timeouts):
    """The ledger: who waits for what until when, what happened, and what operators do about it."""

    queryset = Timeout.objects.all()
    serializer_class = TimeoutDetailSerializer
    permission_classes = [StaffWithPermission]
    pagination_class = KeysetPagination
    filter_backends = []
    lookup_value_regex = "[^/]+"
    verbs: ClassVar = {
        "cancel": "cancel_timeout",
        "fire": "fire_timeout",
        "postpone": "postpone_timeout",
        "retry": "retry_timeout",
    }

    def permissions_of(self, action: str | None) -> tuple[str, ...]:
        """Each verb has a permission of its own; the rest is for who may see the ledger."""
        return (self.verbs[action],) if action in self.verbs else ("view_timeout",)

    def get_queryset(self) -> TimeoutQuerySet:
        """All rows, read where they are written: who has just acted must see it."""
        rows: TimeoutQuerySet = Timeout.objects.using(database_of(Timeout))
        return rows

    def get_object(self) -> Timeout:
        """The row. Raises Http404 without words, which REST framework has in the asker's language; Django's has not."""
        try:
            return super().get_object()
        except Http404:
            raise Http404 from None

    def list(self, request: Request) -> Response:
        """A page of timeouts, without what may be large.

        All of them newest first; what waits soonest first; what is settled latest first.
        """
        selection = Selection.of(request.query_params)
        rows, narrow = selection.rows(database_of(Timeout))
        page = KeysetPagination()
        found = page.page_of(rows.defer(*LARGE), narrow, request)
        return page.get_paginated_response(TimeoutSerializer(found, many=True).data)

    @action(detail=True, methods=["post"])
    def cancel(self, request: Request, pk: str) -> Response:
        """It will not happen. What is firing cannot be stopped, but gets no further attempt."""
        return self._act(operations.cancel, acting.VerbSerializer)

    @action(detail=True, methods=["post"])
    def fire(self, request: Request, pk: str) -> Response:
        """It is due now, and a worker fires it as always: if its condition still holds."""
        return self._act(operations.fire_now, acting.VerbSerializer)

    @action(detail=True, methods=["post"])
    def postpone(self, request: Request, pk: str) -> Response:
        """It has a later deadline."""
        return self._act(operations.postpone, acting.PostponeSerializer)

    @action(detail=True, methods=["post"])
    def retry(self, request: Request, pk: str) -> Response:
        """It was dead, and is attempted again."""
        return self._act(operations.retry, acting.VerbSerializer)

    def _act(self, verb: Callable[..., operations.Result], body: type[acting.VerbSerializer]) -> Response:
        said = body(data=self.request.data)
        said.is_valid(raise_exception=True)
        row, using = self.get_object(), database_of(Timeout)
        asked = dict(said.validated_data)
        delay = asked.pop("delay", {})
        with acting.told_apart(using):
            steered = verb(row, by=acting.actor_of(self.request), **asked, **delay)
        return acting.answer_for(row, steered, using)


class PolicyViewSet(OptionalScope, ViewSet):
    """The declared policies, as they stand."""

    permission_classes = [StaffWithPermission]
    lookup_field = "label"
    lookup_value_regex = "[^/]+"
    verbs: ClassVar = {"pause": "pause_policy", "hold": "pause_policy", "resume": "pause_policy"}

    def permissions_of(self, action: str | None) -> tuple[str, ...]:
        """Who may see the ledger may see the policies behind it."""
        return (self.verbs[action],) if action in self.verbs else ("view_timeout", "view_policycontrol")

    def list(self, request: Request) -> Response:
        """Every declared policy, by label."""
        states: Any = controls.policy_states(database_of(Timeout))
        return Response(PolicySerializer(states, many=True).data)

    def retrieve(self, request: Request, label: str) -> Response:
        """One policy, under its present label or a former one."""
        policy = _declared(label)
        return Response(PolicySerializer(controls.policy_state(policy, database_of(policy.concrete_model))).data)

    @action(detail=True, methods=["post"])
    def pause(self, request: Request, label: str) -> Response:
        """Nothing of it fires until it is resumed, or until a moment. What falls due meanwhile fires then.

        Of a pause that is in force, end and reason are kept unless given.
        """
        return self._act(operations.pause, acting.PauseSerializer)

    @action(detail=True, methods=["post"])
    def hold(self, request: Request, label: str) -> Response:
        """Nothing of it fires, and its clock stands still: resuming moves what is pending by the hold's length.

        A pause that is in force becomes a hold that begins now.
        """
        return self._act(operations.hold, acting.ReasonSerializer)

    @action(detail=True, methods=["post"])
    def resume(self, request: Request, label: str) -> Response:
        """It goes on."""
        return self._act(operations.resume, acting.ResumeSerializer)

    def _act(self, verb: Callable[..., PolicyChange | None], body: type[acting.ReasonSerializer]) -> Response:
        said = body(data=self.request.data)
        said.is_valid(raise_exception=True)
        policy = _declared(self.kwargs["label"])
        using = database_of(policy.concrete_model)
        with acting.told_apart(using):
            change = verb(policy, by=acting.actor_of(self.request), **said.validated_data)
        acted = {
            "changed": change is not None,
            "finished": change is None or change.finished_at is not None,
            "policy": controls.policy_state(policy, using),
        }
        code = status.HTTP_200_OK if change is not None else status.HTTP_409_CONFLICT
        return Response(acting.PolicyActedSerializer(acted).data, code)


def _declared(label: str) -> TimeoutPolicy[Any]:
    policy = registry.get(label)
    if policy is None:
        raise Http404
    return policy
