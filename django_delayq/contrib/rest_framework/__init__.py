"""The ledger over REST, and deadlines in serializers of your own. Needs `django-delayq[rest]`."""

from __future__ import annotations

from django.apps import apps

from django_delayq.contrib.rest_framework.countdown import CountdownView
from django_delayq.contrib.rest_framework.fields import DeadlineField
from django_delayq.contrib.rest_framework.permissions import StaffWithPermission
from django_delayq.contrib.rest_framework.reporting import StatusView
from django_delayq.contrib.rest_framework.views import PolicyViewSet, TimeoutViewSet

if apps.is_installed("drf_spectacular"):  # the package may be installed without being used in this project
    from django_delayq.contrib.rest_framework import schema as schema

__all__ = ["CountdownView", "DeadlineField", "PolicyViewSet", "StaffWithPermission", "StatusView", "TimeoutViewSet"]
