"""Adopt: a copied database becomes one's own, with each option, and workers start on it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_delayq import DelayqError, before_deadline
from django_delayq.conf import ConfigError
from django_delayq.exceptions import WrongInstallation
from django_delayq.models import Installation, Timeout, WorkerSeen
from django_delayq.operations import Adoption, adopt, retry
from django_delayq.worker import Worker
from tests.integration.management.conftest import Do, Types, do, typing  # noqa: F401 - fixtures
from tests.integration.operations.conftest import BY, as_if, contents, dead, die, many, pending, said
from tests.integration.operations.names import PagesOf
from tests.testapp.models import Effect, Order

if TYPE_CHECKING:
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


def owner() -> str:
    return str(Installation.objects.get().name)


def keys() -> dict[int, str]:
    return dict(Timeout.objects.values_list("pk", "idempotency_key"))


@pytest.mark.parametrize("option", ["cancel", "keep"])
def test_pending_and_firing_rows_are_cancelled_or_get_new_keys_and_workers_start(order: Order, option: Any) -> None:
    row, firing = pending(order, seconds=0), as_if(pending(Order.objects.create(), "send_outside"), "firing")
    fired, died = as_if(pending(Order.objects.create()), "fired", "due"), dead(Order.objects.create())
    before, rows = keys(), contents()
    done = Adoption("production", "staging", *{"cancel": (2, 1), "keep": (0, 3)}[option])
    assert adopt(by=BY, reason="a dump", pending=option, dry_run=True) == done
    assert contents() == rows and owner() == "production"
    assert adopt(by=BY, reason="a dump", pending=option) == done
    renewed = {pk for pk, key in keys().items() if before[pk] != key}
    assert said(fired) == [] and owner() == "staging"
    if option == "cancel":
        for each in (row, firing):
            assert said(each) == [("cancel_requested", BY, "a dump")]
            assert (each.state, each.cause, each.reason) == ("cancelled", "hand", "a dump")
        assert renewed == {died.pk}
        with before_deadline(order, "remind"):  # a customer can still pay in the copy
            order.save()
    else:
        assert renewed == {row.pk, firing.pk, died.pk} and said(firing) == [("adopted", BY, "a dump")]
    Worker(burst=True).run()
    assert Effect.objects.filter(what="remind").count() == (option == "keep")
    assert retry(died, by=BY).changed == 1, "the dead stay so, and may be retried"


def test_pending_rows_need_a_decision(order: Order) -> None:
    pending(order)
    before = contents()
    with pytest.raises(DelayqError, match="has 1 pending timeout: give --cancel-pending or --keep-pending"):
        adopt(by=BY)
    with pytest.raises(ValueError, match="not 'drop'"):
        adopt(by=BY, pending="drop")  # type: ignore[arg-type]
    assert contents() == before and owner() == "production"
    as_if(Timeout.objects.get(), "fired", "due")
    assert adopt(by=BY) == Adoption("production", "staging")


@pytest.mark.parametrize("option", ["cancel", "keep"])
def test_a_call_that_dies_leaves_a_ledger_that_is_refused_and_is_continued(pages_of: PagesOf, option: Any) -> None:
    pages_of(4)
    many(10)
    before = keys()
    with pytest.raises(KeyboardInterrupt):
        adopt(by=BY, pending=option, progress=die)
    assert owner() == "production"
    with pytest.raises(WrongInstallation):
        Worker(burst=True).run()
    adopt(by=BY, pending=option)
    assert owner() == "staging"
    assert option == "cancel" or not set(keys().values()) & set(before.values())


def test_ones_own_ledger_is_left_alone_and_without_a_name_nothing_is_adopted(order: Order, settings: Settings) -> None:
    pending(order)
    before = contents()
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": None}
    with pytest.raises(ConfigError, match="INSTALLATION"):
        adopt(by=BY, pending="cancel")
    settings.DELAYQ = {**settings.DELAYQ, "INSTALLATION": "production"}
    assert adopt(by=BY, pending="cancel") == Adoption("production", "production")
    assert contents() == before


def test_the_command_does_it_and_asks_for_many(do: Do, typing: Types) -> None:  # noqa: F811
    many(11)
    with pytest.raises(CommandError, match="--cancel-pending or --keep-pending"):
        do("delayq_adopt")
    with pytest.raises(CommandError, match="not allowed with"):
        call_command("delayq_adopt", "--cancel-pending", "--keep-pending")
    with pytest.raises(CommandError, match="keep 11 timeouts. Without a terminal"):
        do("delayq_adopt", "--keep-pending")
    assert owner() == "production"
    typing("y\n")
    output = do("delayq_adopt", "--keep-pending", "--reason", "a dump").out
    assert "staging adopted the database of production: 0 timeouts cancelled, 11 idempotency keys renewed" in output
    assert Timeout.objects.order_by("pk")[0].history[-1]["by"].startswith("cli:")
    assert "already: no timeout was changed" in do("delayq_adopt", "--keep-pending").out


def test_the_command_is_refused_while_workers_use_the_database(do: Do, order: Order) -> None:  # noqa: F811
    """Settings of staging with the database of production would otherwise cancel all timeouts of production."""
    pending(order)
    seen(5)
    with pytest.raises(CommandError, match="1 worker has used this database within the last 10 seconds"):
        do("delayq_adopt", "--cancel-pending")
    assert owner() == "production"
    do("delayq_adopt", "--cancel-pending", "--yes")
    assert owner() == "staging"
