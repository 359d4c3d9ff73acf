"""The countdown of one object for its owner: behind a permission that the project supplies, cheap to ask again."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

from django.http import Http404
from django.utils.cache import get_conditional_response, patch_cache_control
from django.utils.http import quote_etag
from rest_framework.exceptions import NotAuthenticated, PermissionDenied
from rest_framework.generics import GenericAPIView
from rest_framework.response import Response

from django_delayq.clock import to_ms
from django_delayq.contrib.rest_framework.permissions import Nobody
from django_delayq.contrib.rest_framework.serializers import CountdownSerializer
from django_delayq.contrib.rest_framework.throttling import OptionalScope
from django_delayq.ledger.locking import database_of
from django_delayq.policies import TimeoutPolicy, get_policy
from django_delayq.scheduling.queries import Countdown, countdown_of

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet
    from django.http import HttpResponseBase
    from rest_framework.request import Request

    _View = GenericAPIView[Any]
else:
    _View = GenericAPIView

SERVER_TIME = "X-Server-Time"


class CountdownView(OptionalScope, _View):
    """How long is left, for whoever owns the object.

    Give it a policy and the permission, and an address with what finds the object:

        path("orders/<str:reference>/countdown/", CountdownView.as_view(
            policy="shop.order.cancel_unpaid", lookup_field="reference", permission_classes=[IsBuyer]))

    It refuses everybody until `permission_classes` says who may look. An object that is somebody else's is
    not found, as one that does not exist.
    """

    policy: str | TimeoutPolicy[Any] | None = None
    key = ""
    serializer_class = CountdownSerializer
    permission_classes = [Nobody]
    filter_backends = []
    pagination_class = None
    scope = "delayq-countdown"

    def get_queryset(self) -> QuerySet[Model]:
        """Where the object is looked for: the policy's model, unless the view has a `queryset` of its own.

        On the writer: a replica may not have the object yet.
        """
        if self.queryset is not None:  # type: ignore[misc, arg-type, unused-ignore]
            found: QuerySet[Model] = super().get_queryset()
        else:
            found = cast("Any", self._policy().model._default_manager).all()
        return found.using(database_of(found.model, found))

    def get_object(self) -> Model:
        """The object, if the asking user may see its countdown. Raises Http404 if not."""
        try:
            return cast("Model", super().get_object())
        except (PermissionDenied, NotAuthenticated, Http404):
            # Two different answers, if only in their words, would tell which objects there are.
            raise Http404 from None

    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """How long is left; 304 if nothing has changed since the ETag that was sent along."""
        seen = countdown_of(self.get_object(), self._policy(), self.key)
        response = Response(
            self.get_serializer(
                {
                    "due_at": seen.due_at,
                    "seconds_left": seen.seconds_left,
                    "state": seen.state or None,
                    "now": seen.now,
                }
            ).data
        )
        tag = _tag(seen)
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


def _tag(seen: Countdown) -> str:
    """Changes when the answer does, but for the time that passes; a digest, as ids are nobody's business."""
    parts = f"{seen.timeout_id} {seen.state} {seen.due_at and to_ms(seen.due_at)}"
    return quote_etag(hashlib.blake2b(parts.encode(), digest_size=12).hexdigest())
