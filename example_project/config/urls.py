"""Addresses: the shop at the root, Django's admin at /admin/, the timeouts by REST at /api/delayq/."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/delayq/", include("django_delayq.contrib.rest_framework.urls")),
    path("", include("shop.urls")),
]
