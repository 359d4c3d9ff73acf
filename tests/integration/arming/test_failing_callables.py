"""One object for which `since` or `after` raises: the sync leaves it as it is, and continues with all others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.changes import Failures
from django_delayq.arming.sync import Synced, TableSync, sync_policy
from django_delayq.models import PolicySync, Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.snapshot import policy_statuses
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
OOPS = "oops"


def raising(order: Order) -> None:
    if order.note == OOPS:
        raise ValueError(f"no number: {order.note}")


@pytest.fixture(params=["since", "after", "both"])
def policy(request: pytest.FixtureRequest, declare: Any) -> dq.TimeoutPolicy[Order]:
    """A policy with a callable that raises for some orders."""

    def since(order: Order) -> Any:
        raising(order)
        return order.created_at

    def after(order: Order) -> timedelta:
        raising(order)
        return HOUR

    return declare(  # type: ignore[no-any-return]
        Order,
        name="calls",
        since="created_at" if request.param == "after" else since,
        after=HOUR if request.param == "since" else after,
        when=Q(status="calls"),
    )


def orders(*notes: str, **values: Any) -> list[Order]:
    """Insert orders without arming them."""
    common = {"status": "calls", "created_at": timezone.now(), **values}
    Order.objects.bulk_create([Order(note=note, **common) for note in notes])
    return list(Order.objects.filter(status="calls").order_by("pk"))


def pending() -> set[str]:
    return set(Timeout.objects.pending().values_list("object_id", flat=True))


def due_again(label: str) -> None:
    """Let the next call of `TableSync` begin another pass."""
    row = PolicySync.objects.get(policy=label)
    assert not row.is_running, "the pass is complete"
    for name in ("before_at", "began_at", "finished_at"):
        at = getattr(row, name)
        setattr(row, name, None if at is None else at - 2 * MINUTE)
    row.claimed_until = None
    row.save()


def test_the_sync_of_the_workers_arms_the_others(policy: dq.TimeoutPolicy[Any]) -> None:
    first, bad, last = orders("", OOPS, "")
    TableSync("default").run(at_once=True)
    assert pending() == {str(first.pk), str(last.pk)}
    Order.objects.filter(pk=bad.pk).update(note="")
    due_again(policy.label)
    TableSync("default").run(at_once=True)
    assert str(bad.pk) in pending()


def test_the_sync_of_the_workers_cancels_moves_and_finds_the_deleted(policy: dq.TimeoutPolicy[Any]) -> None:
    paid, moved, gone, bad = orders("", "", "", "")
    dq.sync_timeouts(Order.objects.filter(status="calls"))
    later = timezone.now() + 5 * MINUTE
    Order.objects.filter(pk=paid.pk).update(status="paid")
    Order.objects.filter(pk=moved.pk).update(created_at=later)
    Order.objects.filter(pk=gone.pk)._raw_delete("default")
    Order.objects.filter(pk=bad.pk).update(note=OOPS, created_at=later)
    TableSync("default").run(at_once=True)
    assert pending() == {str(moved.pk), str(bad.pk)}
    if isinstance(policy.since, str):
        assert Timeout.objects.pending().get(object_id=str(moved.pk)).due_at == later + HOUR


def test_it_is_cancelled_too_if_its_condition_does_not_hold(policy: dq.TimeoutPolicy[Any]) -> None:
    (bad,) = orders("")
    dq.sync_timeouts(bad)
    Order.objects.filter(pk=bad.pk).update(note=OOPS, status="paid")
    TableSync("default").run(at_once=True)
    assert pending() == set()


def test_a_deadline_beyond_the_calendar_does_not_stop_a_policy_without_callables(declare: Any) -> None:
    policy = declare(Order, name="plain", since="created_at", after=1000 * DAY, when=Q(status="calls"))
    first, bad, last = orders("", "", "")
    Order.objects.filter(pk=bad.pk).update(created_at=timezone.now().replace(year=2107, day=1))
    failures = Failures(policy)
    assert sync_policy(policy, "default", failures) == Synced(armed=2)
    assert pending() == {str(first.pk), str(last.pk)}
    assert failures.count == 0, "there is no deadline that would be an error"


def test_without_a_place_for_failures_the_first_is_raised_after_the_sync(policy: dq.TimeoutPolicy[Any]) -> None:
    first, _, last = orders("", OOPS, "")
    with pytest.raises(ValueError, match="no number"):
        sync_policy(policy, "default")
    assert pending() == {str(first.pk), str(last.pk)}


@pytest.mark.parametrize(("late", "is_armed"), [(DAY, True), (8 * DAY, False)])
def test_once_its_callable_works_it_is_armed_although_its_deadline_has_passed(
    policy: dq.TimeoutPolicy[Any], late: timedelta, is_armed: bool
) -> None:
    """Within `CATCH_UP`, seven days: later its round may have fired, and the row may be pruned."""
    (bad,) = orders(OOPS, created_at=timezone.now() - HOUR - late + MINUTE)
    begin = timezone.now() - late
    TableSync("default").run(at_once=True)
    # Workers have run all the time: the pass before the first failure was so long ago, the last one just now.
    PolicySync.objects.update(
        before_at=begin, began_at=timezone.now() - 2 * MINUTE, finished_at=timezone.now() - MINUTE
    )
    Order.objects.filter(pk=bad.pk).update(note="")
    TableSync("default").run(at_once=True)
    assert (str(bad.pk) in pending()) is is_armed


def test_after_a_pass_without_failures_old_deadlines_are_left_alone_again(policy: dq.TimeoutPolicy[Any]) -> None:
    (bad,) = orders(OOPS)
    TableSync("default").run(at_once=True)
    PolicySync.objects.update(before_at=timezone.now() - DAY)
    Order.objects.filter(pk=bad.pk).update(note="")
    for _ in range(2):
        due_again(policy.label)
        TableSync("default").run(at_once=True)
    due_again(policy.label)
    old = orders("", created_at=timezone.now() - 3 * HOUR)[-1]
    TableSync("default").run(at_once=True)
    assert pending() == {str(bad.pk)} - {str(old.pk)}


def test_an_object_that_always_fails_does_not_make_later_deadlines_too_old(policy: dq.TimeoutPolicy[Any]) -> None:
    orders(OOPS)
    for _ in range(3):
        TableSync("default").run(at_once=True)
        due_again(policy.label)
    order = orders("", created_at=timezone.now() - HOUR - MINUTE)[-1]
    TableSync("default").run(at_once=True)
    assert pending() == {str(order.pk)}


def test_the_failure_is_logged_once_with_the_key_and_its_end_too(
    policy: dq.TimeoutPolicy[Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, bad, _ = orders("", OOPS, OOPS)
    tables = TableSync("default")

    def logged() -> list[Any]:
        tables.run(at_once=True)
        due_again(policy.label)
        found: list[Any] = [
            record for record in caplog.records if record.levelno >= logging.INFO and hasattr(record, "event")
        ]
        caplog.clear()
        return [(record.event, record.policy, getattr(record, "object_id", None)) for record in found]

    with caplog.at_level(logging.INFO, logger="django_delayq"):
        assert logged() == [("sync_failed", policy.label, str(bad.pk))]
        assert logged() == []
        Order.objects.update(note="")
        assert logged() == [("sync_back", policy.label, None)]
        assert logged() == []
        Order.objects.bulk_create([Order(note=OOPS, status="calls", created_at=timezone.now())])
        assert [event for event, *_ in logged()] == ["sync_failed"]


def test_the_message_in_the_log_and_of_the_command_is_scrubbed(
    policy: dq.TimeoutPolicy[Any], caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SCRUB": lambda text, timeout: text.replace(OOPS, "***")}
    orders(OOPS)
    with caplog.at_level(logging.INFO, logger="django_delayq"):
        TableSync("default").run(at_once=True)
    assert "no number: ***" in caplog.text
    assert OOPS not in caplog.text
    with pytest.raises(CommandError) as raised:
        call_command("delayq_sync")
    assert OOPS not in str(raised.value)


def test_status_and_doctor_show_how_many_objects_fail(policy: dq.TimeoutPolicy[Any]) -> None:
    def shown() -> tuple[int | None, list[str]]:
        TableSync("default").run(at_once=True)
        due_again(policy.label)
        (sync,) = (each.sync for each in policy_statuses("default") if each.label == policy.label)
        found = [finding for finding in examine(quick=True) if finding.id == "sync"]
        return sync.failed if sync else None, [str(finding.msg) for finding in found if policy.label in finding.msg]

    orders("", OOPS, OOPS)
    failed, (found,) = shown()
    assert (failed, "2 objects" in found) == (2, True)
    Order.objects.update(note="")
    assert shown() == (0, [])


def test_the_count_of_old_deadlines_leaves_out_what_fails(policy: dq.TimeoutPolicy[Any]) -> None:
    orders("", OOPS, "", created_at=timezone.now() - DAY)
    (text,) = [finding.msg for finding in examine() if policy.label in finding.msg and finding.id == "too_old"]
    assert "2 objects match" in text
    assert "The check failed" not in " ".join(finding.msg for finding in examine())


@pytest.mark.parametrize("options", [{}, {"dry_run": True}])
def test_the_command_does_the_rest_and_ends_with_an_error(
    policy: dq.TimeoutPolicy[Any], declare: Any, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    declare(Order, name="late_in_the_list", since="created_at", after=HOUR, when=Q(status="calls"))
    _, bad, _ = orders("", OOPS, "")
    with pytest.raises(CommandError) as raised:
        call_command("delayq_sync", **options)
    words = str(raised.value)
    assert f"{policy.label}: the deadline of object {bad.pk} cannot be computed: ValueError" in words
    out = capsys.readouterr().out
    assert f"{policy.label}: 2 armed, 0 moved, 0 cancelled, 1 failed" in out
    assert "late_in_the_list: 3 armed" in out
    assert raised.value.returncode == 1


def test_a_database_error_is_not_a_failure_of_one_object(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    from django.db import OperationalError

    def after(order: Order) -> timedelta:
        raise OperationalError("the statement was cancelled")

    policy = declare(Order, name="calls", since="created_at", after=after, when=Q(status="calls"))
    orders("")
    TableSync("default").run(at_once=True)
    (record,) = (record for record in caplog.records if getattr(record, "event", "") == "sync_failed")
    assert (getattr(record, "policy", ""), hasattr(record, "object_id")) == (policy.label, False)
    row = PolicySync.objects.get(policy=policy.label)
    assert (row.failed, row.finished_at) == (0, None)


def test_an_object_for_which_a_function_raises_system_exit_is_counted(declare: Any) -> None:
    def after(order: Order) -> timedelta:
        if order.note == OOPS:
            raise SystemExit(2)
        return HOUR

    policy = declare(Order, name="calls", since="created_at", after=after, when=Q(status="calls"))
    first, _, last = orders("", OOPS, "")
    TableSync("default").run(at_once=True)
    assert pending() == {str(first.pk), str(last.pk)}
    assert PolicySync.objects.get(policy=policy.label).failed_total == 1


@pytest.mark.dialect
@pytest.mark.parametrize("kind", ["columns", "since", "after"])
@pytest.mark.skipif(connection.vendor == "mysql", reason="MariaDB stores no value that its driver cannot read")
def test_an_object_that_cannot_be_read_is_counted_and_the_others_are_armed(declare: Any, kind: str) -> None:
    """Its `since`, or another column that a function needs, has a value that the driver cannot read."""
    since: Any = (lambda order: order.created_at) if kind == "since" else "created_at"
    after: Any = (lambda order: HOUR) if kind == "after" else HOUR
    policy = declare(Order, name="calls", since=since, after=after, when=Q(status="calls"))
    found = orders(*[""] * 20)
    bad = found[7]
    column = "created_at" if kind == "columns" else "paid_at"
    value = "infinity" if connection.vendor == "postgresql" else "2026-13-45 00:00:00"
    if kind == "columns":
        dq.sync_timeouts(bad)  # so that it is compared with its pending round
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {Order._meta.db_table} SET {column} = %s WHERE id = %s", [value, bad.pk])
    others = {str(order.pk) for order in found if order != bad}
    TableSync("default").run(at_once=True)
    assert pending() - {str(bad.pk)} == others
    assert PolicySync.objects.get(policy=policy.label).failed_total == 1
    examine()
    due_again(policy.label)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {Order._meta.db_table} SET {column} = %s WHERE id = %s", [timezone.now(), bad.pk])
    TableSync("default").run(at_once=True)
    assert pending() == {*others, str(bad.pk)}


def test_while_the_sync_of_one_policy_fails_the_others_are_synced_and_it_is_said_once(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from django_delayq.arming import sync

    failing = declare(Order, name="fails", since="created_at", after=HOUR, when=Q(status="calls"))
    works = declare(Order, name="works", since="created_at", after=HOUR, when=Q(status="calls"))
    orders("")
    tables, repair = TableSync("default"), sync.repair

    def repair_others(step: Any, policy: Any, how: Any) -> Any:
        if policy is failing:
            connection.cursor().execute("SELECT 1 FROM nowhere")
        return repair(step, policy, how)

    def logged() -> list[str]:
        tables._failed.clear()  # its backoff is over
        tables.run(at_once=True)
        found = [record.event for record in caplog.records if hasattr(record, "event") and record.levelno > 10]
        caplog.clear()
        return found

    caplog.set_level(logging.INFO, logger="django_delayq")
    with monkeypatch.context() as patch:
        patch.setattr(sync, "repair", repair_others)
        assert [logged(), logged()] == [["sync_failed"], []]
        assert Timeout.objects.pending().filter(policy=works.label).count() == 1
    assert [logged(), logged()] == [["sync_back"], []]
    assert Timeout.objects.pending().filter(policy=failing.label).count() == 1


def test_saving_raises_what_a_callable_raises(policy: dq.TimeoutPolicy[Any]) -> None:
    save: Callable[[], Any] = lambda: Order.objects.create(status="calls", note=OOPS, created_at=timezone.now())  # noqa: E731
    with pytest.raises(ValueError, match="no number"):
        save()


def test_the_story_of_an_object_says_that_its_callable_raises(policy: dq.TimeoutPolicy[Any]) -> None:
    (bad,) = orders(OOPS)
    story = dq.explain_timeout(bad, policy)
    assert story.outlook == "Nothing is pending: its deadline cannot be computed. ValueError: no number: oops"


@pytest.mark.dialect
@pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL, which returns what its column has")
def test_a_column_without_time_zone_is_named_as_the_reason() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_order ALTER COLUMN created_at TYPE timestamp")
    try:
        with pytest.raises(dq.InvalidDelay, match="since of testapp.order.cancel_unpaid is a naive datetime"):
            Order.objects.create(created_at=timezone.now())
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE testapp_order ALTER COLUMN created_at TYPE timestamptz")
