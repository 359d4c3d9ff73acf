"""Log the visitor of the demo in. Never use this in your project."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from django.conf import settings
from django.contrib.auth import get_user_model, login

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.http import HttpRequest, HttpResponse


class LogVisitorIn:
    """Log the visitor of the first page in as the administrator, with DEBUG and on this machine only."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        is_here = settings.DEBUG and request.META["REMOTE_ADDR"] == "127.0.0.1"
        if is_here and request.path == "/" and not request.user.is_authenticated:
            login(request, get_user_model().objects.get(username=os.environ["DJANGO_SUPERUSER_USERNAME"]))
        return self.get_response(request)
