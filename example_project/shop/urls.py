"""The URLs of the shop."""

from __future__ import annotations

from django.urls import path

from shop import api
from shop.views import actions, pages

app_name = "shop"
urlpatterns = [
    path("", pages.index, name="index"),
    path("plays/<str:name>/", actions.play, name="play"),
    path("sms/repair/", actions.repair_sms, name="repair-sms"),
    path("orders/<str:reference>/", pages.order, name="order"),
    path("orders/<str:reference>/time-to-pay/", api.time_to_pay, name="time-to-pay"),
    path("orders/<str:reference>/review/", actions.review, name="review"),
    path("orders/<str:reference>/<str:step>/", actions.take_step, name="step"),
    path("customers/<str:reference>/", pages.customer, name="customer"),
    path("customers/<str:reference>/convert/", actions.convert, name="convert"),
]
