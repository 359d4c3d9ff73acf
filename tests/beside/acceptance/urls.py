"""The admin, and the REST API if its extra is installed."""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls)]
if settings.EXTRAS:
    urlpatterns += [path("delayq/", include("django_delayq.contrib.rest_framework.urls"))]
