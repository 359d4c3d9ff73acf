"""Change the deadline: earlier and later, and the number that is due at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq import ExtensionLimit, Limits, explain_timeout, extend_timeout
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations import change_deadline, hold, postpone, resume
from django_delayq.operations.registry import TIMEOUT_OPERATIONS
from django_delayq.signals import timeout_rescheduled
from django_delayq.worker import Worker
from tests.integration.operations.conftest import BY, as_if, dead, pending, said
from tests.integration.operations.test_verbs import refused
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


def test_a_deadline_moves_earlier_and_later_by_a_duration_and_to_a_time(order: Order) -> None:
    row = pending(order, days=200)
    first = row.due_at
    assert change_deadline(row, by=BY, reason="typed 200 for 2", shift=-198 * DAY).due_at_once == 0
    row.refresh_from_db()
    assert row.due_at == row.run_at == first - 198 * DAY
    assert (row.extensions, row.first_due_at) == (0, first)
    assert change_deadline(row, by=BY, shift=HOUR).changed == 1
    at = timezone.now() + HOUR
    assert change_deadline(row, by=BY, at=at).changed == 1
    row.refresh_from_db()
    assert row.due_at == row.run_at == at
    assert said(row)[0] == ("deadline_changed", BY, "typed 200 for 2")
    assert "deadline changed, to" in str(explain_timeout(row))


@pytest.mark.parametrize("to", [{"shift": -2 * HOUR}, {"at": -DAY}])
def test_a_deadline_in_the_past_is_now_and_the_result_says_so(order: Order, to: dict[str, Any], source: str) -> None:
    row, later = pending(order, hours=1), pending(Order.objects.create(), hours=5)
    to = {"at": timezone.now() + to["at"]} if "at" in to else to
    rows = [row, later] if "shift" in to else [row]
    before = timezone.now()
    preview = change_deadline(rows, by=BY, dry_run=True, **to)
    assert (preview.changed, preview.due_at_once) == (len(rows), 1)
    row.refresh_from_db()
    assert row.due_at > before
    done = change_deadline(rows, by=BY, **to)
    assert (done.changed, done.due_at_once) == (len(rows), 1)
    row.refresh_from_db()
    assert before <= row.due_at == row.run_at <= timezone.now(), "so its lateness is not that of a day"
    Worker(burst=True).run()
    row.refresh_from_db()
    assert row.state == "fired"


def test_a_deadline_that_would_not_change_is_left_alone_as_is_what_is_not_pending(order: Order) -> None:
    row, other = pending(order), dead(Order.objects.create())
    assert refused(change_deadline([row, other], by=BY, at=row.due_at)) == {row.pk: "same_deadline", other.pk: "dead"}
    assert refused(change_deadline(row, by=BY, shift=200 * 365 * DAY)) == {row.pk: "too_far"}
    assert said(row) == []


def test_a_longer_retry_keeps_its_time(order: Order) -> None:
    retry_at = timezone.now() + 6 * HOUR
    row = as_if(pending(order), "pending", run_at=retry_at, attempts=1)
    assert change_deadline(row, by=BY, shift=-HOUR / 2).due_at_once == 0
    row.refresh_from_db()
    assert row.run_at == retry_at


def test_one_row_sends_its_signal_and_a_rollback_undoes_everything(order: Order) -> None:
    row, seen = pending(order), list[int]()

    def note(timeout: Timeout, **_: Any) -> None:
        seen.append(timeout.pk)

    timeout_rescheduled.connect(note)
    try:
        with transaction.atomic():
            change_deadline(row, by=BY, shift=-HOUR / 2)
            transaction.set_rollback(True)
        assert Timeout.objects.get().due_at == row.due_at
        assert seen == []
        change_deadline(row, by=BY, shift=-HOUR / 2)
        assert seen == [row.pk]
    finally:
        timeout_rescheduled.disconnect(note)


@pytest.mark.parametrize(("to", "by_the_hold"), [({"at": 5 * HOUR}, HOUR), ({"shift": HOUR}, 2 * HOUR)])
def test_a_hold_moves_a_changed_deadline_as_a_postponed_one(
    order: Order, to: dict[str, Any], by_the_hold: timedelta
) -> None:
    row, now = pending(order), timezone.now()
    Timeout.objects.update(created_at=now - 3 * HOUR)
    hold("testapp.order.remind", by=BY)
    to = {"at": now + to["at"]} if "at" in to else to
    change_deadline(row, by=BY, **to)
    Timeout.objects.filter(restarted_at__isnull=False).update(restarted_at=now - HOUR)
    PolicyControl.objects.update(stopped_at=now - 2 * HOUR)
    before = Timeout.objects.get().due_at
    resume("testapp.order.remind", by=BY)
    assert abs(Timeout.objects.get().due_at - before - by_the_hold) < timedelta(minutes=2)


def test_the_limits_of_the_application_do_not_bind_operators(order: Order, declare: Callable[..., Any]) -> None:
    policy = declare(Order, name="reserved", max_extensions=0, limits=Limits(total=HOUR))
    row = pending(order, "reserved")
    assert change_deadline(row, by=BY, shift=5 * HOUR).changed == postpone(row, by=BY, hours=1).changed == 1
    assert Timeout.objects.get().due_at == row.first_due_at + 6 * HOUR
    with pytest.raises(ExtensionLimit):
        extend_timeout(order, policy, minutes=1)


def test_it_needs_the_permission_to_postpone() -> None:
    assert TIMEOUT_OPERATIONS["reschedule"].permission == "postpone_timeout"
