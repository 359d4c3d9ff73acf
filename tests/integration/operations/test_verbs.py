"""Cancel, fire now, postpone, change the deadline, retry, retire: which rows change, which not, and who hears of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connection, transaction
from django.utils import timezone

from django_delayq import ExtensionLimit, Limits, UnknownPolicy, explain_timeout, extend_timeout, signals
from django_delayq.models import PolicyChange, Timeout, UnfinishedRun
from django_delayq.operations import (
    PolicyConflict,
    Refusal,
    Result,
    cancel,
    change_deadline,
    fire_now,
    pause,
    postpone,
    refire,
    retire,
    retry,
)
from django_delayq.testing import fire_due
from django_delayq.worker import Worker
from tests.integration.firing.conftest import another_session, in_another_thread
from tests.integration.firing.rows import receiving
from tests.integration.management.conftest import Do, Types, do, typing  # noqa: F401 - fixtures
from tests.integration.operations.conftest import BY, as_if, dead, die, many, pending, refused, said
from tests.integration.operations.names import DAY, FORGOTTEN, HOUR, LINGER, MINUTE, REMIND, Declare, PagesOf
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def test_cancel_buries_the_dead_and_leaves_what_is_firing_no_further_attempt(order: Order) -> None:
    row, firing = dead(order), as_if(pending(Order.objects.create(), "send_outside"), "firing")
    result = cancel(row, by=BY, reason="the customer called")
    assert (result.verb, result.changed, result.ids, result.unchanged) == ("cancel", 1, (row.pk,), 0)
    requested = ("cancel_requested", BY, "the customer called")
    assert said(row) == [("dead", "", "RuntimeError: broken"), requested]
    assert (row.state, row.cause, row.reason) == ("cancelled", "hand", "the customer called")
    assert "by admin:alice (the customer called)" in str(explain_timeout(row))
    assert refused(cancel(firing, by=BY)) == {firing.pk: "no_retry"}
    assert said(firing) == [("cancel_requested", BY, "")]
    assert firing.final_attempt


@pytest.mark.parametrize("verb", [cancel, fire_now, retry])
def test_settled_and_missing_rows_are_refused_and_stay(order: Order, verb: Callable[..., Result]) -> None:
    row = as_if(pending(order), "fired", "due")
    gone = pending(Order.objects.create())
    Timeout.objects.filter(pk=gone.pk).delete()
    result = verb([row, gone], by=BY)
    assert refused(result) == {row.pk: "not_dead" if verb is retry else "settled", gone.pk: "missing"}
    assert said(row) == []


def test_fire_now_leaves_the_firing_to_a_worker_and_keeps_a_deadline_that_has_passed(order: Order) -> None:
    row, due_at = pending(order, hours=5), timezone.now() - 2 * HOUR
    late = as_if(pending(Order.objects.create()), "pending", due_at=due_at, run_at=timezone.now() + HOUR, attempts=2)
    assert fire_now([row, late], by=BY, reason="paid by phone").changed == 2
    assert not Effect.objects.exists()
    assert said(row) == [("fire_requested", BY, "paid by phone")]
    assert row.due_at == row.run_at <= timezone.now()
    late.refresh_from_db()
    assert (late.due_at, late.attempts) == (due_at, 2) and late.run_at <= timezone.now()
    assert fire_due() == 2
    assert Effect.objects.count() == 2


def test_fire_now_is_refused_where_nothing_would_fire(order: Order) -> None:
    unknown, paused = pending(order), pending(Order.objects.create(), "linger")
    Timeout.objects.filter(pk=unknown.pk).update(policy=FORGOTTEN)
    pause(LINGER, by=BY)
    dead_one = dead(Order.objects.create())
    result = fire_now([unknown, paused, dead_one], by=BY)
    assert refused(result) == {unknown.pk: "policy_unknown", paused.pk: "policy_stopped", dead_one.pk: "dead"}
    assert paused.run_at > timezone.now()


def test_postpone_counts_from_the_deadline_or_from_now_if_that_has_passed(order: Order) -> None:
    early, late = pending(order, hours=1), pending(Order.objects.create(), seconds=0)
    as_if(late, "pending", due_at=timezone.now() - DAY)
    before = early.due_at
    assert postpone([early, late], by=BY, hours=2).changed == 2
    late.refresh_from_db()
    assert [what for what, *_ in said(early)] == ["postponed"]
    assert early.due_at == early.run_at == before + 2 * HOUR and early.extensions == 0
    assert 119 * MINUTE < late.due_at - timezone.now() <= 2 * HOUR


@pytest.mark.parametrize("to", [{"shift": -2 * HOUR}, {"at": -DAY}])
def test_a_deadline_in_the_past_is_now_and_the_result_says_so(order: Order, to: dict[str, Any], source: str) -> None:
    row, later = pending(order, hours=1), pending(Order.objects.create(), hours=5)
    to = {"at": timezone.now() + to["at"]} if "at" in to else to
    rows = [row, later] if "shift" in to else [row]
    before = timezone.now()
    preview = change_deadline(rows, by=BY, dry_run=True, **to)
    done = change_deadline(rows, by=BY, **to)
    assert (preview.changed, preview.due_at_once) == (done.changed, done.due_at_once) == (len(rows), 1)
    row.refresh_from_db()
    assert before <= row.due_at == row.run_at <= timezone.now(), "so its lateness is not that of a day"
    Worker(burst=True).run()
    row.refresh_from_db()
    assert row.state == "fired"


@pytest.mark.parametrize(
    "move", [lambda row: postpone(row, by=BY, minutes=10), lambda row: change_deadline(row, by=BY, shift=-HOUR / 2)]
)
def test_a_longer_retry_keeps_its_time(order: Order, move: Callable[[Timeout], Result]) -> None:
    retry_at = timezone.now() + 6 * HOUR
    row = as_if(pending(order), "pending", run_at=retry_at, attempts=1)
    assert move(row).changed == 1
    row.refresh_from_db()
    assert row.run_at == retry_at


def test_the_limits_of_the_application_do_not_bind_operators(order: Order, declare: Declare) -> None:
    policy = declare(Order, name="reserved", max_extensions=0, limits=Limits(total=HOUR))
    row = pending(order, "reserved")
    assert change_deadline(row, by=BY, shift=5 * HOUR).changed == postpone(row, by=BY, hours=1).changed == 1
    assert Timeout.objects.get().due_at == row.first_due_at + 6 * HOUR
    with pytest.raises(ExtensionLimit):
        extend_timeout(order, policy, minutes=1)


def test_the_dead_are_retried_as_the_same_round_with_all_their_attempts(order: Order) -> None:
    row = dead(order, final_attempt=True)
    key, due_at = row.idempotency_key, row.due_at
    assert retry(row, by=BY, reason="mended").changed == 1
    assert said(row) == [("dead", "", "RuntimeError: broken"), ("retried", BY, "mended")]
    assert (row.state, row.cause, row.attempts, row.final_attempt, row.reason) == ("pending", "", 0, False, "")
    assert (row.idempotency_key, row.due_at) == (key, due_at)
    assert fire_due() == 1


def test_the_dead_stay_dead_where_nothing_could_come_of_it(order: Order) -> None:
    taken = dead(order)
    pending(order)
    gone_order = Order.objects.create()
    gone = dead(gone_order)
    unknown = as_if(dead(Order.objects.create()), "dead", "retries", policy=FORGOTTEN)
    gone_order.delete()
    result = retry([taken, gone, unknown], by=BY)
    expected = {taken.pk: "slot_taken", gone.pk: "object_gone", unknown.pk: "policy_unknown"}
    assert refused(result) == expected
    assert result.refused == {Refusal.SLOT_TAKEN: 1, Refusal.OBJECT_GONE: 1, Refusal.POLICY_UNKNOWN: 1}
    assert {row.state for row in Timeout.objects.filter(pk__in=expected)} == {"dead"}


def test_rows_without_object_or_policy_can_be_cancelled_and_postponed(order: Order) -> None:
    unknown, orphan = pending(Order.objects.create()), pending(order)
    Timeout.objects.filter(pk=unknown.pk).update(policy=FORGOTTEN)
    Timeout.objects.filter(pk=orphan.pk).update(object_id="no number")
    rows = Timeout.objects.filter(pk__in=[unknown.pk, orphan.pk])
    assert postpone(rows, by=BY, hours=1).changed == 2
    assert cancel(rows, by=BY).changed == 2


def test_rounds_that_handlers_schedule_meanwhile_are_not_fired_too(declare: Declare, pages_of: PagesOf) -> None:
    """Otherwise a policy whose handler schedules the next round would fire for as long as workers keep up."""
    pages_of(2)
    declare(Order, lambda order, timeout: pending(order, "daily", hours=24), name="daily")
    many(4, "daily")
    pages: list[Result] = []

    def fire_page(page: Result) -> None:
        pages.append(page)
        assert len(pages) <= 2
        fire_due("testapp.order.daily")

    assert fire_now(Timeout.objects.filter(state="pending"), by=BY, progress=fire_page).changed == 4
    assert Timeout.objects.filter(state="pending", due_at__gt=timezone.now()).count() == 4


@pytest.mark.parametrize(
    ("verb", "signal", "make"),
    [
        (cancel, signals.timeout_cancelled, pending),
        (fire_now, signals.timeout_rescheduled, pending),
        (retry, signals.timeout_scheduled, dead),
        (refire, signals.timeout_scheduled, dead),
    ],
)
def test_a_single_timeout_sends_its_signal_after_the_commit_and_many_send_none(
    order: Order, verb: Any, signal: Any, make: Callable[[Order], Timeout]
) -> None:
    one, others, heard = make(order), [make(Order.objects.create()) for _ in range(2)], list[tuple[int, str]]()
    with receiving(lambda timeout, **_: heard.append((timeout.pk, timeout.state)), signal):
        with transaction.atomic():
            assert verb(one, by=BY).changed == 1
            assert heard == []
        told = Timeout.objects.latest("pk") if verb is refire else one
        assert heard == [(told.pk, "cancelled" if verb is cancel else "pending")]
        assert verb(others, by=BY).changed == 2
        assert len(heard) == 1


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no row locks: a writer holds the whole database")
def test_a_verb_waits_for_whoever_decides_first_and_then_believes_him(order: Order) -> None:
    row = pending(order)

    def pay() -> None:
        Order.objects.select_for_update().get(pk=order.pk)
        as_if(row, "cancelled", "condition")

    results: list[Result] = []
    with another_session(pay):
        thread = threading.Thread(target=lambda: results.append(in_another_thread(lambda: cancel(row, by=BY))))
        thread.start()
        thread.join(0.3)
        assert not results
    thread.join(20)
    assert refused(results[0]) == {row.pk: "settled"}


def moves() -> list[int]:
    """How often each row was moved."""
    return [len(row.history) for row in Timeout.objects.order_by("pk")]


def later(**more: Any) -> Any:
    return postpone(Timeout.objects.pending(), hours=1, by=BY, **more)


def test_what_is_repeated_continues_and_what_was_completed_is_done_again(pages_of: PagesOf) -> None:
    pages_of(5)
    many(12)
    for moved in (5, 10):
        with pytest.raises(KeyboardInterrupt):
            later(progress=die)
        assert moves() == [1] * moved + [0] * (12 - moved)
    result = later()
    assert (result.changed, result.continued) == (2, 10)
    assert moves() == [1] * 12
    assert not UnfinishedRun.objects.exists()
    assert later().changed == 12


def forgotten(count: int = 1) -> list[Timeout]:
    rows = many(count)
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(policy=FORGOTTEN)
    return rows


def states() -> list[tuple[str, str]]:
    return list(Timeout.objects.order_by("pk").values_list("state", "cause"))


def test_a_page_that_fails_is_neither_changed_nor_counted(monkeypatch: pytest.MonkeyPatch, pages_of: PagesOf) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("broken")

    pages_of(5)
    many(12)
    with monkeypatch.context() as broken, pytest.raises(ValueError, match="broken"):
        broken.setattr(UnfinishedRun, "save", fail)
        later()
    assert moves() == [0] * 12
    assert later().changed == 12


def test_pending_rows_are_cancelled_and_the_others_stay(order: Order) -> None:
    (row,) = forgotten()
    as_if(dead(Order.objects.create()), "dead", "retries", policy=FORGOTTEN)
    as_if(pending(Order.objects.create()), "firing", policy=FORGOTTEN)
    pending(order)
    before = states()
    assert retire(FORGOTTEN, by=BY, dry_run=True).changed == 1
    words = f"No timeout has the policy 'testapp.order.fogotten'. Not declared, but in the ledger: {FORGOTTEN}."
    with pytest.raises(UnknownPolicy, match=f"^{re.escape(words)}$"):
        retire("testapp.order.fogotten", by=BY)
    assert states() == before and not PolicyChange.objects.exists()
    result = retire(FORGOTTEN, by=BY, reason="the feature is gone")
    assert (result.verb, result.changed, result.ids) == ("retire", 1, (row.pk,))
    assert states() == [("cancelled", "retired"), *before[1:]]
    assert said(row) == [("retired", BY, "the feature is gone")]
    assert "its policy was retired" in str(explain_timeout(row))


@pytest.mark.parametrize("label", [REMIND, "testapp.order.former"])
def test_a_declared_policy_is_refused_also_by_an_alias(order: Order, declare: Declare, label: str) -> None:
    declare(Order, name="current", aliases=("former",))
    pending(order)
    Timeout.objects.update(policy=label)
    with pytest.raises(PolicyConflict, match=r"testapp\.order\.(remind|current) is declared"):
        retire(label, by=BY)
    assert states() == [("pending", "")] and not PolicyChange.objects.exists()


def test_the_command_asks_for_many_and_retires(do: Do, typing: Types) -> None:  # noqa: F811
    forgotten(11)
    with pytest.raises(CommandError, match="11 timeouts. Without a terminal"):
        do("delayq_retire", FORGOTTEN)
    done = f"{FORGOTTEN}: 11 cancelled"
    assert do("delayq_retire", FORGOTTEN, "--dry-run").out == f"{done} (dry run: nothing was changed)\n"
    typing("y\n")
    assert do("delayq_retire", FORGOTTEN, "--reason", "gone").out.endswith(f"{done}\n")
    assert PolicyChange.objects.get().by.startswith("cli:")
    with pytest.raises(CommandError, match="is declared"):
        do("delayq_retire", REMIND)
