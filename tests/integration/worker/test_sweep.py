"""After the sweep Redis has an entry for each row that is overdue or due soon; other keys are unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import pytest
from django.db import OperationalError
from pytest_django import Settings

from django_delayq import Limits, Rate, clock, operations
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
from tests.support.workers import due_orders, worker_engine
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
REMIND = "testapp.order.remind"


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


def a_sweep(engine: Engine, clocks: ClockSkew | None = None) -> Sweep:
    return Sweep(engine, "default", clocks or ClockSkew("default"))


def in_redis(engine: Engine, queue: str = "default") -> dict[int, int]:
    return dict(engine.queue(queue, 0).peek(500))


def move(row: Timeout, moment: datetime) -> None:
    Timeout.objects.filter(pk=row.pk).update(run_at=moment)


def test_a_sweep_adds_what_is_due_from_a_minute_ago_to_two_intervals_ahead(
    engine: Engine, forgotten: list[Timeout]
) -> None:
    try_claim_turn(engine, "full-sweep", timedelta(minutes=1))
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


def test_once_a_minute_it_adds_everything_overdue(engine: Engine, forgotten: list[Timeout]) -> None:
    move(forgotten[0], clock.now() - timedelta(days=400))
    made = a_sweep(engine)
    made.run_once()
    assert forgotten[0].pk in in_redis(engine)
    assert 0 < engine.client.pttl(turn_key(engine.prefix, "full-sweep")) <= 60_000
    remove_ids(engine.queue("default", 0), in_redis(engine))
    engine.client.delete(turn_key(engine.prefix, "sweep"))
    made.run_once()
    assert forgotten[0].pk not in in_redis(engine), "not every time"


def test_of_several_workers_one_sweeps_at_a_time_and_everybody_may_if_he_must(
    engine: Engine, forgotten: list[Timeout]
) -> None:
    first, second = (a_sweep(engine) for _ in range(2))
    assert first.run_once().checked == 10
    assert second.run_once() == Swept()
    assert second.run_once(everything=True).checked == 10


def test_entries_that_are_early_enough_or_leased_are_left_alone(engine: Engine, forgotten: list[Timeout]) -> None:
    early, late, leased = forgotten[2:5]
    queue = engine.queue("default", 0)
    queue.ensure(REMIND, [(early.pk, due_ms_of(early.run_at) - 500), (leased.pk, 0)])
    queue.reschedule(REMIND, [(late.pk, due_ms_of(late.run_at) + 60_000)])
    reserved = queue.reserve({REMIND: 1}, 60_000)
    assert [entry.id for entry in reserved.entries] == [leased.pk]
    expiry = in_redis(engine)[leased.pk]
    swept = a_sweep(engine).run_once()
    assert in_redis(engine)[early.pk] == due_ms_of(early.run_at) - 500
    assert in_redis(engine)[late.pk] == due_ms_of(late.run_at)
    assert in_redis(engine)[leased.pk] == expiry
    assert (swept.checked, swept.changed) == (10, 8)


def test_lost_heads_are_restored_although_no_entry_is_missing(engine: Engine, forgotten: list[Timeout]) -> None:
    queue = engine.queue("default", 0)
    sweep = a_sweep(engine)
    sweep.run_once(everything=True)
    assert queue.stats().total == len(in_redis(engine)) > 0
    engine.client.delete(queue.keys.heads)
    assert queue.stats().total == 0
    assert sweep.run_once(everything=True).changed == 0
    assert queue.stats().total == len(in_redis(engine)) > 0


@pytest.mark.parametrize("label", [REMIND, "shop.Removed.policy"])
def test_a_line_that_has_ended_loses_its_head_in_a_full_sweep(engine: Engine, label: str) -> None:
    """Whether its policy is declared, or unknown."""
    queue = engine.queue("default", 0)
    queue.ensure(label, [(1, 0)])
    engine.client.delete(queue.keys.line(label))
    assert lines_of(queue) == [label]
    a_sweep(engine).run_once(everything=True)
    assert lines_of(queue) == []


def restored(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the numbers of restored entries in the log."""
    return [vars(r)["restored"] for r in caplog.records if getattr(r, "event", "") == "redis_healed"]


@pytest.fixture
def counted() -> Iterator[list[int]]:
    """Collect what the signal `entries_restored` reports."""
    counts: list[int] = []

    def count_restored(count: int, **_: object) -> None:
        counts.append(count)

    entries_restored.connect(count_restored)
    yield counts
    entries_restored.disconnect(count_restored)


def scheduled_earlier(count: int, ago: timedelta, **delay: float) -> list[Timeout]:
    rows = due_orders("remind", count, **delay)
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(created_at=clock.now() - ago)
    return rows


def test_what_redis_has_lost_is_restored_with_one_line_in_the_log(
    engine: Engine, caplog: pytest.LogCaptureFixture, counted: list[int]
) -> None:
    scheduled_earlier(12, timedelta(minutes=1), seconds=9)
    workers = [a_sweep(engine) for _ in range(2)]
    workers[0].run_once(everything=True)
    assert (restored(caplog), counted) == ([], [])
    for worker in workers:
        lose_entries(engine.queue("default", 0))
        worker.run_once(everything=True)
        assert len(in_redis(engine)) == 12
    assert restored(caplog) == [12], "one line, however many sweeps and workers find more of it"
    assert counted == [12, 12]
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "redis_healed"]
    assert (line.levelname, line.name) == ("WARNING", "django_delayq.worker")


def test_what_was_restored_is_reported_although_the_sweep_of_the_backlog_fails(
    engine: Engine, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later sweep finds these entries in Redis, and reports nothing."""
    monkeypatch.setattr(sweep, "PAGE_ROWS", 5)
    due_orders("remind", 10, hours=2)
    Timeout.objects.update(run_at=clock.now() - timedelta(hours=1))
    lost = scheduled_earlier(3, timedelta(minutes=1), seconds=9)
    remove_ids(engine.queue("default", 0), [row.pk for row in lost])
    pages = count(1)

    def fail_in_the_backlog() -> None:
        if next(pages) == 2:
            raise OperationalError("the server is gone")

    with pytest.raises(OperationalError):
        a_sweep(engine).run_once(everything=True, between=fail_in_the_backlog)
    assert counted == [3]


@pytest.mark.parametrize("lost", [0, sweep.RESTORED_LIMIT])
def test_loading_what_comes_within_the_horizon_and_few_losses_are_not_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture, counted: list[int], lost: int
) -> None:
    due_orders("remind", 30, hours=3)
    Timeout.objects.update(run_at=clock.now() + timedelta(seconds=9), created_at=clock.now() - timedelta(hours=3))
    near = scheduled_earlier(lost, timedelta(minutes=1), seconds=9)
    remove_ids(engine.queue("default", 0), [row.pk for row in near])
    a_sweep(engine).run_once()
    assert len(in_redis(engine)) == 30 + lost
    assert restored(caplog) == []
    assert counted == ([lost] if lost else [])


def test_a_row_that_was_just_committed_may_still_be_on_its_way_to_redis(
    engine: Engine, caplog: pytest.LogCaptureFixture, counted: list[int]
) -> None:
    rows = due_orders("remind", 30, seconds=9)
    remove_ids(engine.queue("default", 0), [row.pk for row in rows])
    a_sweep(engine).run_once()
    assert len(in_redis(engine)) == 30
    assert (restored(caplog), counted) == ([], [])


def test_policies_make_no_difference_to_what_is_restored(engine: Engine, declare: Any) -> None:
    """That a line is not asked, because its policy is stopped, unknown or has no slot, is for the workers to decide."""
    paced = declare(Order, name="paced", limits=Limits(rate=Rate(5)))
    rows = [*due_orders(paced, 2), *due_orders("remind", 2), *due_orders("linger", 2)]
    unknown = "testapp.order.of_another_release"
    Timeout.objects.filter(policy="testapp.order.remind").update(policy=unknown)
    operations.pause("testapp.order.linger", by="script:test")
    queue = engine.queue("default", 0)
    for line in (paced.label, "testapp.order.remind", "testapp.order.linger"):
        queue.remove(line, [row.pk for row in rows])
    a_sweep(engine).run_once(everything=True)
    lines = [queue.stats_of(line).due for line in (paced.label, unknown, "testapp.order.linger")]
    assert lines == [2, 2, 2]


def test_rows_are_swept_into_their_queues_and_shards(settings: Settings, with_redis: Any) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "SHARDS": 3}
    rows = due_orders("remind", 6, hours=2)
    Timeout.objects.update(run_at=clock.now())
    Timeout.objects.filter(pk=rows[0].pk).update(queue="mail")
    with worker_engine() as engine:
        a_sweep(engine).run_once()
        for row in rows:
            queue = "mail" if row is rows[0] else "default"
            assert row.pk in dict(engine.queue(queue, engine.shard_of(row.pk)).peek())


def test_a_long_backlog_is_swept_in_passes_until_one_finds_nothing_to_do(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "PAGE_ROWS", 5)
    monkeypatch.setattr(sweep, "PASS_ROWS", 10)
    due_orders("remind", 34, hours=2)
    Timeout.objects.update(run_at=clock.now() - timedelta(hours=1))
    made = a_sweep(engine)
    swept = made.run_once(everything=True)
    assert (swept.checked, swept.changed) == (34, 34)
    assert made.run_once(everything=True).checked == 10, "Redis is as it should be: one pass is enough"
    remove_ids(engine.queue("default", 0), sorted(in_redis(engine))[10:])
    try_claim_turn(engine, "full-sweep", timedelta(minutes=1))
    assert made.run_once().checked == 0, "the latest minute"
    assert made.run_once(everything=True).checked == 24, "the next one continues where that one ended"
    assert len(in_redis(engine)) == 34


def test_redis_with_another_clock_is_told_the_moment_by_its_clock(
    engine: Engine, forgotten: list[Timeout], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = ClockSkew("default")
    monkeypatch.setattr(clocks, "redis_ahead_ms", lambda: 120_000.0)
    a_sweep(engine, clocks).run_once()
    assert in_redis(engine)[forgotten[3].pk] == due_ms_of(forgotten[3].run_at) + 120_000


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


def test_everything_that_expired_is_settled_however_many_pages_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    due_orders("send_outside", 5)
    Timeout.objects.update(state="firing", slot_taken=None, attempts=1, run_at=clock.now() - timedelta(minutes=1))
    monkeypatch.setattr(sweep, "PAGE_ROWS", 2)
    assert sweep.settle_all_expired("default") == 5
    assert set(Timeout.objects.values_list("state", "attempts")) == {("pending", 0)}
    assert not Timeout.objects.filter(suspected_at=None).exists()


def test_a_page_of_which_no_row_could_be_settled_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    again = dict.fromkeys((1, 2), clock.now())
    pages = iter([Report((), again, untried=(1, 2))])  # a second read would find nothing to return
    monkeypatch.setattr(sweep, "PAGE_ROWS", 2)
    monkeypatch.setattr(sweep, "settle_expired", lambda using, limit: next(pages))
    assert sweep.settle_all_expired("default") == 0


@needs_row_locks
def test_expired_rows_that_are_locked_do_not_keep_the_sweep_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = due_orders("send_outside", 4)
    Timeout.objects.update(state="firing", slot_taken=None, attempts=1, run_at=clock.now() - timedelta(minutes=1))
    reads: list[int] = []

    def settle(using: str, limit: int) -> Any:
        reads.append(limit)
        assert len(reads) < 10, "it repeats without end"
        return settle_expired(using, limit)

    monkeypatch.setattr(sweep, "PAGE_ROWS", 2)
    monkeypatch.setattr(sweep, "settle_expired", settle)
    with another_session(lambda: list(Timeout.objects.select_for_update().filter(pk__in=[rows[0].pk, rows[1].pk]))):
        assert sweep.settle_all_expired("default") == 0
    assert sweep.settle_all_expired("default") == 4
