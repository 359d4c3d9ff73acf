"""What a worker may not fire costs it nothing: it sends the same statements and commands as with an empty ledger.

They are counted over as many passes as an idle worker makes in a minute; no test waits for them.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from math import inf
from typing import Any, cast

import pytest
import redis
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_delayq import clock, operations, schedule_timeouts
from django_delayq.ledger import controls
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.worker.background import Background
from django_delayq.worker.dispatch import Dispatch
from django_delayq.worker.sweep import Sweep
from tests.integration.worker.test_shares import REMIND, Threads, connected
from tests.support.workers import Declare, due_orders, queue_in_redis
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
Cost = tuple[Counter[str], Counter[str]]


@pytest.fixture(autouse=True)
def each_pass_is_a_second_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read in one pass is too old in the next one."""
    monkeypatch.setattr(controls, "CACHE_SECONDS", 0.0)


def orders(count: int) -> list[Order]:
    return Order.objects.bulk_create(Order(status="new") for _ in range(count))


class Idle:
    """A worker whose passes a test makes."""

    def __init__(self) -> None:
        self.executor = Threads()
        self.worker = connected(4)
        self.sent: Counter[str] = Counter()
        """How often each command was sent to Redis, which other tests may use, too."""
        if (engine := self.worker.redis.engine) is not None:
            send = engine.caller.send
            cast("Any", engine.caller).send = lambda calls: [
                self.sent.update(each.command for each in calls),
                send(calls),
            ][1]
        self.dispatch = Dispatch(self.worker, self.executor)
        self.background = Background(self.worker)
        if engine is not None:
            Sweep(engine, "default", self.worker.skew).run_once(everything=True)
        stop_cache.forget()
        self.background.follow()
        self.background._queues_at = inf  # it is due twice a minute, and a slow machine takes more than half of one

    def pass_after_a_second(self) -> list[str]:
        """Return the policies whose works wait to be run."""
        self.worker.sources.redis.check_now()
        self.worker.sources.ledger.check_now()
        self.worker._pass(self.dispatch)
        return list(self.executor.waiting)

    def cost_of_a_minute(self) -> Cost:
        """Return which statements and commands one minute takes, and check that nothing was begun in it."""
        self.pass_after_a_second()
        self.sent.clear()
        with CaptureQueriesContext(connection) as queries:
            for second in range(60):
                if second % 5 == 0:
                    self.background.follow()
                assert self.pass_after_a_second() == []
        statements = (re.sub(r"'.*?'|\d+", "", query["sql"], flags=re.DOTALL) for query in queries)
        return Counter(statement[:200] for statement in statements), self.sent.copy()


@pytest.mark.parametrize("why", ["paused", "not declared"])
def test_a_policy_that_may_not_fire_costs_as_much_as_an_empty_ledger(source: str, declare: Declare, why: str) -> None:
    empty = statements, sent = Idle().cost_of_a_minute()
    assert statements.total() < (20 if source == "redis" else 80)
    assert (sent.total() <= 61) if source == "redis" else not sent
    policy = declare(Order, name="waiting")
    schedule_timeouts(orders(2_000), policy, hours=1)
    Timeout.objects.update(run_at=clock.now() - timedelta(hours=1), created_at=clock.now() - timedelta(hours=2))
    if why == "paused":
        operations.pause(policy, by="script:test")
    else:
        registry.remove(policy)
    idle = Idle()
    assert idle.cost_of_a_minute() == empty
    due_orders("remind")
    assert idle.pass_after_a_second() == [REMIND], "it delays no other policy"
    idle.executor.run_next()
    if why == "paused":
        operations.resume(policy, by="script:test")
    else:
        registry.add(policy)
    assert idle.pass_after_a_second() == [policy.label]


def test_a_message_tells_an_idle_worker_that_a_policy_was_resumed(
    with_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_orders("remind")
    operations.pause(REMIND, by="script:test")
    idle = Idle()
    idle.pass_after_a_second()
    client: Any = with_redis
    with client.pubsub() as listener:
        listener.subscribe(queue_in_redis().keys.wake)
        assert listener.get_message(timeout=5)["type"] == "subscribe"
        with monkeypatch.context() as in_another_process:
            in_another_process.setattr(stop_cache, "forget", lambda: None)
            operations.resume(REMIND, by="script:test")
        assert listener.get_message(timeout=5)["type"] == "message"
    assert not idle.pass_after_a_second(), "without the message it would notice some seconds later"
    idle.worker.sources.check_now()
    idle.worker._pass(idle.dispatch)
    assert list(idle.executor.waiting) == [REMIND]
