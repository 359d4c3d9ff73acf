"""OpenAPI descriptions of views and fields, for projects that use drf-spectacular; elsewhere they have no effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from django.apps import apps
from rest_framework.settings import api_settings

F = TypeVar("F", bound=Callable[..., Any])
# The package may be installed without being used in this project.
_IS_INSTALLED = apps.is_installed("drf_spectacular")

if _IS_INSTALLED:
    from drf_spectacular.extensions import OpenApiSerializerExtension
    from drf_spectacular.openapi import AutoSchema
    from drf_spectacular.types import OpenApiTypes
    from drf_spectacular.utils import (
        OpenApiParameter,
        OpenApiResponse,
        PolymorphicProxySerializer,
        extend_schema,
        extend_schema_field,
    )

    class RequestExtension(OpenApiSerializerExtension):  # type: ignore[no-untyped-call] # of drf-spectacular
        """The requests of actions have no other fields than the described ones."""

        target_class = "django_delayq.contrib.rest_framework.serializers.ReasonSerializer"
        match_subclasses = True

        def map_serializer(self, auto_schema: Any, direction: Any) -> Any:
            schema = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
            return {**schema, "additionalProperties": False}


_ERRORS = {
    400: "What is wrong, by the name of the parameter.",
    401: "Authentication is required.",
    403: "The permission for this is missing.",
    404: "It does not exist.",
    415: "The body is neither JSON nor a form.",
}


def describe(
    tag: str,
    result: Any,
    errors: Sequence[int] = (401, 403, 404),
    *,
    body: Any = None,
    conflict: tuple[str, Any] | None = None,
    query: Any = None,
    path: tuple[str, str] | None = None,
    has_etag: bool = False,
) -> Callable[[F], F]:
    """Describe a method of a view.

    Args:
        tag: the group of its address.
        result: the serializer of status 200.
        errors: the other statuses.
        body: the serializer of the request.
        conflict: status 409, which has the result or only a `detail`: the name of this schema, and its serializer.
        query: the serializer of the query parameters.
        path: name and description of a path parameter.
        has_etag: it answers with 304 if nothing has changed.
    """
    default: Any = api_settings.DEFAULT_SCHEMA_CLASS
    if not _IS_INSTALLED or not issubclass(default, AutoSchema):
        return lambda method: method
    statuses = {*errors, *((400, 415) if body else ())}
    responses: dict[int, Any] = {
        status: OpenApiResponse(OpenApiTypes.OBJECT, _ERRORS[status]) for status in sorted(statuses)
    }
    responses[200] = result
    parameters = [query] if query else []
    if conflict:
        name, detail = conflict
        responses[409] = PolymorphicProxySerializer(name, [result, detail], resource_type_field_name=None)
    if path:
        parameters.append(OpenApiParameter(path[0], str, OpenApiParameter.PATH, description=path[1]))
    if has_etag:
        responses[304] = OpenApiResponse(description="Unchanged.")
        parameters.append(
            OpenApiParameter(
                "If-None-Match", str, OpenApiParameter.HEADER, description="The ETag of an earlier answer."
            )
        )
    return extend_schema(tags=[tag], request=body, responses=responses, parameters=parameters)


def describe_field(schema: Any) -> Callable[[F], F]:
    """Describe a serializer field, or the method that returns its value, by a serializer or an OpenAPI schema."""
    if not _IS_INSTALLED:
        return lambda field: field
    return extend_schema_field(schema)
