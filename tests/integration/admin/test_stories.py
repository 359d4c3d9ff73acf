"""The page of a timeout: what its story has about attempts, and where its tracebacks begin."""

from __future__ import annotations

import re
import traceback
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from django.utils.html import strip_tags

import django_delayq as dq
from django_delayq.admin import render
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.integration.admin.conftest import DETAIL
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


def pay(order: Order) -> None:
    raise ConnectionError(f"no answer for {order.pk}")


@pytest.fixture
def failing(declare: Any) -> Timeout:
    """Fail the first attempt of a timeout."""

    def handler(order: Order, timeout: Timeout) -> None:
        pay(order)

    policy = declare(Order, name="pay", handler=handler, retry=dq.Retry([300]))
    row = dq.schedule_timeout(Order.objects.create(), "pay", minutes=1)
    Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now(), due_at=timezone.now())
    with pytest.raises(ConnectionError):
        fire_due(policy)
    found: Timeout = Timeout.objects.get(pk=row.pk)
    return found


def test_a_traceback_begins_with_the_frames_of_the_project_and_ends_with_its_last_line(failing: Timeout) -> None:
    (error,) = failing.errors
    assert "/django_delayq/" in error["traceback"]
    first, *_others, last = render.trace(error).splitlines()
    frames = re.findall(r'File "([^"]*)", line \d+, in (\w+)', render.trace(error))
    assert (
        first == "Traceback (most recent call last):" and last == f"ConnectionError: no answer for {failing.object_id}"
    )
    assert [name for _file, name in frames] == ["handler", "pay"]
    assert all(file == __file__ for file, _name in frames)


def chained() -> str:
    try:
        try:
            __import__("json").loads("{")
        except ValueError as error:
            raise LookupError("not found") from error
    except LookupError as error:
        return "".join(traceback.format_exception(error))
    return ""


@pytest.mark.parametrize("text", ["", "ValueError: no frames", 'half a frame"\n  File "/usr/lib/x.py", line 1\nE: x'])
def test_a_traceback_without_a_frame_of_the_project_is_shown_as_it_is(text: str) -> None:
    assert render.trace({"traceback": text}) == text


def test_the_causes_of_an_exception_are_kept() -> None:
    shown = render.trace({"traceback": chained()})
    assert "json" in shown and "direct cause" in shown and shown.endswith("LookupError: not found\n")


def test_a_failed_attempt_names_the_next_one(admin_client: Client, failing: Timeout) -> None:
    page = " ".join(strip_tags(admin_client.get(reverse(DETAIL, args=[failing.pk])).content.decode()).split())
    assert re.search(r"failed, next attempt \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, ConnectionError: no answer", page), page
    assert re.search(r"failed, next attempt \d{4}-", str(dq.explain_timeout(failing)))
    assert re.search(r"scheduled, to \d{4}-", str(dq.explain_timeout(failing)))


def test_a_round_that_its_condition_ended_shows_the_values_of_now_to_who_may_view_the_object(
    admin_client: Client, viewer: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    order.status = "paid by phone"
    order.save()
    row = Timeout.objects.get(policy="testapp.order.cancel_unpaid")
    assert (row.state, row.cause) == ("cancelled", "condition")
    address = reverse(DETAIL, args=[row.pk])
    shown = "The object has now: <code>status = &quot;paid by phone&quot;</code>"
    assert shown in admin_client.get(address).content.decode()
    assert "paid by phone" not in viewer.get(address).content.decode()
    call_command("delayq_explain", "testapp.order", str(order.pk), policy="cancel_unpaid")
    assert 'The object has now: status = "paid by phone"' in capsys.readouterr().out
    Order.objects.filter(pk=order.pk).delete()
    assert "The object has now" not in admin_client.get(address).content.decode()
