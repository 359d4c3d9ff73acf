"""Cancel, fire now, postpone, retry: which rows change, which do not and why, and what is written down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import InvalidDelay, TimeoutPolicy, explain_timeout, signals
from django_delayq.firing import plan, run
from django_delayq.models import Timeout
from django_delayq.operations import Refusal, Result, cancel, fire_now, pause, postpone, retry
from django_delayq.testing import fire_due
from tests.integration.firing.conftest import another_session, in_another_thread
from tests.integration.operations.conftest import BY, as_if, dead, pending, said
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def fired(row: Timeout) -> bool:
    """Whether a worker that is handed `row` now fires it."""
    works, _ = plan({row.pk: 1}, "default")
    return any(run(work, "default").fired for work in works)


def contents() -> list[tuple[Any, ...]]:
    rows = Timeout.objects.order_by("pk")
    return list(rows.values_list("pk", "state", "due_at", "run_at", "history", "reason", "settled_at", "claims"))


def refused(result: Result) -> dict[int, str]:
    assert sum(result.refused.values()) == len(result.refusals) == result.unchanged
    return {row_id: str(why) for row_id, why in result.refusals}


def test_a_row_that_was_never_stored_is_refused() -> None:
    with pytest.raises(ValueError, match="not a row of the ledger"):
        cancel(Timeout(), by=BY)


def test_cancel_says_by_whom_and_why(order: Order) -> None:
    row = pending(order)
    result = cancel(row, by=BY, reason="the customer called")
    assert (result.verb, result.changed, result.ids, result.unchanged) == ("cancel", 1, (row.pk,), 0)
    assert said(row) == [("cancel_requested", BY, "the customer called")]
    assert (row.state, row.cause, row.reason) == ("cancelled", "hand", "the customer called")
    assert "by admin:alice (the customer called)" in str(explain_timeout(row))


def test_cancel_buries_the_dead_and_keeps_how_they_died(order: Order) -> None:
    row = dead(order)
    assert cancel(row, by=BY).changed == 1
    assert said(row) == [("dead", "", "RuntimeError: broken"), ("cancel_requested", BY, "")]
    assert (row.state, row.cause) == ("cancelled", "hand")


def test_what_is_firing_is_not_cancelled_but_gets_no_further_attempt(order: Order) -> None:
    row = as_if(pending(order, "send_outside"), "firing")
    assert refused(cancel(row, by=BY)) == {row.pk: "no_retry"}
    assert said(row) == [("cancel_requested", BY, "")]
    assert row.final_attempt


@pytest.mark.parametrize("verb", [cancel, fire_now, retry])
def test_settled_and_missing_rows_are_refused_and_stay(order: Order, verb: Callable[..., Result]) -> None:
    row = as_if(pending(order), "fired", "due")
    gone = pending(Order.objects.create())
    Timeout.objects.filter(pk=gone.pk).delete()
    result = verb([row, gone], by=BY)
    assert refused(result) == {row.pk: "not_dead" if verb is retry else "settled", gone.pk: "missing"}
    assert said(row) == []


def test_fire_now_leaves_the_firing_to_a_worker(order: Order) -> None:
    row = pending(order, hours=5)
    assert fire_now(row, by=BY, reason="paid by phone").changed == 1
    assert not Effect.objects.exists()
    assert said(row) == [("fire_requested", BY, "paid by phone")]
    assert row.due_at == row.run_at <= timezone.now()
    assert fired(row)
    assert Effect.objects.count() == 1


def test_fire_now_respects_the_condition(order: Order) -> None:
    row = pending(order, "cancel_unpaid")
    Order.objects.filter(pk=order.pk).update(status="paid")
    assert fire_now(row, by=BY).changed == 1
    assert not fired(row)
    row.refresh_from_db()
    assert (row.state, row.cause) == ("skipped", "condition")


def test_fire_now_keeps_a_deadline_that_has_passed(order: Order) -> None:
    row = pending(order)
    due_at = timezone.now() - timedelta(hours=2)
    row = as_if(row, "pending", due_at=due_at, run_at=timezone.now() + timedelta(hours=3), attempts=2)
    assert fire_now(row, by=BY).changed == 1
    row.refresh_from_db()
    assert (row.due_at, row.attempts) == (due_at, 2)
    assert row.run_at <= timezone.now()


def test_fire_now_is_refused_where_nothing_would_fire(order: Order) -> None:
    unknown, paused = pending(order), pending(Order.objects.create(), "linger")
    Timeout.objects.filter(pk=unknown.pk).update(policy="testapp.order.forgotten")
    pause("testapp.order.linger", by=BY)
    dead_one = dead(Order.objects.create())
    result = fire_now([unknown, paused, dead_one], by=BY)
    expected = {unknown.pk: "policy_unknown", paused.pk: "policy_stopped", dead_one.pk: "dead"}
    assert refused(result) == expected
    assert paused.run_at > timezone.now()


def test_postpone_by_counts_from_the_deadline_or_from_now_if_that_has_passed(order: Order) -> None:
    early, late = pending(order, hours=1), pending(Order.objects.create(), seconds=0)
    as_if(late, "pending", due_at=timezone.now() - timedelta(days=1))
    before = early.due_at
    assert postpone([early, late], by=BY, hours=2).changed == 2
    early.refresh_from_db()
    late.refresh_from_db()
    assert early.due_at == early.run_at == before + timedelta(hours=2)
    assert timedelta(minutes=119) < late.due_at - timezone.now() <= timedelta(hours=2)
    assert early.extensions == 0
    assert [what for what, *_ in said(early)] == ["postponed"]


def test_postpone_leaves_a_longer_retry_waiting(order: Order) -> None:
    retry_at = timezone.now() + timedelta(hours=6)
    row = as_if(pending(order), "pending", run_at=retry_at, attempts=1)
    assert postpone(row, by=BY, minutes=10).changed == 1
    row.refresh_from_db()
    assert row.run_at == retry_at


def test_postpone_never_makes_a_deadline_earlier(order: Order) -> None:
    row = pending(order, hours=5)
    sooner = timezone.now() + timedelta(hours=1)
    assert refused(postpone(row, by=BY, at=sooner)) == {row.pk: "not_later"}
    with pytest.raises(InvalidDelay, match="use another operation: fire"):
        postpone(row, by=BY, at=timezone.now() - timedelta(seconds=1))
    later = timezone.now() + timedelta(days=1)
    assert postpone(row, by=BY, at=later).changed == 1
    assert refused(postpone(row, by=BY, weeks=52 * 200)) == {row.pk: "too_far"}
    row.refresh_from_db()
    assert row.due_at == later


@pytest.mark.parametrize("delay", [{}, {"minutes": -1}, {"minuts": 1}, {"minutes": 1, "after": timedelta(1)}])
def test_a_wrong_delay_changes_nothing(order: Order, delay: dict[str, Any]) -> None:
    row = pending(order)
    with pytest.raises(InvalidDelay):
        postpone(row, by=BY, **delay)
    assert said(row) == []


@pytest.mark.parametrize("by", ["", "  ", None])
def test_nobody_may_do_it_anonymously(order: Order, by: Any) -> None:
    row = pending(order)
    with pytest.raises(ValueError, match="who does it"):
        cancel(row, by=by)
    assert said(row) == []


def test_the_dead_are_retried_as_the_same_round_with_all_their_attempts(order: Order) -> None:
    row = dead(order, final_attempt=True)
    key, due_at = row.idempotency_key, row.due_at
    assert retry(row, by=BY, reason="mended").changed == 1
    assert said(row) == [("dead", "", "RuntimeError: broken"), ("retried", BY, "mended")]
    assert (row.state, row.cause, row.attempts, row.final_attempt, row.reason) == ("pending", "", 0, False, "")
    assert (row.idempotency_key, row.due_at) == (key, due_at)
    assert fired(row)


def test_the_dead_stay_dead_where_nothing_could_come_of_it(order: Order) -> None:
    taken = dead(order)
    pending(order)
    gone_order = Order.objects.create()
    gone = dead(gone_order)
    unknown = as_if(dead(Order.objects.create()), "dead", "retries", policy="testapp.order.forgotten")
    gone_order.delete()
    result = retry([taken, gone, unknown], by=BY)
    expected = {taken.pk: "slot_taken", gone.pk: "object_gone", unknown.pk: "policy_unknown"}
    assert refused(result) == expected
    assert result.refused == {Refusal.SLOT_TAKEN: 1, Refusal.OBJECT_GONE: 1, Refusal.POLICY_UNKNOWN: 1}
    assert {row.state for row in Timeout.objects.filter(pk__in=expected)} == {"dead"}


def test_rows_without_object_or_policy_can_be_cancelled_and_postponed(order: Order) -> None:
    unknown = pending(Order.objects.create())
    Timeout.objects.filter(pk=unknown.pk).update(policy="testapp.order.forgotten")
    orphan = pending(order)
    Timeout.objects.filter(pk=orphan.pk).update(object_id="no number")
    rows = Timeout.objects.filter(pk__in=[unknown.pk, orphan.pk])
    assert postpone(rows, by=BY, hours=1).changed == 2
    assert cancel(rows, by=BY).changed == 2


@pytest.mark.parametrize(
    "do",
    [
        lambda rows, **options: cancel(rows, **options),
        lambda rows, **options: fire_now(rows, **options),
        lambda rows, **options: postpone(rows, hours=1, **options),
    ],
    ids=["cancel", "fire_now", "postpone"],
)
def test_a_dry_run_counts_the_same_and_writes_nothing(do: Callable[..., Result]) -> None:
    rows = [pending(Order.objects.create()) for _ in range(3)]
    as_if(rows[0], "fired", "due")
    before = contents()
    dry = do(Timeout.objects.all(), by=BY, dry_run=True)
    assert dry.dry_run
    assert contents() == before
    real = do(Timeout.objects.all(), by=BY)
    assert (
        (dry.changed, dry.refused, dry.ids) == (real.changed, real.refused, real.ids) == (2, {"settled": 1}, real.ids)
    )


def test_a_dry_run_reads_no_objects_unless_what_it_refuses_depends_on_them(order: Order) -> None:
    pending(order)
    with CaptureQueriesContext(connection) as without:
        assert cancel(Timeout.objects.all(), by=BY, dry_run=True).changed == 1
    assert not any(Order._meta.db_table in query["sql"] for query in without)
    lost = dead(Order.objects.create())
    Timeout.objects.filter(pk=lost.pk).update(object_id="12345678")
    assert refused(retry(Timeout.objects.filter(pk=lost.pk), by=BY, dry_run=True)) == {lost.pk: "object_gone"}
    kept = dead(Order.objects.create())
    assert retry(Timeout.objects.filter(pk=kept.pk), by=BY, dry_run=True).changed == 1


def test_many_rows_go_page_by_page_and_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 4)
    for _ in range(10):
        pending(Order.objects.create())
    pages: list[Result] = []
    result = cancel(Timeout.objects.filter(state="pending"), by=BY, progress=pages.append)
    assert [page.changed for page in pages] == [4, 4, 2]
    assert result.changed == 10 == Timeout.objects.filter(state="cancelled").count()
    assert result.ids == sum((page.ids for page in pages), ())


def test_of_several_dead_rounds_on_several_pages_only_the_newest_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker fires what a page has retried before the next page is read."""
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)
    order = Order.objects.create()
    older, first, last, newer = dead(order), dead(Order.objects.create()), dead(Order.objects.create()), dead(order)
    rows = Timeout.objects.filter(state="dead")
    dry = retry(rows, by=BY, dry_run=True)
    result = retry(rows, by=BY, progress=lambda page: fire_due())
    assert set(result.ids) == {newer.pk, first.pk, last.pk}
    assert refused(result) == {older.pk: "slot_taken"} == refused(dry)
    assert Effect.objects.filter(object_id=str(order.pk)).count() == 1


def test_rounds_that_handlers_schedule_meanwhile_are_not_fired_too(
    declare: Callable[..., TimeoutPolicy[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a policy whose handler schedules the next round would fire for as long as workers keep up."""
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 2)

    def remind_daily(order: Order, timeout: Timeout) -> None:
        pending(order, "daily", hours=24)

    declare(Order, remind_daily, name="daily")
    rows = [pending(Order.objects.create(), "daily") for _ in range(4)]
    pages: list[Result] = []

    def fire_page(page: Result) -> None:
        pages.append(page)
        assert len(pages) <= 2
        fire_due("testapp.order.daily")

    assert fire_now(Timeout.objects.filter(state="pending"), by=BY, progress=fire_page).changed == len(rows)
    assert Timeout.objects.filter(state="pending", due_at__gt=timezone.now()).count() == len(rows)


def test_a_page_that_fails_leaves_the_pages_before_it_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 4)
    for _ in range(8):
        pending(Order.objects.create())

    def stop(page: Result) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cancel(Timeout.objects.all(), by=BY, progress=stop)
    assert Timeout.objects.filter(state="cancelled").count() == 4
    assert cancel(Timeout.objects.all(), by=BY).changed == 4


def test_inside_a_transaction_all_is_undone_with_it(order: Order) -> None:
    row = pending(order)
    with pytest.raises(RuntimeError), transaction.atomic():
        assert cancel(Timeout.objects.all(), by=BY).changed == 1
        raise RuntimeError
    assert said(row) == []
    assert row.state == "pending"


@pytest.mark.parametrize(
    ("verb", "signal"),
    [
        (cancel, signals.timeout_cancelled),
        (fire_now, signals.timeout_rescheduled),
        (retry, signals.timeout_scheduled),
    ],
)
def test_a_single_timeout_sends_its_signal_and_many_send_none(
    order: Order, verb: Callable[..., Result], signal: Any
) -> None:
    make = dead if verb is retry else pending
    one, many = make(order), [make(Order.objects.create()) for _ in range(2)]
    heard: list[tuple[Any, int, str]] = []

    def hear(sender: Any, timeout: Timeout, **_: Any) -> None:
        heard.append((sender, timeout.pk, timeout.state))

    signal.connect(hear)
    try:
        with transaction.atomic():
            assert verb(one, by=BY).changed == 1
            assert heard == []
        assert heard == [(Order, one.pk, "cancelled" if verb is cancel else "pending")]
        assert verb(many, by=BY).changed == 2
        assert len(heard) == 1
    finally:
        signal.disconnect(hear)


def test_the_log_tells_who_did_what(order: Order, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "django_delayq.operations")
    cancel(pending(order), by=BY, reason="a call", dry_run=True)
    pause("testapp.order.linger", by=BY)
    cancel(Timeout.objects.all(), by=BY, reason="a call")
    told = [vars(record) for record in caplog.records if record.name == "django_delayq.operations"]
    assert [(record["event"], record["by"]) for record in told] == [("policy_changed", BY), ("timeouts_operated", BY)]
    assert (told[1]["verb"], told[1]["reason"]) == ("cancel", "a call")
    assert told[1]["message"] == "cancel by admin:alice: 1 changed, 0 unchanged"


def test_other_things_than_timeouts_are_refused(order: Order) -> None:
    for target in (Order.objects.all(), [order]):
        with pytest.raises(TypeError, match="Expected timeouts"):
            cancel(target, by=BY)  # type: ignore[arg-type]


def test_the_verbs_have_permissions_of_their_own() -> None:
    own = Permission.objects.filter(content_type__app_label="django_delayq").exclude(codename__startswith="view_")
    assert set(own.values_list("content_type__model", "codename")) == {
        ("timeout", "cancel_timeout"),
        ("timeout", "hold_timeout"),
        ("timeout", "fire_timeout"),
        ("timeout", "postpone_timeout"),
        ("timeout", "retry_timeout"),
        ("timeout", "refire_timeout"),
        ("timeout", "schedule_timeout"),
        ("timeout", "erase_timeout"),
        ("policycontrol", "pause_policy"),
        ("policycontrol", "change_policy_delay"),
        ("policycontrol", "change_policy_guards"),
    }


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no row locks: a writer holds the whole database")
def test_a_verb_waits_for_whoever_decides_first_and_then_believes_him(order: Order) -> None:
    row = pending(order)

    def pay() -> None:
        Order.objects.select_for_update().get(pk=order.pk)
        Timeout.objects.filter(pk=row.pk).update(
            state="cancelled", cause="condition", settled_at=timezone.now(), slot_taken=None
        )

    results: list[Result] = []
    with another_session(pay):
        thread = threading.Thread(target=lambda: results.append(in_another_thread(lambda: cancel(row, by=BY))))
        thread.start()
        thread.join(0.3)
        assert not results
    thread.join(20)
    assert refused(results[0]) == {row.pk: "settled"}
