"""A worker is killed at each step: every outcome has one message, and no message is about what did not happen."""

from __future__ import annotations

import json
import signal

import pytest

from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.models import Timeout
from tests.integration.webhooks.conftest import SECRET, EndpointServer, endpoint
from tests.support.processes import StartWorker, due_now
from tests.support.waiting import wait_until

__all__ = ["endpoint"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
]


def _is_all_sent() -> bool:
    return len(Delivery.objects.filter(delivered_at__isnull=False)) == 3


@pytest.mark.parametrize(
    ("policy", "step", "source"),
    [("remind", "committed", "redis"), ("remind", "handled", "ledger"), ("send_outside", "settled", "redis")],
)
def test_killed_at_any_step_each_outcome_is_reported_once(
    start_worker: StartWorker, endpoint: EndpointServer, policy: str, step: str, source: str
) -> None:
    options = {"billing": {"url": endpoint.url, "secret": SECRET, "events": ["fired"]}}
    variables = {"WEBHOOKS": json.dumps(options)} | ({"WITHOUT_REDIS": "1"} if source == "ledger" else {})
    rows = due_now(policy, 3)
    doomed = start_worker(KILL_AT=step, **variables)
    assert doomed.wait(30) == -signal.SIGKILL
    start_worker(**variables)
    wait_until(_is_all_sent, "all messages are sent")
    fired = Timeout.objects.filter(pk__in=[row.pk for row in rows], state="fired")
    assert fired.count() == Delivery.objects.count() == 3
    by_id = {each.headers["webhook-id"]: each.body["data"]["id"] for each in endpoint.received}
    assert sorted(by_id.values()) == sorted(row.pk for row in rows)
