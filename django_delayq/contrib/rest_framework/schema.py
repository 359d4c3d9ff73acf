"""What drf-spectacular cannot guess of these views and fields. Imported only where it is installed."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiSerializerFieldExtension, OpenApiViewExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import (
    OpenApiParameter,
    OpenApiResponse,
    PolymorphicProxySerializer,
    extend_schema,
    extend_schema_field,
    extend_schema_view,
)

from django_delayq.contrib.rest_framework import acting
from django_delayq.contrib.rest_framework.reporting import StatusSerializer
from django_delayq.contrib.rest_framework.selecting import Selection
from django_delayq.contrib.rest_framework.serializers import (
    CountdownSerializer,
    PolicySerializer,
    StorySerializer,
    TimeoutDetailSerializer,
    TimeoutSerializer,
)

HERE = "django_delayq.contrib.rest_framework"
TAGS = ["timeouts"]
MOMENT = {"type": "string", "format": "date-time"}

BAD_INPUT = OpenApiResponse(OpenApiTypes.OBJECT, "What is wrong, by the name of the parameter.")
REFUSED = {
    401: OpenApiResponse(OpenApiTypes.OBJECT, "Who are you?"),
    403: OpenApiResponse(OpenApiTypes.OBJECT, "The permission for this is missing."),
}
MISSING = {404: OpenApiResponse(OpenApiTypes.OBJECT, "There is no such thing.")}
BAD_BODY = {
    400: BAD_INPUT,
    415: OpenApiResponse(OpenApiTypes.OBJECT, "The body is neither JSON nor a form."),
}
ACTED_OR_TROUBLE = PolymorphicProxySerializer(
    "Refused", [acting.ActedSerializer, acting.TroubleSerializer], resource_type_field_name=None
)
POLICY_OR_TROUBLE = PolymorphicProxySerializer(
    "PolicyRefused", [acting.PolicyActedSerializer, acting.TroubleSerializer], resource_type_field_name=None
)
LABEL = OpenApiParameter("label", str, OpenApiParameter.PATH, description="Like `shop.order.cancel_unpaid`.")

extend_schema_field(StorySerializer)(TimeoutDetailSerializer.get_story)


class DescribedDeadline(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]
    """`DeadlineField` in anybody's serializer."""

    target_class = f"{HERE}.fields.DeadlineField"
    match_subclasses = True

    def map_serializer_field(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        return {
            "type": "object",
            "nullable": True,
            "readOnly": True,
            "required": ["due_at", "seconds_left", "server_time"],
            "properties": {"due_at": MOMENT, "seconds_left": {"type": "number"}, "server_time": MOMENT},
        }


class DescribedTimeouts(OpenApiViewExtension):  # type: ignore[no-untyped-call]
    """The timeouts' addresses."""

    target_class = f"{HERE}.views.TimeoutViewSet"
    match_subclasses = True

    def view_replacement(self) -> Any:
        """The same class, described."""

        @extend_schema(tags=TAGS)
        @extend_schema_view(
            list=extend_schema(
                parameters=[Selection], responses={200: TimeoutSerializer(many=True), 400: BAD_INPUT, **REFUSED}
            ),
            retrieve=extend_schema(responses={200: TimeoutDetailSerializer, **REFUSED, **MISSING}),
            **{
                verb: extend_schema(
                    request=acting.PostponeSerializer if verb == "postpone" else acting.VerbSerializer,
                    responses={200: acting.ActedSerializer, 409: ACTED_OR_TROUBLE, **BAD_BODY, **REFUSED, **MISSING},
                )
                for verb in self.target.verbs
            },
        )
        class Described(self.target):  # type: ignore[misc, name-defined]
            """The ledger."""

        return Described


class DescribedPolicies(OpenApiViewExtension):  # type: ignore[no-untyped-call]
    """The policies' addresses."""

    target_class = f"{HERE}.views.PolicyViewSet"
    match_subclasses = True

    def view_replacement(self) -> Any:
        """The same class, described."""

        @extend_schema(tags=["policies"])
        @extend_schema_view(
            list=extend_schema(responses={200: PolicySerializer(many=True), **REFUSED}),
            retrieve=extend_schema(parameters=[LABEL], responses={200: PolicySerializer, **REFUSED, **MISSING}),
            **{
                verb: extend_schema(
                    parameters=[LABEL],
                    request=body,
                    responses={
                        200: acting.PolicyActedSerializer,
                        409: POLICY_OR_TROUBLE,
                        **BAD_BODY,
                        **REFUSED,
                        **MISSING,
                    },
                )
                for verb, body in (
                    ("pause", acting.PauseSerializer),
                    ("hold", acting.ReasonSerializer),
                    ("resume", acting.ResumeSerializer),
                )
            },
        )
        class Described(self.target):  # type: ignore[misc, name-defined]
            """The declared policies."""

        return Described


class DescribedStatus(OpenApiViewExtension):  # type: ignore[no-untyped-call]
    """How everything stands."""

    target_class = f"{HERE}.reporting.StatusView"
    match_subclasses = True

    def view_replacement(self) -> Any:
        """The same class, described."""

        @extend_schema(tags=["status"])
        @extend_schema_view(get=extend_schema(responses={200: StatusSerializer, **REFUSED}))
        class Described(self.target):  # type: ignore[misc, name-defined]
            """How everything stands."""

        return Described


class DescribedCountdown(OpenApiViewExtension):  # type: ignore[no-untyped-call]
    """A countdown, wherever the project has put it."""

    target_class = f"{HERE}.countdown.CountdownView"
    match_subclasses = True

    def view_replacement(self) -> Any:
        """The same class, described."""

        @extend_schema(tags=["countdown"])
        @extend_schema_view(
            get=extend_schema(
                parameters=[
                    OpenApiParameter("If-None-Match", str, OpenApiParameter.HEADER, description="The ETag before.")
                ],
                responses={
                    200: CountdownSerializer,
                    304: OpenApiResponse(description="Unchanged."),
                    **REFUSED,
                    **MISSING,
                },
            )
        )
        class Described(self.target):  # type: ignore[misc, name-defined]
            """How long is left."""

        return Described
