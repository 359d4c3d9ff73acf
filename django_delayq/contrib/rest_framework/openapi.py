"""OpenAPI descriptions of views, requests and fields, for projects with drf-spectacular; elsewhere without effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from django.apps import apps
from rest_framework.settings import api_settings

from django_delayq.contrib.rest_framework import outputs

F = TypeVar("F", bound=Callable[..., Any])
# The package may be installed without being used in this project.
_IS_INSTALLED = apps.is_installed("drf_spectacular")

if _IS_INSTALLED:
    from drf_spectacular.extensions import OpenApiSerializerExtension, OpenApiSerializerFieldExtension
    from drf_spectacular.openapi import AutoSchema
    from drf_spectacular.types import OpenApiTypes
    from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, PolymorphicProxySerializer, extend_schema

    class RequestExtension(OpenApiSerializerExtension):  # type: ignore[no-untyped-call] # of drf-spectacular
        """The requests of actions have no other fields than the described ones."""

        target_class = "django_delayq.contrib.rest_framework.inputs.StrictSerializer"
        match_subclasses = True

        def map_serializer(self, auto_schema: Any, direction: Any) -> Any:
            schema = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
            return {**schema, "additionalProperties": False}

    class DeadlineExtension(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call] # of drf-spectacular
        """The object that a `DeadlineField` shows."""

        target_class = "django_delayq.contrib.rest_framework.fields.DeadlineField"
        match_subclasses = True

        def map_serializer_field(self, auto_schema: Any, direction: Any) -> Any:
            at = {"type": "string", "format": "date-time"}
            return {
                "type": "object",
                "nullable": True,
                "readOnly": True,
                "required": ["due_at", "seconds_left", "server_time"],
                "properties": {"due_at": at, "seconds_left": {"type": "integer"}, "server_time": at},
            }


LABEL, ETAG, IDEMPOTENCY_KEY = "label", "If-None-Match", "Idempotency-Key"
_PARAMETERS: Final[dict[Any, tuple[Any, str]]] = {
    LABEL: ("path", "Like `shop.order.cancel_unpaid`."),
    ETAG: ("header", "The ETag of an earlier answer."),
    IDEMPOTENCY_KEY: ("header", "The same for each repetition of one request: it has its effect once."),
}
_CONFLICTS = {"timeouts": "Refused", "policies": "PolicyRefused"}
_STATUSES = {
    400: "What is wrong, by the name of the parameter.",
    401: "Authentication is required.",
    403: "The permission for this is missing.",
    404: "It does not exist.",
    415: "The body is neither JSON nor a form.",
    422: "The Idempotency-Key belongs to another request.",
    503: "Nothing is decided yet. Send the request again after `Retry-After` seconds.",
}


def describe(
    tag: str, result: Any, errors: Sequence[int] = (401, 403, 404), *, body: Any = None, parameters: Sequence[Any] = ()
) -> Callable[[F], F]:
    """Describe a method of a view.

    Args:
        tag: the group of its address.
        result: the serializer of status 200, and with a `body` of 409, which may also have only a `detail`.
        errors: the other statuses.
        body: the serializer of the request.
        parameters: a serializer of the query, or `LABEL`, `IDEMPOTENCY_KEY` or `ETAG`. With the last, it answers with
            304 if nothing has changed.
    """
    default: Any = api_settings.DEFAULT_SCHEMA_CLASS
    if not _IS_INSTALLED or not issubclass(default, AutoSchema):
        return lambda method: method
    statuses = sorted({*errors, *((400, 415) if body else ())})
    responses: dict[int, Any] = {each: OpenApiResponse(OpenApiTypes.OBJECT, _STATUSES[each]) for each in statuses}
    responses[200] = result
    if body:
        either = [result, outputs.TroubleSerializer]
        name = _CONFLICTS.get(tag) or f"{result.__name__.removesuffix('Serializer')}Refused"
        responses[409] = PolymorphicProxySerializer(name, either, resource_type_field_name=None)
    if ETAG in parameters:
        responses[304] = OpenApiResponse(description="Unchanged.")
    described = []
    for each in parameters:
        place, words = _PARAMETERS.get(each, ("", ""))
        described.append(OpenApiParameter(each, str, place, description=words) if place else each)
    return extend_schema(tags=[tag], request=body, responses=responses, parameters=described)
