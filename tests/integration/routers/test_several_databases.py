"""Databases without a ledger are left alone; routers that separate what belongs together are named; two ledgers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management.color import no_style
from django.db import connections
from django.utils import timezone
from pytest_django import Settings

import django_delayq as dq
from django_delayq.checks import check_policies
from django_delayq.conf import ConfigError
from django_delayq.models import Timeout
from django_delayq.redis_clients import forget_engine, get_engine
from tests.support.typed import Declare
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker
from tests.testapp.models import ExpressOrder, Order

if TYPE_CHECKING:
    import redis

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True, databases=["default", "replica", "archive"])]


@pytest.fixture(params=["no routers", "routers"])
def order(request: pytest.FixtureRequest, settings: Settings) -> Order:
    settings.DATABASE_ROUTERS = [] if request.param == "no routers" else ["tests.routers.ReadsReplica"]
    return Order.objects.create(created_at=timezone.now())


def states() -> list[tuple[str, str]]:
    return list(Timeout.objects.using("default").order_by("id").values_list("state", "cause"))


def test_a_copy_in_an_archive_without_ledger_is_saved_and_deleted_and_changes_no_timeout(order: Order) -> None:
    order.status = "paid"
    order.save(using="archive")
    copy = Order.objects.using("archive").get()
    assert copy.status == "paid"
    assert states() == [("pending", "")]
    ExpressOrder.objects.using("archive").create(status="unpaid", created_at=timezone.now()).delete(using="archive")
    Order.objects.using("archive").all().delete()
    assert states() == [("pending", "")]
    Order.objects.using("default").get(pk=order.pk).delete()
    assert states() == [("cancelled", "gone")], "where it is deleted"


def test_a_verb_refuses_an_object_of_the_archive_where_no_router_says_whose_it_is(
    settings: Settings, order: Order
) -> None:
    order.save(using="archive")
    if settings.DATABASE_ROUTERS:  # they send the verb to the writer, as they do with save()
        assert dq.cancel_timeout(order, "cancel_unpaid")
        return
    with pytest.raises(ConfigError, match="comes from database 'archive', which has no timeouts.*Pass one from 'def"):
        dq.cancel_timeout(order, "cancel_unpaid")
    assert states() == [("pending", "")]


def test_a_shard_that_is_named_with_using_keeps_its_own_timeouts(settings: Settings, order: Order) -> None:
    """Without routers the second database has everything, and an object's own alias is its writer."""
    settings.DATABASE_ROUTERS = []
    shard = Order.objects.using("replica").create(created_at=timezone.now())
    [row] = Timeout.objects.using("replica")
    assert list(dq.pending_timeouts([shard])) == list(dq.pending_timeouts(shard)) == [row]
    dq.extend_timeout(shard, "cancel_unpaid", hours=1)
    assert dq.extend_timeouts(shard.timeouts.all(), hours=1) == 1
    assert dq.extend_timeouts(list(shard.timeouts.all()), hours=1) == 1
    assert dq.cancel_timeouts(Timeout.objects.using("replica")) == 1
    row.refresh_from_db()
    assert (row.state, row.extensions) == ("cancelled", 3)
    assert states() == [("pending", "")]
    with pytest.raises(TypeError, match="several databases, default, replica"):
        dq.cancel_timeouts([row, Timeout.objects.using("default").get()])
    with pytest.raises(TypeError, match="several databases, default, replica"):
        dq.pending_timeouts([shard, order])


class KindsElsewhere:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "contenttypes" else None


class LedgerNowhere:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "django_delayq" else None


@pytest.mark.parametrize(
    ("router", "number", "words", "fix"),
    [
        (KindsElsewhere(), "E020", "keep contenttypes out of database 'default'", "migrate --database default"),
        (LedgerNowhere(), "E021", "keep django_delayq out of database 'default'", "migrate --database default"),
    ],
)
def test_routers_that_keep_the_ledger_or_content_types_out_are_named_with_the_fix(
    settings: Settings, router: Any, number: str, words: str, fix: str
) -> None:
    settings.DATABASE_ROUTERS = [router]
    [found] = {message.id: message for message in check_policies() if message.obj.model is Order}.values()
    assert found.id == f"django_delayq.{number}"
    assert words in found.msg
    assert fix in f"{found.msg} {found.hint}"


# Two ledgers share one Redis: each has its own keys, workers and turns, although their ids overlap.
LEDGERS = ("default", "replica")
HOUR = timedelta(hours=1)
next_million = itertools.count(1_000_000, 1_000_000)


@pytest.fixture
def one_redis(settings: Settings, redis_client: redis.Redis) -> Iterator[None]:
    """Without routers both databases have a ledger. After its start no worker sweeps, which would hide lost entries."""
    settings.DATABASE_ROUTERS = []
    settings.DELAYQ = {**settings.DELAYQ, "SWEEP_INTERVAL": HOUR, "SYNC_INTERVAL": HOUR}
    yield
    forget_engine()


def schedule(policy: Any, ledger: str, **delay: Any) -> Timeout:
    order = Order.objects.using(ledger).create(status="new")
    return dq.schedule_timeout(order, policy, **delay or {"after": timedelta(0)})


def make_ids_overlap(policy: Any) -> None:
    """Make the next timeout of each ledger get the same id."""
    last = next(next_million)
    for ledger in LEDGERS:
        row = schedule(policy, ledger, hours=9)
        row.delete()
        row.pk = last
        Timeout.objects.using(ledger).bulk_create([row])
        with connections[ledger].cursor() as cursor:
            for statement in connections[ledger].ops.sequence_reset_sql(no_style(), [Timeout]):
                cursor.execute(statement)
        row.delete()


def state(row: Timeout) -> str:
    return Timeout.objects.using(row._state.db).get(pk=row.pk).state


def entries(ledger: str) -> int:
    engine = get_engine(ledger)
    assert engine is not None
    return engine.queue("default", 0).stats().total


@pytest.mark.usefixtures("one_redis")
def test_a_worker_leaves_the_entries_of_another_ledger_alone(declare: Declare) -> None:
    policy = declare(Order, name="shard")
    make_ids_overlap(policy)
    worker = RunningWorker(using="default", concurrency=1)
    first = schedule(policy, "default")
    wait_until(lambda: state(first) == "fired", "the worker has started")
    other, own = (schedule(policy, ledger) for ledger in reversed(LEDGERS))
    wait_until(lambda: state(own) == "fired" and not entries("default"), "its own one has fired")
    worker.stop()
    assert (state(other), entries("replica")) == ("pending", 1)
    make_ids_overlap(policy)
    near = schedule(policy, "default", minutes=1)
    dq.cancel_timeout(schedule(policy, "replica", minutes=1))
    assert (state(near), entries("default")) == ("pending", 1)
