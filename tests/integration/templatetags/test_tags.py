"""`{% deadline %}` and `{% countdown %}`: what they read, what they show, and at what cost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Prefetch
from django.template import Context, Template, TemplateSyntaxError
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation

import django_delayq as dq
from django_delayq import clock
from django_delayq.contrib.countdown import Countdown
from django_delayq.models import Timeout
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


def render(text: str, **context: Any) -> str:
    return Template("{% load delayq %}" + text).render(Context(context)).replace("\n", "")


@pytest.fixture
def order() -> Order:
    made = Order.objects.create(status="new")
    dq.schedule_timeout(made, "remind", minutes=5)
    return made


def test_a_deadline_is_read_in_one_query_and_of_what_was_prefetched_in_none(order: Order) -> None:
    for name, delay in (("remind", {"minutes": 9, "key": "k"}), ("linger", {"minutes": 1})):
        dq.schedule_timeout(order, name, **delay)
    (seen,) = Order.objects.prefetch_related("timeouts")
    row = order.timeouts.get(policy="testapp.order.remind", key="")
    text = '{% deadline order "remind" as due %}{{ due.state }} {{ due.is_due }} {{ due.timeout_id }}'
    for obj, count in ((order, 1), (seen, 0)):
        with CaptureQueriesContext(connection) as captured:
            assert render(f'{text} {{{{ due.due_at|date:"U" }}}}', order=obj) == (
                f"pending False {row.pk} {int(row.due_at.timestamp())}"
            )
        assert len(captured) == count
    linger: Any = Prefetch("timeouts", Timeout.objects.filter(policy="testapp.order.linger"))
    assert render(text, order=Order.objects.prefetch_related(linger).get()).startswith("pending"), "it was left out"
    keyed = '{% deadline order "remind" "k" as due %}{{ due.timeout_id }}'
    assert render(keyed, order=order) == str(order.timeouts.get(key="k").pk)


def test_nothing_is_shown_of_what_is_not_there_or_not_pending_and_an_unknown_word_is_an_error(order: Order) -> None:
    assert render('{% deadline nobody "remind" as due %}[{% countdown due %}]') == "[]"
    assert render("[{% countdown nothing %}]", nothing=None) == "[]"
    with pytest.raises(dq.UnknownPolicy):
        render('{% deadline order "remnid" as due %}', order=order)
    with pytest.raises(TemplateSyntaxError, match='"reload"'):
        render('{% countdown order "remind" at_zero="reloda" %}', order=order)
    dq.cancel_timeout(order, "remind")
    assert render('[{% countdown order "remind" %}]', order=order) == "[]"


def test_the_element_says_in_words_and_in_numbers_until_when(order: Order, settings: Any) -> None:
    due_at, moment = order.timeouts.get().due_at, timezone.now() + timedelta(hours=3)
    with clock.set_to(moment):
        shown = render('{% countdown order "remind" label="Time left to <pay>" %}', order=order)
    assert f'data-due="{clock.to_ms(due_at)}"' in shown
    assert f'data-now="{clock.to_ms(moment)}"' in shown, "it counts from the clock that decides"
    assert f'datetime="{due_at.isoformat()}"' in shown
    assert 'role="timer" aria-label="Time left to &lt;pay&gt;"' in shown
    local = timezone.localtime(due_at)
    assert f"until {local:%b}" in shown and f"{local:%Z}" in shown
    assert 'data-left="{time} left" data-done="time is up"' in shown and "data-announce" in shown
    assert not {"style=", "onclick", "<script"} & set(shown.split())
    settings.USE_THOUSAND_SEPARATOR = True
    with translation.override("de"):
        shown = render('{% countdown order "remind" %}', order=order)
    assert f'data-due="{clock.to_ms(due_at)}"' in shown and 'lang="de"' in shown, "numbers for scripts stay plain"


def test_a_moment_or_a_read_deadline_is_shown_without_a_query(order: Order) -> None:
    annotated = Order.objects.annotate(until=dq.Deadline("remind")).get(pk=order.pk)
    read = Countdown(timezone.now() + timedelta(minutes=1), "pending", timezone.now())
    with CaptureQueriesContext(connection) as captured:
        first = render("{% countdown order.until announce=False %}", order=annotated)
        second = render('{% countdown read done="too late" at_zero="reload" sync="/at?a=1&b=2" %}', read=read)
    assert "delayq-countdown" in first and "data-announce" not in first
    assert 'data-done="too late" data-at-zero="reload" data-sync="/at?a=1&amp;b=2"' in second
    assert len(captured) == 0
