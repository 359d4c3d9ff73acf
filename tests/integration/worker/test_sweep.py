"""After the sweep Redis has an entry for each row that is overdue or due soon; other keys are unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import pytest
from django.db import OperationalError
from pytest_django import Settings

from django_delayq import clock
from django_delayq.engine.engine import Engine
from django_delayq.engine.records import turn_key
from django_delayq.firing import Report, settle_expired
from django_delayq.ledger.outbox import due_ms_of
from django_delayq.models import Timeout
from django_delayq.signals import entries_restored
from django_delayq.sql.now import database_now
from django_delayq.worker import sweep
from django_delayq.worker.servers import ClockSkew
from django_delayq.worker.sweep import Sweep, Swept, try_claim_turn
from tests.integration.firing.conftest import another_session, needs_row_locks
from tests.integration.operations.conftest import as_if
from tests.support.lines import lines_of, lose_entries, remove_ids
from tests.support.waiting import wait_until
from tests.support.workers import due_orders

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
REMIND = "testapp.order.remind"
MINUTE = timedelta(minutes=1)


@pytest.fixture
def forgotten(engine: Engine) -> list[Timeout]:
    """Create rows without entries in Redis, one second apart; the first is due now."""
    rows = due_orders("remind", 10, hours=2)
    now = database_now("default")
    for number, row in enumerate(rows):
        row.run_at = now + timedelta(seconds=number)
        row.save(update_fields=["run_at"])
    assert in_redis(engine) == {}
    return rows


@pytest.fixture
def overdue() -> list[Timeout]:
    """Create rows without entries in Redis that are overdue by an hour."""
    rows = due_orders("remind", 34, hours=2)
    Timeout.objects.update(run_at=clock.now() - timedelta(hours=1))
    return rows


def a_sweep(engine: Engine, clocks: ClockSkew | None = None) -> Sweep:
    return Sweep(engine, "default", clocks or ClockSkew("default"))


def in_redis(engine: Engine) -> dict[int, int]:
    return dict(engine.queue("default", 0).peek(500))


def forget(engine: Engine, rows: list[Timeout]) -> None:
    """Redis loses the entries of these rows."""
    remove_ids(engine.queue("default", 0), [row.pk for row in rows])


def move(row: Timeout, moment: datetime) -> None:
    Timeout.objects.filter(pk=row.pk).update(run_at=moment)


def test_a_sweep_adds_what_is_due_from_a_minute_ago_to_two_intervals_ahead(
    engine: Engine, forgotten: list[Timeout]
) -> None:
    try_claim_turn(engine, "full-sweep", MINUTE)
    now = database_now("default")
    move(forgotten[0], now - timedelta(seconds=58))
    move(forgotten[1], now - timedelta(seconds=62))
    move(forgotten[9], now + timedelta(seconds=11))
    as_if(forgotten[8], "cancelled", "hand")
    with clock.set_to(now):  # a second on a slow machine would let one of them in and another one out
        swept = a_sweep(engine).run_once()
    assert set(in_redis(engine)) == {row.pk for row in [forgotten[0], *forgotten[2:8]]}
    assert (swept.checked, swept.changed) == (7, 7)
    assert in_redis(engine)[forgotten[5].pk] == due_ms_of(forgotten[5].run_at)


def test_once_a_minute_one_worker_adds_everything_overdue_and_everybody_may_if_he_must(
    engine: Engine, forgotten: list[Timeout]
) -> None:
    move(forgotten[0], clock.now() - timedelta(days=400))
    made, other = a_sweep(engine), a_sweep(engine)
    assert made.run_once().checked == 10
    assert other.run_once() == Swept()
    assert forgotten[0].pk in in_redis(engine)
    assert 0 < engine.client.pttl(turn_key(engine.prefix, "full-sweep")) <= 60_000
    forget(engine, forgotten)
    engine.client.delete(turn_key(engine.prefix, "sweep"))
    made.run_once()
    assert forgotten[0].pk not in in_redis(engine), "not every time"
    assert other.run_once(everything=True).checked == 10


def test_heads_are_restored_where_no_entry_is_missing_and_removed_where_none_is_left(
    engine: Engine, forgotten: list[Timeout]
) -> None:
    queue, sweep = engine.queue("default", 0), a_sweep(engine)
    sweep.run_once(everything=True)
    engine.client.delete(queue.keys.heads)
    assert queue.stats().total == 0
    assert sweep.run_once(everything=True).changed == 0
    assert queue.stats().total == len(in_redis(engine)) > 0
    Timeout.objects.all().delete()
    queue.ensure("shop.Removed.policy", [(1, 0)])
    for label in (REMIND, "shop.Removed.policy"):
        engine.client.delete(queue.keys.line(label))
    assert len(lines_of(queue)) == 2
    sweep.run_once(everything=True)
    assert lines_of(queue) == [], "whether a policy is declared, or unknown"


def restored(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Return the lines of the log about restored entries."""
    return [record for record in caplog.records if getattr(record, "event", "") == "redis_healed"]


@pytest.fixture
def counted() -> Iterator[list[int]]:
    """Collect what the signal `entries_restored` reports."""
    counts: list[int] = []

    def count_restored(count: int, **_: object) -> None:
        counts.append(count)

    entries_restored.connect(count_restored)
    yield counts
    entries_restored.disconnect(count_restored)


def scheduled_earlier(count: int, ago: timedelta = MINUTE) -> list[Timeout]:
    """Create rows that are due in nine seconds, and of which Redis has heard."""
    rows = due_orders("remind", count, seconds=9)
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(created_at=clock.now() - ago)
    return rows


def test_what_redis_has_lost_is_restored_with_one_line_in_the_log(
    engine: Engine, caplog: pytest.LogCaptureFixture, counted: list[int]
) -> None:
    scheduled_earlier(12)
    workers = [a_sweep(engine) for _ in range(2)]
    workers[0].run_once(everything=True)
    assert (restored(caplog), counted) == ([], [])
    for worker in workers:
        lose_entries(engine.queue("default", 0))
        worker.run_once(everything=True)
        assert len(in_redis(engine)) == 12
    assert counted == [12, 12]
    [line] = restored(caplog)  # one line, however many sweeps and workers find more of it
    assert (line.levelname, line.name, line.restored) == ("WARNING", "django_delayq.worker", 12)


def test_what_was_restored_is_reported_although_the_sweep_of_the_backlog_fails(
    engine: Engine, overdue: list[Timeout], counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later sweep finds these entries in Redis, and reports nothing."""
    monkeypatch.setattr(sweep, "PAGE_ROWS", 5)
    forget(engine, scheduled_earlier(3))
    pages = count(1)

    def fail_in_the_backlog() -> None:
        if next(pages) == 2:
            raise OperationalError("the server is gone")

    with pytest.raises(OperationalError):
        a_sweep(engine).run_once(everything=True, between=fail_in_the_backlog)
    assert counted == [3]


@pytest.mark.parametrize("lost", [0, sweep.RESTORED_LIMIT])
def test_what_comes_within_the_horizon_or_was_just_committed_and_few_losses_are_not_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture, counted: list[int], lost: int
) -> None:
    due_orders("remind", 30, hours=3)
    Timeout.objects.update(run_at=clock.now() + timedelta(seconds=9), created_at=clock.now() - timedelta(hours=3))
    forget(engine, scheduled_earlier(lost))
    forget(engine, due_orders("remind", 30, seconds=9))  # they may still be on their way to Redis
    a_sweep(engine).run_once()
    assert len(in_redis(engine)) == 60 + lost
    assert restored(caplog) == []
    assert counted == ([lost] if lost else [])


def test_a_long_backlog_is_swept_in_passes_until_one_finds_nothing_to_do(
    engine: Engine, overdue: list[Timeout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "PAGE_ROWS", 5)
    monkeypatch.setattr(sweep, "PASS_ROWS", 10)
    made = a_sweep(engine)
    swept = made.run_once(everything=True)
    assert (swept.checked, swept.changed) == (34, 34)
    assert made.run_once(everything=True).checked == 10, "Redis is as it should be: one pass is enough"
    remove_ids(engine.queue("default", 0), sorted(in_redis(engine))[10:])
    try_claim_turn(engine, "full-sweep", MINUTE)
    assert made.run_once().checked == 0, "the latest minute"
    assert made.run_once(everything=True).checked == 24, "the next one continues where that one ended"
    assert len(in_redis(engine)) == 34


def test_a_sweep_that_fails_leaves_its_turn_to_the_next_one(
    engine: Engine, forgotten: list[Timeout], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": timedelta(minutes=10)}

    def fail(*_: object) -> None:
        raise RuntimeError("the database went away")

    own = a_sweep(engine)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(sweep, "page_of", fail)
        own.run_once()
    wait_until(lambda: own.run_once().checked > 0)


def expired(count: int) -> list[Timeout]:
    """Create rows whose workers have died while they fired."""
    rows = due_orders("send_outside", count)
    Timeout.objects.update(state="firing", slot_taken=None, attempts=1, run_at=clock.now() - MINUTE)
    return rows


def test_everything_that_expired_is_settled_however_many_pages_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    expired(5)
    monkeypatch.setattr(sweep, "PAGE_ROWS", 2)
    assert sweep.settle_all_expired("default") == 5
    assert set(Timeout.objects.values_list("state", "attempts")) == {("pending", 0)}
    assert not Timeout.objects.filter(suspected_at=None).exists()
    again = dict.fromkeys((1, 2), clock.now())
    pages = iter([Report((), again, untried=(1, 2))])  # a second read would find nothing to return
    monkeypatch.setattr(sweep, "settle_expired", lambda using, limit: next(pages))
    assert sweep.settle_all_expired("default") == 0, "a page of which no row could be settled ends the pass"


@needs_row_locks
def test_expired_rows_that_are_locked_do_not_keep_the_sweep_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, reads = expired(4), count(1)

    def settle(using: str, limit: int) -> Any:
        assert next(reads) < 10, "it repeats without end"
        return settle_expired(using, limit)

    monkeypatch.setattr(sweep, "PAGE_ROWS", 2)
    monkeypatch.setattr(sweep, "settle_expired", settle)
    with another_session(lambda: list(Timeout.objects.select_for_update().filter(pk__in=[rows[0].pk, rows[1].pk]))):
        assert sweep.settle_all_expired("default") == 0
    assert sweep.settle_all_expired("default") == 4


@pytest.mark.parametrize("forged", ["without end", "for ten minutes", "another type"])
def test_a_turn_that_lasts_longer_than_any_is_taken_back(engine: Engine, forged: str) -> None:
    key = turn_key(engine.prefix, "sweep")
    if forged == "another type":
        engine.client.rpush(key, "x")
    else:
        engine.client.set(key, 1, ex=None if forged == "without end" else 600)
    assert [try_claim_turn(engine, "sweep", MINUTE) for _ in range(3)] == [True, False, False]
    assert 0 < engine.client.pttl(key) <= 60_000
