"""The admin and the REST API, as far as the process has them, with the project's own pages in both."""

from __future__ import annotations

from django.apps import apps
from django.contrib import admin
from django.urls import include, path

urlpatterns = []
if apps.is_installed("django.contrib.admin"):
    urlpatterns.append(path("admin/", admin.site.urls))
if apps.is_installed("rest_framework"):
    from rest_framework import routers, serializers, viewsets

    from tests.startup.stall.models import Booking

    class BookingSerializer(serializers.ModelSerializer[Booking]):
        class Meta:
            model = Booking
            fields = ["id", "status"]

    class BookingViewSet(viewsets.ModelViewSet[Booking]):
        queryset = Booking._default_manager.all()
        serializer_class = BookingSerializer

    router = routers.DefaultRouter()
    router.register("bookings", BookingViewSet)
    urlpatterns.append(path("api/", include(router.urls)))
    if apps.is_installed("django_delayq"):
        urlpatterns.append(path("api/", include("django_delayq.contrib.rest_framework.urls")))
