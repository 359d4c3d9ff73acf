"""URLs: the shop at the root, the Django admin at /admin/, the REST API at /api/delayq/."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/delayq/", include("django_delayq.contrib.rest_framework.urls")),
    path("", include("shop.urls")),
]
