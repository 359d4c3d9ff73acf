"""An endpoint that hangs delays its own messages only."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq import clock
from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.models import Timeout
from django_delayq.testing import fire_due, travel
from tests.integration.webhooks.conftest import SECRET, EndpointServer
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker, needs_more_connections

DELIVER = "delayq_webhooks.delivery.deliver"


def messages(endpoint: str, count: int) -> list[Delivery]:
    options = {"event": "timeout.fired", "policy": "testapp.order.remind", "body": "{}", "created_at": clock.now()}
    return [Delivery.objects.create(endpoint=endpoint, **options) for _ in range(count)]


@needs_more_connections
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("redis_url")
def test_all_messages_to_others_are_delivered_while_an_endpoint_hangs(endpoint: EndpointServer, settings: Any) -> None:
    """It had all threads of the worker for a minute, and then again."""
    common = {"secret": SECRET, "events": ["fired"], "timeout": timedelta(seconds=60)}
    settings.DELAYQ_WEBHOOKS = {name: {"url": f"{endpoint.url}/{name}", **common} for name in ("hangs", "good")}
    for _ in range(10):
        messages("hangs", 2)
        messages("good", 2)
    running = RunningWorker(concurrency=4)
    try:
        good = Delivery.objects.filter(endpoint="good")
        wait_until(lambda: not good.filter(delivered_at=None).exists(), "the others are delivered", 45)
        assert 1 <= [each.path for each in endpoint.received].count("/hangs") <= 2
        assert not Delivery.objects.filter(endpoint="hangs").exclude(delivered_at=None).exists()
    finally:
        endpoint.ended.set()
        running.stop()


@pytest.mark.django_db
def test_after_two_time_outs_in_a_row_messages_wait_untried_until_it_answers(
    use: Callable[..., None], endpoint: EndpointServer, settings: Any
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "RETRY": dq.Retry([10] * 20)}
    use("/hangs", timeout=timedelta(seconds=1))
    messages("billing", 5)
    fire_due(DELIVER, raises=False)
    rows = Timeout.objects.filter(policy=DELIVER).order_by("pk")
    tried = [row.pk for row in rows if row.attempts]
    assert 2 <= len(tried) == len(endpoint.received) < 5  # more than two where a test takes seconds for a message
    assert {row.state for row in rows} == {"pending"}
    assert all("has not answered other messages" in str(row.history) for row in rows if row.pk not in tried)
    endpoint.ended.set()  # from now on it closes the connection at once

    def all_are_tried() -> bool:
        with travel(hours=len(endpoint.received)):
            fire_due(DELIVER, raises=False)
        return all(row.attempts for row in rows.all())

    wait_until(all_are_tried)
