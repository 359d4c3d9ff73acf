"""One object for which `since` or `after` raises: the sync leaves it as it is, and continues with all others."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.sync import TableSync, sync_policy
from django_delayq.models import PolicySync, Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.snapshot import policy_statuses
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
OOPS = "oops"
COLUMNS: dict[str, Any] = {"name": "calls", "since": "created_at", "after": HOUR, "when": Q(status="calls")}


def raising(order: Order) -> None:
    if order.note == OOPS:
        raise ValueError(f"no number: {order.note}")


def since(order: Order) -> Any:
    raising(order)
    return order.created_at


def after(order: Order) -> timedelta:
    raising(order)
    return HOUR


KINDS: dict[str, dict[str, Any]] = {"since": {"since": since}, "after": {"after": after}}


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest, declare: Any) -> dq.TimeoutPolicy[Order]:
    """A policy with a callable that raises for some orders."""
    return declare(Order, **COLUMNS | KINDS[request.param])  # type: ignore[no-any-return]


of_one_kind = pytest.mark.parametrize("policy", ["since"], indirect=True)


def orders(*notes: str, **values: Any) -> list[Order]:
    """Insert orders without arming them."""
    common = {"status": "calls", "created_at": timezone.now(), **values}
    Order.objects.bulk_create([Order(note=note, **common) for note in notes])
    return list(Order.objects.filter(status="calls").order_by("pk"))


def pending() -> set[str]:
    return set(Timeout.objects.pending().values_list("object_id", flat=True))


def keys(*orders: Order) -> set[str]:
    return {str(order.pk) for order in orders}


def run(tables: TableSync | None = None) -> None:
    """Let the workers sync all tables."""
    (tables or TableSync("default")).run(at_once=True)


def due_again(label: str) -> None:
    """Let the next call of `TableSync` begin another pass."""
    row = PolicySync.objects.get(policy=label)
    assert not row.is_running, "the pass is complete"
    for name in ("before_at", "began_at", "finished_at"):
        at = getattr(row, name)
        setattr(row, name, None if at is None else at - 2 * MINUTE)
    row.claimed_until = None
    row.save()


def test_the_sync_of_the_workers_arms_cancels_moves_and_finds_the_deleted_among_the_others(
    policy: dq.TimeoutPolicy[Any],
) -> None:
    paid, moved, gone, bad, bad_and_paid = orders("", "", "", "", "")
    dq.sync_timeouts(Order.objects.filter(status="calls"))
    later = timezone.now() + 5 * MINUTE
    Order.objects.filter(pk=paid.pk).update(status="paid")
    Order.objects.filter(pk=moved.pk).update(created_at=later)
    Order.objects.filter(pk=gone.pk)._raw_delete("default")
    Order.objects.filter(pk=bad.pk).update(note=OOPS, created_at=later)
    Order.objects.filter(pk=bad_and_paid.pk).update(note=OOPS, status="paid")
    new = orders("", OOPS)[-2]
    run()
    assert pending() == keys(moved, bad, new)
    if isinstance(policy.since, str):
        assert Timeout.objects.pending().get(object_id=str(moved.pk)).due_at == later + HOUR


def test_without_a_place_for_failures_the_first_is_raised_after_the_sync(policy: dq.TimeoutPolicy[Any]) -> None:
    first, bad, last = orders("", OOPS, "")
    with pytest.raises(ValueError, match="no number"):
        sync_policy(policy, "default")
    assert pending() == keys(first, last)
    with pytest.raises(ValueError, match="no number"):
        bad.save()
    with pytest.raises(CommandError, match=f"the deadline of object {bad.pk} cannot be computed: ValueError"):
        call_command("delayq_sync")
    story = dq.explain_timeout(bad, policy)
    assert story.outlook == "Nothing is pending: its deadline cannot be computed. ValueError: no number: oops"


@of_one_kind
@pytest.mark.parametrize(("late", "is_armed"), [(DAY, True), (8 * DAY, False)])
def test_once_its_callable_works_it_is_armed_although_its_deadline_has_passed(
    policy: dq.TimeoutPolicy[Any], late: timedelta, is_armed: bool
) -> None:
    """Within `CATCH_UP`, seven days: later its round may have fired, and the row may be pruned."""
    (bad,) = orders(OOPS, created_at=timezone.now() - HOUR - late + MINUTE)
    now = timezone.now()
    run()
    # Workers have run all the time: the pass before the first failure was so long ago, the last one just now.
    PolicySync.objects.update(before_at=now - late, began_at=now - 2 * MINUTE, finished_at=now - MINUTE)
    Order.objects.filter(pk=bad.pk).update(note="")
    run()
    assert (str(bad.pk) in pending()) is is_armed


def test_the_failure_is_logged_once_with_the_key_and_its_end_too_and_shown(
    policy: dq.TimeoutPolicy[Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, bad, _ = orders("", OOPS, OOPS)
    tables = TableSync("default")

    def logged() -> list[Any]:
        run(tables)
        due_again(policy.label)
        records: list[Any] = [
            each for each in caplog.records if each.levelno >= logging.INFO and hasattr(each, "event")
        ]
        found = [(each.event, each.policy, getattr(each, "object_id", None)) for each in records]
        caplog.clear()
        return found

    def shown() -> tuple[int | None, list[str]]:
        (state,) = (each.sync for each in policy_statuses("default") if each.label == policy.label)
        found = [str(finding.msg) for finding in examine(quick=True) if finding.id == "sync"]
        return state.failed if state else None, [text for text in found if policy.label in text]

    with caplog.at_level(logging.INFO, logger="django_delayq"):
        assert logged() == [("sync_failed", policy.label, str(bad.pk))]
        failed, (text,) = shown()
        assert (failed, "2 objects" in text) == (2, True)
        assert logged() == []
        Order.objects.update(note="")
        assert logged() == [("sync_back", policy.label, None)]
        assert shown() == (0, [])
        assert logged() == []
        orders(OOPS)
        assert [event for event, *_ in logged()] == ["sync_failed"]


@pytest.mark.parametrize("error", [OperationalError("the statement was cancelled"), SystemExit(2)], ids=repr)
def test_a_database_error_is_not_a_failure_of_one_object_and_a_system_exit_is(
    declare: Any, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def after(order: Order) -> timedelta:
        if order.note == OOPS:
            raise error
        return HOUR

    policy, works = declare(Order, **COLUMNS | {"after": after}), declare(Order, **COLUMNS | {"name": "works"})
    first, _, last = orders("", OOPS, "")
    run()
    assert dq.pending_timeouts(policy=works.label).count() == 3, "another policy is synced"
    (record,) = (record for record in caplog.records if getattr(record, "event", "") == "sync_failed")
    is_of_one = isinstance(error, SystemExit)
    assert (getattr(record, "policy", ""), hasattr(record, "object_id")) == (policy.label, is_of_one)
    row = PolicySync.objects.get(policy=policy.label)
    assert (row.failed, row.finished_at is not None) == (int(is_of_one), is_of_one)
    assert not is_of_one or {row.object_id for row in dq.pending_timeouts(policy=policy.label)} == keys(first, last)


@pytest.mark.dialect
@pytest.mark.parametrize("kind", ["columns", "since", "after"])
@pytest.mark.skipif(connection.vendor == "mysql", reason="MariaDB stores no value that its driver cannot read")
def test_an_object_that_cannot_be_read_is_counted_and_the_others_are_armed(declare: Any, kind: str) -> None:
    """Its `since`, or another column that a function needs, has a value that the driver cannot read."""
    policy = declare(Order, **COLUMNS | KINDS.get(kind, {}))
    found = orders(*[""] * 20)
    bad = found[7]
    column = "created_at" if kind == "columns" else "paid_at"
    if kind == "columns":
        dq.sync_timeouts(bad)  # so that it is compared with its pending round

    def write(value: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"UPDATE {Order._meta.db_table} SET {column} = %s WHERE id = %s", [value, bad.pk])

    write("infinity" if connection.vendor == "postgresql" else "2026-13-45 00:00:00")
    run()
    assert pending() - keys(bad) == keys(*found) - keys(bad)
    assert PolicySync.objects.get(policy=policy.label).failed_total == 1
    examine()
    due_again(policy.label)
    write(timezone.now())
    run()
    assert pending() == keys(*found)
