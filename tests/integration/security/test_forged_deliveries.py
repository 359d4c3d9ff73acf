"""A writer to Redis can mark any timeout as a suspect, and deliver it to several workers at once.

That slows it down. It neither kills it, nor uses up attempts that never ran, nor fires it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from django_delayq import Retry
from django_delayq.firing import plan, run
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, state
from tests.support.typed import Declare
from tests.testapp.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)
FORGED = 15


@pytest.fixture(autouse=True)
def no_observer() -> Iterator[None]:
    yield
    set_checkpoint_hook(None)


def count(order: Order, timeout: Timeout) -> None:
    Effect.objects.create(what="counted", object_id=order.pk, timeout_id=timeout.pk)


def meanwhile(step: str, act: Callable[[], object]) -> None:
    """The first firing that gets to `step` waits there while `act` is done."""
    left = [act]

    def reached(name: str) -> None:
        if name == step and left:
            left.pop()()

    set_checkpoint_hook(reached)


def deliver(row: Timeout) -> None:
    works, _ = plan({row.pk: FORGED}, "default")
    for work in works:
        run(work, "default")


@pytest.mark.parametrize("retry", [Retry.never(), Retry([0])])
def test_two_workers_that_get_one_suspect_do_not_bury_it(declare: Declare, retry: Retry) -> None:
    row = due(Order.objects.create(), declare(Order, count, name="once", retry=retry))

    def deliver_thrice() -> None:
        for _ in range(3):
            deliver(row)

    meanwhile("noted", deliver_thrice)
    fire(row, deliveries=FORGED)
    assert state(row) == ("fired", "due")
    assert (row.attempts, Effect.objects.count()) == (1, 1)
