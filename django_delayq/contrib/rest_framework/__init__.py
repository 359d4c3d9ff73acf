"""The ledger by REST, and deadlines in your own serializers. Needs `django-delayq[rest]`."""

from django_delayq.contrib.rest_framework.fields import DeadlineField
from django_delayq.contrib.rest_framework.services import CancelView, GuardView, ScheduleView
from django_delayq.contrib.rest_framework.views import (
    CountdownView,
    PolicyViewSet,
    RootView,
    StaffWithPermission,
    StatusView,
    TimeoutViewSet,
)

__all__ = [
    "CancelView",
    "CountdownView",
    "DeadlineField",
    "GuardView",
    "PolicyViewSet",
    "RootView",
    "ScheduleView",
    "StaffWithPermission",
    "StatusView",
    "TimeoutViewSet",
]
