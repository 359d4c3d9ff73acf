"""The REST API as a project mounts it, its schema, and a countdown with a permission of the project's own."""

from __future__ import annotations

from typing import Any

from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView
from rest_framework.permissions import BasePermission

from django_delayq.contrib.rest_framework import CountdownView


class NoteIsMine(BasePermission):
    """Owners are known by the header that names their note."""

    def has_object_permission(self, request: Any, view: Any, obj: Any) -> bool:
        return bool(request.headers.get("X-Note") == obj.note)


OPEN = CountdownView.as_view(policy="testapp.order.remind", permission_classes=[NoteIsMine])
CLOSED = CountdownView.as_view(policy="testapp.order.remind")

urlpatterns = [
    path("api/", include("django_delayq.contrib.rest_framework.urls")),
    path("schema/", SpectacularAPIView.as_view()),
    path("orders/<str:pk>/countdown/", OPEN, name="countdown"),
    path("closed/<str:pk>/countdown/", CLOSED, name="closed"),
]
