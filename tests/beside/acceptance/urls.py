"""The admin, and the REST API."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("delayq/", include("django_delayq.contrib.rest_framework.urls")),
]
