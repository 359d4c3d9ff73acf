"""Pages with a countdown, under the strictest policy that a site may have, and the endpoint that it asks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.template import RequestContext, Template
from django.urls import path
from django.views.static import serve
from rest_framework.permissions import AllowAny
from rest_framework.renderers import JSONRenderer

import django_delayq
from django_delayq.contrib.rest_framework import CountdownView
from tests.testapp.models import Order

STATIC = Path(django_delayq.__file__).parent / "static"
PAGE = """{% load delayq %}<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Order</title>
<link rel="icon" href="data:,"><script src="/assets/django_delayq/countdown.js" defer></script></head>
<body data-made="{{ made }}"><main>
{% countdown order "remind" label="Time left to pay" done="too late" at_zero=at_zero sync=sync %}
<noscript>no script</noscript></main></body></html>"""


def page(request: HttpRequest, pk: int) -> HttpResponse:
    context = {
        "order": Order.objects.get(pk=pk),
        "made": time.time_ns(),
        "at_zero": request.GET.get("at_zero", ""),
        "sync": f"/orders/{pk}/countdown/{request.GET['sync']}" if "sync" in request.GET else "",
    }
    answer = HttpResponse(Template(PAGE).render(RequestContext(request, context)))
    answer["Content-Security-Policy"] = "default-src 'none'; script-src 'self'; connect-src 'self'; img-src data:"
    answer["Cache-Control"] = "no-store"
    return answer


def assets(request: HttpRequest, name: str) -> Any:
    return serve(request, name, document_root=str(STATIC))


class CamelCase(JSONRenderer):
    """Renders names as djangorestframework-camel-case does."""

    def render(self, data: Any, *args: Any) -> Any:
        names = {"due_at": "dueAt", "seconds_left": "secondsLeft", "server_time": "serverTime"}
        return super().render({names.get(name, name): value for name, value in data.items()}, *args)


COUNTDOWN = CountdownView.as_view(policy="testapp.order.remind", permission_classes=[AllowAny])
IN_CAMEL_CASE = CountdownView.as_view(
    policy="testapp.order.remind", permission_classes=[AllowAny], renderer_classes=[CamelCase]
)
urlpatterns = [
    path("orders/<int:pk>/", page),
    path("orders/<int:pk>/countdown/", COUNTDOWN),
    path("orders/<int:pk>/countdown/camel/", IN_CAMEL_CASE),
    path("assets/<path:name>", assets),
]
