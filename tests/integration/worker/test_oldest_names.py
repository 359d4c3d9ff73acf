"""A worker whose policies have another oldest name than the ledger remembers does not start, and names it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.sync import TableSync
from django_delayq.models import PolicySync, Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.policy.policies import registry
from django_delayq.worker import Worker
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("without_redis")]
Deploy = Callable[..., Any]


@pytest.fixture
def deploy(declare: Callable[..., Any]) -> Deploy:
    """`deploy(name, aliases)` replaces the policy of this process, as another release does."""
    declared: list[Any] = []

    def do(name: str, aliases: Sequence[str] = (), *, beside: bool = False) -> Any:
        while declared and not beside:
            registry.remove(declared.pop())
        options: Any = {"since": "created_at", "after": timedelta(hours=1), "when": Q(status="new")}
        declared.append(declare(Order, name=name, aliases=aliases, **options))
        return declared[-1]

    return do


def work() -> None:
    Worker(burst=True).run()


def row() -> Any:
    return vars(Timeout.objects.get()) | {"_state": None}


def new_order() -> Order:
    return Order.objects.create(status="new", created_at=timezone.now())


@pytest.fixture
def renamed(deploy: Deploy) -> Order:
    """Return an order whose timeout was scheduled after the policy "dun" was renamed to "chase"."""
    deploy("dun")
    work()
    deploy("chase", ["dun"])
    work()
    return new_order()


@pytest.mark.parametrize(
    ("name", "aliases"),
    [("chase", []), ("collect", ["chase", "dun"]), ("collect", ["sales.order.dun", "chase"])],
    ids=str,
)
def test_a_worker_that_would_not_find_the_timeouts_is_refused(
    renamed: Order, deploy: Deploy, name: str, aliases: list[str]
) -> None:
    before = row()
    policy = deploy(name, aliases)
    oldest = f"oldest name is '{policy.oldest_label}', but was 'testapp.order.dun'"
    with pytest.raises(CommandError, match=rf"{oldest}.*\. Put 'testapp.order.dun' first in aliases=") as raised:
        call_command("delayq_worker", "--burst", verbosity=0)
    assert raised.value.returncode == 3
    with pytest.raises(SystemCheckError, match=rf"E025.*{oldest}"):
        call_command("check", databases=["default"])
    assert any(oldest in finding.msg for finding in examine(quick=True) if finding.id == "names")
    with pytest.raises(dq.PolicyError, match=oldest):  # of a worker whose database was replaced
        TableSync("default").run()
    assert row() == before


def test_timeouts_that_still_have_the_former_name_count(deploy: Deploy) -> None:
    deploy("dun")
    new_order()
    deploy("chase", ["dun"])
    work()
    deploy("chase")
    with pytest.raises(dq.PolicyError, match="Put 'testapp.order.dun' first"):
        work()


def test_policies_that_both_have_timeouts_are_not_joined(deploy: Deploy) -> None:
    deploy("dun")
    deploy("chase", beside=True)
    work()
    new_order()
    deploy("collect", ["dun", "chase"])
    with pytest.raises(dq.PolicyError, match=r"'testapp.order.chase'.*If it was another policy, declare it by itself"):
        work()
    Timeout.objects.filter(policy="testapp.order.chase").delete()
    work()
    assert Timeout.objects.get().policy == "testapp.order.dun"


def test_an_alias_may_be_removed_when_the_ledger_has_no_timeouts_of_the_policy(renamed: Order, deploy: Deploy) -> None:
    dq.cancel_timeout(renamed, "chase")
    policy = deploy("chase")
    with pytest.raises(dq.PolicyError):
        work()
    Timeout.objects.all().delete()
    work()
    assert PolicySync.objects.get(policy=policy.label).oldest_label == policy.label
    new_order()
    work()
    assert Timeout.objects.count() == 1
