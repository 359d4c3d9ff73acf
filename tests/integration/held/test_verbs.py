"""What operators and bulk verbs do to timeouts whose clock is stopped."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import Timeout
from django_delayq.operations import Refusal
from tests.integration.held.times import HOUR, T0, Declare, again, at, hours
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
BY = "admin:alice"


@pytest.fixture
def policy(declare: Declare) -> dq.TimeoutPolicy[Any]:
    return declare(Order, name="by_hand", max_extensions=1)


@pytest.fixture
def rows(policy: Any) -> list[Timeout]:
    """Three timeouts that are due at 4; the first two were held at 1."""
    with at(0):
        rows = [dq.schedule_timeout(Order.objects.create(), policy, hours=4) for _ in range(3)]
    with at(1):
        held = operations.hold_timeout(
            Timeout.objects.filter(pk__in=[row.pk for row in rows[:2]]), by=BY, reason="talks"
        )
    assert held.changed == 2
    return [again(row) for row in rows]


def test_operators_stop_clocks_and_let_them_run(rows: list[Timeout]) -> None:
    assert [row.state for row in rows] == ["held", "held", "pending"]
    assert rows[0].history[-1] == {
        "at": "2030-01-01T13:00:00+00:00",
        "what": "held",
        "by": BY,
        "reason": "talks",
        "rest": 10800.0,
    }
    with at(9):
        result = operations.resume_timeout(Timeout.objects.all(), by=BY)
    assert (result.changed, dict(result.refused)) == (2, {Refusal.NOT_HELD: 1})
    assert [hours(again(row).due_at) for row in rows] == [12, 12, 4]


def test_firing_is_refused_and_the_rest_works(rows: list[Timeout]) -> None:
    with at(2):
        result = operations.fire_now(Timeout.objects.all(), by=BY)
        assert (result.changed, dict(result.refused)) == (1, {Refusal.HELD: 2})
    with at(20):
        assert operations.postpone(rows[0], by=BY, hours=2).changed == 1
        assert (again(rows[0]).remaining, hours(again(rows[0]).due_at), again(rows[0]).state) == (5 * HOUR, 6, "held")
        assert operations.postpone(rows[0], by=BY, at=T0 + 24 * HOUR).refused == {Refusal.NOT_LATER: 1}
        assert operations.postpone(rows[0], by=BY, at=T0 + 30 * HOUR).changed == 1
        assert again(rows[0]).remaining == 10 * HOUR
        assert operations.change_deadline(rows[0], by=BY, shift=-3 * HOUR).changed == 1
        assert again(rows[0]).remaining == 7 * HOUR
        assert operations.change_deadline(rows[0], by=BY, at=T0 + 21 * HOUR).changed == 1
        assert again(rows[0]).remaining == HOUR
        result = operations.change_deadline(rows[0], by=BY, at=T0)
        assert (result.changed, result.due_at_once, again(rows[0]).remaining) == (1, 0, timedelta(0))
        assert operations.cancel(rows[1], by=BY).changed == 1
    assert (again(rows[1]).state, again(rows[1]).remaining) == ("cancelled", 3 * HOUR)


def test_verbs_in_bulk(rows: list[Timeout], policy: Any) -> None:
    pending = dq.pending_timeouts(policy=policy)
    assert [row.state for row in pending] == ["pending", "held", "held"]
    with at(2):
        assert dq.extend_timeouts(pending, hours=1) == 3
        assert dq.extend_timeouts(pending, hours=1) == 0
        assert [again(row).remaining for row in rows] == [4 * HOUR, 4 * HOUR, None]
        assert dq.reschedule_timeouts(pending, hours=10) == 3
        assert [again(row).remaining for row in rows] == [10 * HOUR, 10 * HOUR, None]
    with at(3):
        dq.resume_timeout(rows[0])
    assert hours(again(rows[0]).run_at) == 13
    assert dq.cancel_timeouts(pending) == 3
    assert not pending.all().exists()


@pytest.mark.parametrize("pending", ["cancel", "keep"])
def test_adopting_knows_them(rows: list[Timeout], settings: Any, pending: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "mine"}
    keys = [row.idempotency_key for row in rows]
    operations.adopt(by=BY, pending=pending)
    if pending == "cancel":
        assert {again(row).state for row in rows} == {"cancelled"}
    else:
        assert [again(row).state for row in rows] == ["held", "held", "pending"]
        assert not set(keys) & {again(row).idempotency_key for row in rows}


def test_commands(rows: list[Timeout], policy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("delayq_resume_timeout", f"--id={rows[0].pk}", "--reason", "they agreed")
    assert again(rows[0]).state == "pending"
    call_command("delayq_hold_timeout", "--policy", policy.label, "--until", "2d")
    assert {again(row).state for row in rows} == {"held"}
    assert again(rows[2]).held_until is not None
    capsys.readouterr()


def test_a_single_one_sends_its_signal(rows: list[Timeout]) -> None:
    seen: list[str] = []

    def note(timeout: Timeout, **_: Any) -> None:
        seen.append(timeout.state)

    dq.timeout_held.connect(note)
    dq.timeout_resumed.connect(note)
    operations.resume_timeout(rows[0], by=BY)
    operations.hold_timeout(rows[0], by=BY)
    operations.resume_timeout(rows[2], by=BY)
    dq.timeout_held.disconnect(note)
    dq.timeout_resumed.disconnect(note)
    assert seen == ["pending", "held"]
