"""The countdown of one object for its owner, behind a permission of the project."""

from __future__ import annotations

import hashlib
from typing import Any, cast

from django.db.models import Model, QuerySet
from django.http import Http404, HttpResponseBase
from django.utils.cache import get_conditional_response, patch_cache_control
from django.utils.http import quote_etag
from rest_framework.exceptions import NotAuthenticated, PermissionDenied
from rest_framework.generics import GenericAPIView
from rest_framework.request import Request
from rest_framework.response import Response

from django_delayq.clock import to_ms
from django_delayq.contrib.rest_framework.access import DenyAll, OptionalScope
from django_delayq.contrib.rest_framework.openapi import describe
from django_delayq.contrib.rest_framework.serializers import CountdownSerializer
from django_delayq.ledger.locking import database_of
from django_delayq.policies import TimeoutPolicy, get_policy
from django_delayq.scheduling.queries import countdown_of

SERVER_TIME = "X-Server-Time"


class CountdownView(OptionalScope, GenericAPIView):  # type: ignore[type-arg]
    """The time left for one object, for its owner.

    Give it a policy, a permission, and an address that finds the object:

        path("orders/<str:reference>/countdown/", CountdownView.as_view(
            policy="shop.order.cancel_unpaid", lookup_field="reference", permission_classes=[IsBuyer]))

    Without `permission_classes` it refuses all users. An object that the user may not see is answered like one that
    does not exist.
    """

    policy: str | TimeoutPolicy[Any] | None = None
    key = ""
    serializer_class = CountdownSerializer
    permission_classes = [DenyAll]
    filter_backends = []
    pagination_class = None
    scope = "delayq-countdown"

    def get_queryset(self) -> QuerySet[Model]:
        """Return the view's own `queryset` or all objects of the policy's model.

        They are read from the writer, because a replica may not have the object yet.
        """
        if self.queryset is not None:  # type: ignore[misc, arg-type, unused-ignore]
            found: QuerySet[Model] = super().get_queryset()
        else:
            found = cast("Any", self._policy().model._default_manager).all()
        return found.using(database_of(found.model, found))

    def get_object(self) -> Model:
        """Return the object. Raises Http404, also if the user may not see it."""
        try:
            return cast("Model", super().get_object())
        except (PermissionDenied, NotAuthenticated, Http404):
            # Different responses, even if only in their words, would reveal which objects exist.
            raise Http404 from None

    @describe("countdown", CountdownSerializer, has_etag=True)
    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Return how long is left, or 304 if nothing has changed since the ETag of the request."""
        seen = countdown_of(self.get_object(), self._policy(), self.key)
        shown = {"due_at": seen.due_at, "seconds_left": seen.seconds_left, "state": seen.state or None, "now": seen.now}
        response = Response(self.get_serializer(shown).data)
        # The tag changes with everything but the time. It is a digest, so that it reveals no id.
        parts = f"{seen.timeout_id} {seen.state} {seen.due_at and to_ms(seen.due_at)}"
        tag = quote_etag(hashlib.blake2b(parts.encode(), digest_size=12).hexdigest())
        response["ETag"] = tag
        patch_cache_control(response, private=True, no_cache=True)
        answer = get_conditional_response(request._request, etag=tag, response=response)
        assert answer is not None
        answer[SERVER_TIME] = str(to_ms(seen.now))
        return answer

    def _policy(self) -> TimeoutPolicy[Any]:
        if self.policy is None:
            raise TypeError('CountdownView needs a policy: CountdownView.as_view(policy="shop.order.cancel_unpaid").')
        return self.policy if isinstance(self.policy, TimeoutPolicy) else get_policy(self.policy)
