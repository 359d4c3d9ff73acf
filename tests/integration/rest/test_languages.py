"""What REST answers to a person is in the language that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.urls import reverse
from django.utils import timezone, translation
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
GERMAN = {"accept-language": "de"}


@pytest.fixture
def operator(client_with: Callable[..., APIClient], settings: Settings) -> Iterator[APIClient]:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    with translation.override(translation.get_language()):  # the middleware leaves its last visitor's behind
        yield client_with("view_timeout", "cancel_timeout", "postpone_timeout")


def test_a_refusal_says_why_in_the_users_language(operator: APIClient, schedule: Callable[..., Timeout]) -> None:
    row = schedule()
    order = row.content_object
    assert order is not None
    dq.cancel_timeout(order, "remind")
    answer: Any = operator.post(reverse("django_delayq:timeout-cancel", args=[row.pk]), headers=GERMAN)
    assert answer.status_code == 409
    assert answer.data["refusal"] == {"code": "settled", "detail": "schon abgeschlossen"}


@pytest.mark.parametrize("body", [{}, {"minutes": 5, "at": "later"}], ids=["neither", "both"])
def test_a_delay_of_neither_kind_or_of_both_is_refused_in_the_users_language(
    operator: APIClient, schedule: Callable[..., Timeout], body: dict[str, Any]
) -> None:
    row = schedule()
    sent = {**body, "at": (timezone.now() + timedelta(days=1)).isoformat()} if "at" in body else body
    answer: Any = operator.post(
        reverse("django_delayq:timeout-postpone", args=[row.pk]), sent, format="json", headers=GERMAN
    )
    assert answer.status_code == 400
    assert answer.data == {"delay": ["Um wie viel oder auf wann? Bitte eines von beiden angeben."]}
    assert Timeout.objects.get().due_at == row.due_at


def test_an_unknown_filter_is_refused_in_the_users_language(operator: APIClient) -> None:
    answer: Any = operator.get(reverse("django_delayq:timeout-list"), {"nonsense": "1"}, headers=GERMAN)
    assert answer.status_code == 400
    assert answer.data == {"nonsense": ["Einen solchen Filter gibt es nicht."]}
