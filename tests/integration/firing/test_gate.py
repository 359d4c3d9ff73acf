"""A suspect runs alone in its process: others wait for it, and it for them, both for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_delayq import TimeoutPolicy
from django_delayq.firing import plan, run, state
from django_delayq.firing.state import Gate, firing_state
from tests.integration.firing.conftest import WAIT, due, fire
from tests.testapp.models import Order

Declare = Callable[..., TimeoutPolicy[Any]]


def entering(gate: Gate, *, alone: bool, inside: Callable[[], object]) -> threading.Thread:
    def enter() -> None:
        with gate.entered(alone=alone) as is_open:
            if is_open:
                inside()

    thread = threading.Thread(target=enter)
    thread.start()
    return thread


def test_a_suspect_waits_for_the_others_and_those_behind_it_wait_for_the_suspect() -> None:
    gate, leave, order, first_is_inside = Gate(), threading.Event(), list[str](), threading.Event()

    def stay() -> None:
        first_is_inside.set()
        assert leave.wait(WAIT)
        order.append("first")

    first = entering(gate, alone=False, inside=stay)
    assert first_is_inside.wait(WAIT)
    suspect = entering(gate, alone=True, inside=lambda: order.append("suspect"))
    while gate._turn.acquire(blocking=False):
        gate._turn.release()
    behind = entering(gate, alone=False, inside=lambda: order.append("behind"))
    assert order == []
    leave.set()
    for thread in (first, suspect, behind):
        thread.join(WAIT)
    assert order == ["first", "suspect", "behind"]


def test_others_are_inside_together() -> None:
    gate, both = Gate(), threading.Barrier(2, timeout=WAIT)
    threads = [entering(gate, alone=False, inside=both.wait) for _ in range(2)]
    for thread in threads:
        thread.join(WAIT)
    assert not both.broken


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("held_alone", "deliveries"), [(True, 1), (True, 2), (False, 2)])
def test_what_does_not_get_in_is_released_and_not_counted(
    order: Order, monkeypatch: pytest.MonkeyPatch, held_alone: bool, deliveries: int
) -> None:
    monkeypatch.setattr(state, "LOCKED_MAX_SECONDS", 0.01)
    row = due(order)
    [work], _ = plan({row.pk: deliveries}, "default")
    with firing_state.gate.entered(alone=held_alone):
        report = run(work, "default")
    assert report.untried == (row.pk,)
    row.refresh_from_db()
    assert (row.state, row.attempts, row.suspected_at) == ("pending", 0, None)
    assert fire(row, deliveries=deliveries).fired == (row.pk,)


@pytest.mark.django_db(transaction=True)
def test_a_suspect_may_fire_others(orders: list[Order], declare: Declare) -> None:
    inner = due(orders[0], declare(Order, lambda *_: None, name="inner", atomic=False))
    found: list[int] = []

    def handler(*_: Any) -> None:
        found.extend(fire(inner, deliveries=2).fired)

    outer = due(orders[1], declare(Order, handler, name="outer", atomic=False))
    assert fire(outer, deliveries=2).fired == (outer.pk,)
    assert found == [inner.pk]
