"""Adopt: a copied database becomes one's own, with each option, and workers start on it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import CommandError
from django.utils import timezone

from django_delayq import DelayqError, before_deadline
from django_delayq.conf import ConfigError
from django_delayq.exceptions import WrongInstallation
from django_delayq.models import Installation, PolicySync, Timeout, WorkerSeen
from django_delayq.operations import Adoption, Result, adopt, retry
from django_delayq.redis_clients import get_engine, get_worker_engine, key_prefix
from django_delayq.worker import Worker
from tests.integration.commands.conftest import Do, do, typing  # noqa: F401 - fixtures
from tests.integration.operations.conftest import BY, as_if, dead, pending, said
from tests.testapp.models import Effect, Order

if TYPE_CHECKING:
    import redis
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def copied(settings: Settings) -> None:
    """A ledger of production under the settings of staging."""
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "staging"}
    Installation.objects.create(name="production", since_at=timezone.now())


def seen(seconds_ago: float) -> None:
    at = timezone.now() - timedelta(seconds=seconds_ago)
    WorkerSeen.objects.create(
        id="1", host="far", pid=1, concurrency=4, version="1", uses_redis=True, started_at=at, seen_at=at, passed_at=at
    )


def keys() -> dict[int, str]:
    return dict(Timeout.objects.values_list("pk", "idempotency_key"))


def ledger() -> list[tuple[Any, ...]]:
    return list(Timeout.objects.order_by("pk").values_list("pk", "state", "idempotency_key", "history", "settled_at"))


def test_pending_and_firing_rows_are_cancelled_and_workers_start(order: Order) -> None:
    row, firing = pending(order, seconds=0), as_if(pending(Order.objects.create(), "send_outside"), "firing")
    fired = as_if(pending(Order.objects.create()), "fired", "due")
    assert adopt(by=BY, reason="a restored dump", pending="cancel") == Adoption("production", "staging", cancelled=2)
    for each in (row, firing):
        assert said(each) == [("cancel_requested", BY, "a restored dump")]
        assert (each.state, each.cause, each.reason) == ("cancelled", "hand", "a restored dump")
    assert said(fired) == []
    assert Installation.objects.get().name == "staging"
    Worker(burst=True).run()
    assert not Effect.objects.exists()


def test_kept_rows_get_new_keys_and_fire(order: Order) -> None:
    pending(order, seconds=0)
    firing = as_if(pending(Order.objects.create(), "send_outside"), "firing")
    before = keys()
    assert adopt(by=BY, pending="keep") == Adoption("production", "staging", renewed=2)
    assert not set(keys().values()) & set(before.values())
    assert said(firing) == [("adopted", BY, "")]
    Worker(burst=True).run()
    assert Effect.objects.get(what="remind").object_id == str(order.pk)


@pytest.mark.parametrize("option", ["cancel", "keep"])
def test_dead_rows_stay_dead_with_new_keys_as_they_may_be_retried(order: Order, option: Any) -> None:
    row, fired = dead(order), as_if(pending(Order.objects.create()), "fired", "due")
    before = keys()
    assert adopt(by=BY, pending=option) == Adoption("production", "staging", renewed=1)
    row.refresh_from_db()
    assert row.state == "dead" and row.idempotency_key != before[row.pk]
    assert keys()[fired.pk] == before[fired.pk]
    assert retry(row, by=BY).changed == 1


def test_pending_rows_need_a_decision(order: Order) -> None:
    pending(order)
    before = ledger()
    with pytest.raises(DelayqError, match="has 1 pending timeout: give --cancel-pending or --keep-pending"):
        adopt(by=BY)
    assert ledger() == before and Installation.objects.get().name == "production"
    as_if(Timeout.objects.get(), "fired", "due")
    assert adopt(by=BY) == Adoption("production", "staging")


def test_heartbeats_and_claims_of_the_copied_workers_are_removed() -> None:
    seen(3600)
    PolicySync.objects.create(policy="testapp.order.cancel_unpaid", claimed_until=timezone.now() + timedelta(hours=1))
    adopt(by=BY)
    assert not WorkerSeen.objects.exists()
    assert PolicySync.objects.get().claimed_until is None


@pytest.mark.parametrize("option", ["cancel", "keep"])
def test_a_call_that_dies_leaves_a_ledger_that_is_refused_and_is_continued(
    option: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 4)
    for _ in range(10):
        pending(Order.objects.create())
    before = keys()

    def die(page: Result) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adopt(by=BY, pending=option, progress=die)
    assert Installation.objects.get().name == "production"
    with pytest.raises(WrongInstallation):
        Worker(burst=True).run()
    adopt(by=BY, pending=option)
    assert Installation.objects.get().name == "staging"
    if option == "cancel":
        assert Timeout.objects.filter(state="cancelled").count() == 10
    else:
        assert not set(keys().values()) & set(before.values())


def test_a_ledger_of_ones_own_is_left_alone(order: Order) -> None:
    Installation.objects.update(name="staging")
    pending(order)
    before = ledger()
    assert adopt(by=BY, pending="cancel") == Adoption("staging", "staging")
    assert ledger() == before


def test_without_a_name_of_its_own_nothing_is_adopted(order: Order, settings: Settings) -> None:
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": None}
    pending(order)
    before = ledger()
    with pytest.raises(ConfigError, match="INSTALLATION"):
        adopt(by=BY, pending="cancel")
    assert ledger() == before


def test_a_dry_run_counts_and_changes_nothing(order: Order) -> None:
    pending(order), dead(Order.objects.create())
    before = ledger()
    assert adopt(by=BY, pending="cancel", dry_run=True) == Adoption("production", "staging", 1, 1)
    assert adopt(by=BY, pending="keep", dry_run=True) == Adoption("production", "staging", 0, 2)
    assert ledger() == before and Installation.objects.get().name == "production"


def test_entries_of_another_installation_in_redis_are_not_removed(
    order: Order, redis_client: redis.Redis, settings: Settings
) -> None:
    """Both ledgers have a row with this id; the entry belongs to production."""
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "production"}
    row = pending(order, seconds=30)
    entries = f"{key_prefix('default')}:{{default.0}}:l:{row.policy}"
    assert redis_client.zrange(entries, 0, -1) == [str(row.pk).encode()]
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "staging"}
    adopt(by=BY, pending="cancel")
    assert redis_client.zrange(entries, 0, -1) == [str(row.pk).encode()]


def test_a_redis_that_does_not_answer_does_not_prevent_the_adoption(settings: Settings, order: Order) -> None:
    pending(order)
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
    assert adopt(by=BY, pending="cancel") == Adoption("production", "staging", cancelled=1)


def test_an_unknown_option_is_refused_and_changes_nothing(order: Order) -> None:
    pending(order)
    before = ledger()
    with pytest.raises(ValueError, match="not 'drop'"):
        adopt(by=BY, pending="drop")  # type: ignore[arg-type]
    assert ledger() == before and Installation.objects.get().name == "production"


def test_without_redis_the_ledger_is_adopted(without_redis: None, order: Order) -> None:
    assert get_engine("default") is None and get_worker_engine("default") is None
    pending(order)
    assert adopt(by=BY, pending="cancel").cancelled == 1


def test_a_customer_can_still_pay_in_a_copy_where_all_was_cancelled(order: Order) -> None:
    pending(order)
    adopt(by=BY, pending="cancel")
    with before_deadline(order, "remind"):
        order.save()


@pytest.mark.parametrize("option", ["cancel", "keep"])
def test_the_command_does_it_and_asks_for_many(
    do: Do,  # noqa: F811
    typing: Callable[[str | None], None],  # noqa: F811
    option: str,
) -> None:
    for _ in range(11):
        pending(Order.objects.create())
    with pytest.raises(CommandError, match="--cancel-pending or --keep-pending"):
        do("delayq_adopt")
    with pytest.raises(CommandError, match=f"{option} 11 timeouts. Without a terminal"):
        do("delayq_adopt", f"--{option}-pending")
    assert Installation.objects.get().name == "production"
    typing("y\n")
    output = do("delayq_adopt", f"--{option}-pending", "--reason", "a dump").out
    counts = {"cancel": (11, 0), "keep": (0, 11)}[option]
    words = "staging adopted the database of production: {} timeouts cancelled, {} idempotency keys renewed"
    assert words.format(*counts) in output
    assert Timeout.objects.order_by("pk")[0].history[-1]["by"].startswith("cli:")
    assert "already: no timeout was changed" in do("delayq_adopt", f"--{option}-pending").out


def test_the_command_takes_one_of_the_options() -> None:
    from django.core.management import call_command

    with pytest.raises(CommandError, match="not allowed with"):
        call_command("delayq_adopt", "--cancel-pending", "--keep-pending")


def test_the_command_is_refused_while_workers_use_the_database(do: Do, order: Order) -> None:  # noqa: F811
    """Settings of staging with the database of production would otherwise cancel all timeouts of production."""
    pending(order)
    seen(5)
    with pytest.raises(CommandError, match="1 worker has used this database within the last 20 seconds"):
        do("delayq_adopt", "--cancel-pending")
    assert Installation.objects.get().name == "production"
    do("delayq_adopt", "--cancel-pending", "--yes")
    assert Installation.objects.get().name == "staging"
