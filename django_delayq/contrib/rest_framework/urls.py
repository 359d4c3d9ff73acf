"""`path("api/delayq/", include("django_delayq.contrib.rest_framework.urls"))`."""

from django.urls import path
from rest_framework.routers import SimpleRouter

from django_delayq.contrib.rest_framework.services import CancelView, GuardView, ScheduleView
from django_delayq.contrib.rest_framework.views import PolicyViewSet, RootView, StatusView, TimeoutViewSet

app_name = "django_delayq"

router = SimpleRouter()
router.register("timeouts", TimeoutViewSet, basename="timeout")
router.register("policies", PolicyViewSet, basename="policy")

urlpatterns = [
    path("", RootView.as_view(), name="root"),
    *router.urls,
    path("status/", StatusView.as_view(), name="status"),
    path("overview/", StatusView.as_view(), name="overview"),
    path("schedule/", ScheduleView.as_view(), name="schedule"),
    path("cancel/", CancelView.as_view(), name="cancel"),
    path("guard/", GuardView.as_view(), name="guard"),
]
