"""An error that is logged for a failed attempt is one event, in the scope of its handler."""

from __future__ import annotations

from typing import Any

import pytest
import sentry_sdk
from django.db import transaction

import django_delayq as dq
from django_delayq.firing.state import firing_state
from django_delayq.models import Timeout
from tests.integration.firing.conftest import MODES, due, fire, make_due, state
from tests.integration.firing.handlers import Declare, raising
from tests.integration.firing.limits import LIMITS, compute
from tests.testapp.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)
Events = list[dict[str, Any]]
NAME = "testapp.order.fails"


def tags_of(row: Timeout, attempt: int) -> dict[str, str]:
    named = {"delayq.policy": row.policy, "delayq.timeout": str(row.pk), "delayq.object": row.object_id}
    return {**named, "delayq.attempt": str(attempt)}


def fails(obj: Any, timeout: Any) -> None:
    sentry_sdk.add_breadcrumb(message="called the provider")
    raise LookupError("no such shop")


@pytest.mark.parametrize("mode", ["alone", "outside"])
def test_each_attempt_with_an_error_is_one_event(order: Order, declare: Declare, sentry: Events, mode: str) -> None:
    row = due(order, declare(Order, fails, name="fails", retry=dq.Retry([0, 0]), **MODES[mode]))
    fire(row)
    assert sentry == [], "the first failure is a warning"
    for attempt in (2, 3):
        make_due(row)
        firing_state.forget()  # so that it logs the traceback again
        fire(row)
        event = sentry[-1]
        assert len(sentry) == attempt - 1
        assert event["tags"] == tags_of(row, attempt)
        assert (event["transaction"], event["level"], event["logger"]) == (NAME, "error", "django_delayq.firing")
        [error] = event["exception"]["values"]
        assert (error["type"], error["value"]) == ("LookupError", "no such shop")
        assert "called the provider" in [each["message"] for each in event["breadcrumbs"]["values"]]
    assert state(row) == ("dead", "retries")


async def fails_later(obj: Any, timeout: Any) -> None:
    await Effect.objects.acreate(what="x", object_id=obj.pk)
    fails(obj, timeout)


def fails_in_a_callback(obj: Any, timeout: Any) -> None:
    transaction.on_commit(lambda: fails(obj, timeout))


def asks(obj: Any, timeout: Any) -> None:
    """Let its question fail."""


def takes_too_long(obj: Any, timeout: Any) -> None:
    sentry_sdk.add_breadcrumb(message="called the provider")
    compute()


@pytest.mark.parametrize("handler", [fails_later, fails_in_a_callback, asks, takes_too_long])
def test_wherever_it_fails_is_one_event(declare: Declare, sentry: Events, handler: Any) -> None:
    limits = LIMITS if handler is takes_too_long else None
    policy = declare(Order, handler, name="fails", retry=dq.Retry.never(), limits=limits)
    if handler is asks:
        policy.confirm()(fails)
    row = due(Order.objects.create(), policy)
    fire(row)
    [event] = sentry
    kind = "TimeLimitExceeded" if handler is takes_too_long else "LookupError"
    assert event["exception"]["values"][0]["type"] == kind
    assert (event["tags"], event["transaction"]) == (tags_of(row, 1), NAME)
    if handler is not fails_in_a_callback:
        assert "called the provider" in [each["message"] for each in event["breadcrumbs"]["values"]]


def test_nothing_of_a_scope_reaches_the_next_timeout(declare: Declare, sentry: Events) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        if obj.pk == first.pk:
            sentry_sdk.set_tag("provider", "one")
            sentry_sdk.add_breadcrumb(message="called the first provider")
        raise LookupError(f"{obj.pk}")

    first, second = Order.objects.create(), Order.objects.create()
    policy = declare(Order, handler, name="fails", retry=dq.Retry.never())
    rows = [due(first, policy), due(second, policy)]
    sentry_sdk.add_breadcrumb(message="of this thread")
    fire(*rows)
    assert "of this thread" not in str(sentry[0]["breadcrumbs"])
    assert sentry[0]["tags"]["provider"] == "one"
    assert sentry[1]["tags"] == tags_of(rows[1], 1)
    assert "first provider" not in str(sentry[1]["breadcrumbs"])
    sentry_sdk.capture_message("later")
    assert not sentry[2].get("tags")


def test_an_event_of_a_batch_names_the_policy_and_then_each_timeout(declare: Declare, sentry: Events) -> None:
    def handler(orders: Any, timeouts: list[Timeout]) -> None:
        sentry_sdk.capture_message(f"called with {len(timeouts)}")
        fails(orders, timeouts)

    policy = declare(Order, handler, name="fails", batch=10, retry=dq.Retry.never())
    rows = [due(Order.objects.create(), policy) for _ in range(2)]
    fire(*rows)
    of_batch, *others = sentry
    assert of_batch["tags"] == {"delayq.policy": NAME, "delayq.timeouts": "2"}
    of_failures = [event for event in others if event.get("exception")]
    assert [event["tags"] for event in of_failures] == [tags_of(row, 1) for row in rows]


def test_no_data_of_the_object_or_payload_is_in_an_event(declare: Declare, sentry: Events, settings: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": lambda text, timeout: text.replace("4000", "[card]")}
    policy = declare(Order, raising(LookupError("card 4000")), name="fails", retry=dq.Retry.never())
    fire(due(Order.objects.create(note="a secret note"), policy, payload={"iban": "DE00"}))
    [event] = sentry
    assert "card [card]" in str(event)
    assert not [each for each in ("secret note", "DE00", "4000") if each in str(event)]
