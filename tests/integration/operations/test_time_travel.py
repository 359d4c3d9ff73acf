"""In staging time can pass at once: what would happen within a duration happens now, in order, and to nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import WARNING
from django.core.management import CommandError, call_command
from django.db.models import Q
from django.test import Client
from django.utils import timezone

import django_delayq as dq
from django_delayq import DelayqError, InvalidDelay, Late, operations
from django_delayq.ledger import advances
from django_delayq.ledger.controls import policy_state
from django_delayq.models import ClockAdvance, Installation, Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.monitoring.snapshot import snapshot
from django_delayq.operations import advance_clock, time_travel
from django_delayq.redis_clients import get_engine
from django_delayq.sql.now import database_now
from django_delayq.testing import fire_due
from tests.integration.operations.conftest import BY, contents, many, pending
from tests.integration.operations.names import DAY, HOUR, LINGER, REMIND, Declare
from tests.testapp.models import Effect, Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SECOND = timedelta(seconds=1)
NO = {"INSTALLATION": None, "PRODUCTION": None}


@pytest.fixture(autouse=True)
def staging(settings: Any) -> Iterator[None]:
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "staging", "PRODUCTION": "production"}
    advances.forget()
    yield
    advances.forget()


def advance(by: timedelta, **options: Any) -> operations.Passed:
    """Let time pass; the due timeouts fire in this process."""
    return advance_clock(by, actor=BY, **{"between": lambda: fire_due(raises=False), **options})


def effects() -> list[str]:
    return list(Effect.objects.order_by("pk").values_list("what", flat=True))


def noting(name: str) -> Callable[[Order, Timeout], None]:
    def handler(order: Order, timeout: Timeout) -> None:
        Effect.objects.create(what=name, object_id=order.pk)

    handler.__name__ = name
    return handler


@pytest.fixture
def trial(declare: Declare) -> dq.TimeoutPolicy[Any]:
    """A policy of orders that are on trial, for a day from their creation."""
    return declare(Order, noting("late"), name="new", after=DAY, since="created_at", when=Q(status="trial"))


def is_about(a: Any, b: Any) -> bool:
    return bool(abs(a - b) < 5 * SECOND)


def test_what_is_due_within_the_duration_fires_in_order_and_the_rest_comes_closer(declare: Declare) -> None:
    armed: dict[str, Any] = {"since": "created_at", "when": Q(status="trial")}
    for days in (3, 1, 2, 5):
        declare(Order, noting(f"day {days}"), name=f"on_{days}", after=days * DAY, **armed)
    order = Order.objects.create(status="trial", created_at=timezone.now())
    done = advance(4 * DAY)
    assert effects() == ["day 1", "day 2", "day 3"]
    assert (done.due, done.ahead) == (3, 4 * DAY)
    row = dq.pending_timeouts(order).get()
    assert is_about(row.due_at, timezone.now() + DAY)
    assert row.due_at == row.run_at == row.first_due_at == row.computed_due_at
    order.save()
    assert dq.pending_timeouts(order).get().due_at == row.due_at, "a save leaves it there"


def test_what_begins_later_has_all_of_its_time_and_appointments_come_closer(declare: Declare, trial: Any) -> None:
    begins = declare(Order, noting("begins"), name="begins", after=-HOUR, since="created_at", when=Q(status="booked"))
    began, in_five_days = timezone.now(), timezone.now() + 5 * DAY
    before = Order.objects.create(status="booked", created_at=in_five_days)
    advance(3 * DAY)
    new = Order.objects.create(status="trial", created_at=timezone.now())
    old = Order.objects.create(status="trial", created_at=began - DAY)
    after = Order.objects.create(status="booked", created_at=in_five_days)
    assert is_about(dq.get_deadline(new, trial), timezone.now() + DAY)
    assert is_about(dq.get_deadline(old, trial), timezone.now() - 3 * DAY)
    for order in (before, after):
        assert is_about(dq.get_deadline(order, begins), timezone.now() + 2 * DAY - HOUR)
    explained = dq.explain_timeout(Order.objects.create(status="trial", created_at=began - 20 * DAY), trial).outlook
    assert explained.startswith("Nothing is pending: the deadline passed too long ago")
    assert explained.endswith("The clock of this installation is 3 d ahead: deadlines are earlier by it.")


@pytest.mark.parametrize("has_workers", [True, False], ids=["step by step", "without workers, all at once"])
def test_nothing_counts_as_late_because_of_it(declare: Declare, has_workers: bool) -> None:
    declare(Order, noting("in time"), name="strict", late=Late(timedelta(minutes=1)))
    for hours in (1, 1.001, 20):
        pending(Order.objects.create(), "strict", hours=hours)
    done = advance(10 * DAY) if has_workers else advance(10 * DAY, between=lambda: False)
    if not has_workers:
        assert (done.steps, done.due, done.is_complete) == (2, 3, False)
        assert fire_due() == 3
    assert effects() == ["in time"] * 3
    assert all((row.lateness() or 0) < 5 for row in Timeout.objects.all())


def test_stopped_clocks_stay_stopped_and_the_ends_of_holds_and_pauses_come_closer() -> None:
    held, until, paused = (pending(Order.objects.create(), days=2) for _ in range(3))
    dq.hold_timeout(Order.objects.get(pk=held.object_id), "remind")
    dq.hold_timeout(Order.objects.get(pk=until.object_id), "remind", until=timezone.now() + 5 * DAY)
    dq.hold_timeout(Order.objects.get(pk=paused.object_id), "remind", keep_deadline=True)
    operations.pause(LINGER, by=BY, until=timezone.now() + 5 * DAY)
    rests = dict(Timeout.objects.values_list("pk", "remaining"))
    advance(3 * DAY)
    rows = Timeout.objects.in_bulk()
    assert {row.state for row in rows.values()} == {"held"}
    assert {pk: row.remaining for pk, row in rows.items()} == rests
    assert is_about(rows[until.pk].held_until, timezone.now() + 2 * DAY)
    assert is_about(rows[paused.pk].due_at, timezone.now() - DAY)
    assert is_about(policy_state(LINGER, "default").until, timezone.now() + 2 * DAY)


@pytest.mark.parametrize(
    ("options", "debug", "is_copied", "says"),
    [
        ({"INSTALLATION": "production"}, True, False, "which DELAYQ..PRODUCTION.. names"),
        ({"INSTALLATION": None}, False, False, "INSTALLATION.. is not set"),
        ({"PRODUCTION": None}, False, False, "PRODUCTION.. is not set"),
        (NO, False, False, "INSTALLATION.. and DELAYQ..PRODUCTION.. are not set"),
        (NO, True, False, ""),
        ({}, False, True, "belongs to the installation 'production'.*delayq_adopt"),
        (NO, True, True, "belongs to the installation 'production'"),
    ],
)
def test_it_is_refused_where_it_may_be_production_or_another_installation(
    settings: Any, options: Any, debug: bool, is_copied: bool, says: str
) -> None:
    settings.DELAYQ, settings.DEBUG = {**settings.DELAYQ, **options}, debug
    if is_copied:
        Installation.objects.create(name="production", since_at=timezone.now())
    pending(Order.objects.create(), days=31)
    before = contents()
    if not says:
        assert advance(HOUR).ahead == HOUR
        return
    with pytest.raises(DelayqError, match=says):
        advance(30 * DAY)
    with pytest.raises(CommandError, match=says):
        call_command("delayq_clock", "--advance", "30d", "--yes")
    if not is_copied:
        with pytest.raises(DelayqError, match=says):
            operations.reset_clock(actor=BY)
    assert contents() == before and not ClockAdvance.objects.exists()


def test_time_does_not_run_back_nor_during_a_hold_nor_for_many_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_travel, "wait_for_workers", lambda using: True)
    with pytest.raises(InvalidDelay, match="positive timedelta"):
        advance(-HOUR)
    operations.hold(REMIND, by=BY)
    with pytest.raises(DelayqError, match="testapp.order.remind is on hold"):
        advance(HOUR)
    operations.resume(REMIND, by=BY)
    many(11, days=30)
    with pytest.raises(CommandError, match="advance the clock of staging for 11 timeouts.*give --yes[.]"):
        call_command("delayq_clock", "--advance", "1d")
    assert not ClockAdvance.objects.exists()


def test_production_reads_nothing_of_it_and_says_so(trial: Any, settings: Any, django_assert_num_queries: Any) -> None:
    """Reads nothing even of what a copy of the staging database has."""
    began = timezone.now()
    pending(Order.objects.create(), days=31)
    advance(30 * DAY)
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "production"}
    with django_assert_num_queries(0):
        assert not advances.total("default")
        assert trial.due_of(None, began) == began + DAY
    assert snapshot().clock_ahead_seconds == 0
    [found] = [finding for finding in examine(quick=True) if finding.id == "clock.advanced"]
    assert found.level == WARNING
    assert found.msg.startswith("The clock of this database was advanced 1 time, by 30 d, last by admin:alice on ")


def test_a_story_counts_lateness_from_the_end_of_the_step_in_which_the_deadline_passed(admin_client: Client) -> None:
    row = pending(Order.objects.create(), days=30)
    advance(31 * DAY)
    row.refresh_from_db()
    [fired] = [event for event in dq.explain_timeout(row) if event.what == "fired"]
    assert 0 <= fired.details["late"] < 600, fired
    page = admin_client.get(f"/admin/django_delayq/timeout/{row.pk}/change/").content.decode()
    [seconds] = re.findall(r"fired ([\d.,]+) s after it", page)
    assert float(seconds.replace(",", "")) < 600


def test_the_command_shows_sets_and_resets_the_clock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_travel, "wait_for_workers", lambda using: bool(fire_due() or True))
    row = pending(Order.objects.create(), days=30)
    call_command("delayq_clock")
    assert capsys.readouterr().out == "The clock of this installation is not advanced\n"
    call_command("delayq_clock", "--advance", "1d12h", "--reason", "a test")
    out = capsys.readouterr().out
    assert out.startswith("0 timeouts became due, in 1 step\nThe clock of this installation is 1 d 12 h ahead: it is ")
    assert (ClockAdvance.objects.get().reason, ClockAdvance.objects.get().by.partition(":")[0]) == ("a test", "cli")
    call_command("delayq_clock", "--set", (timezone.now() + 10 * DAY).isoformat())
    assert is_about(timezone.now() + advances.total("default"), timezone.now() + 10 * DAY)
    row.refresh_from_db()
    due_at = row.due_at
    assert is_about(due_at, timezone.now() + 20 * DAY)
    with pytest.raises(CommandError, match="positive timedelta"):
        call_command("delayq_clock", "--set", (timezone.now() + 9 * DAY).isoformat())
    capsys.readouterr()
    call_command("delayq_clock", "--reset")
    assert "ahead\nThe clock of this installation is not advanced" in capsys.readouterr().out
    row.refresh_from_db()
    assert row.due_at == due_at


def test_redis_has_the_new_due_times_at_once() -> None:
    engine = get_engine("default")
    if engine is None:
        pytest.skip("this stage has no Redis")
    row = pending(Order.objects.create(), days=2)
    advance(2 * DAY, between=lambda: None)
    entries = dict(engine.queue("default", engine.shard_of(row.pk)).peek(10, row.policy))
    assert row.pk in entries
    assert entries[row.pk] <= database_now("default").timestamp() * 1000 + 1000
