"""Retire: pending rows of a policy that is not declared any more are cancelled; others stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError

from django_delayq import TimeoutPolicy, UnknownPolicy, explain_timeout
from django_delayq.models import PolicyChange, Timeout
from django_delayq.operations import PolicyConflict, Result, retire
from tests.integration.commands.conftest import Do, do, typing  # noqa: F401 - fixtures
from tests.integration.operations.conftest import BY, as_if, dead, pending, said
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
LABEL = "testapp.order.forgotten"


def forgotten(count: int = 1) -> list[Timeout]:
    rows = [pending(Order.objects.create()) for _ in range(count)]
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(policy=LABEL)
    return rows


def states() -> list[tuple[str, str]]:
    return list(Timeout.objects.order_by("pk").values_list("state", "cause"))


def test_pending_rows_are_cancelled_and_the_others_stay(order: Order) -> None:
    (row,) = forgotten()
    as_if(dead(Order.objects.create()), "dead", "retries", policy=LABEL)
    as_if(pending(Order.objects.create()), "firing", policy=LABEL)
    pending(order)
    result = retire(LABEL, by=BY, reason="the feature is gone")
    assert (result.verb, result.changed, result.ids) == ("retire", 1, (row.pk,))
    assert states() == [("cancelled", "retired"), ("dead", "retries"), ("firing", ""), ("pending", "")]
    assert said(row) == [("retired", BY, "the feature is gone")]
    assert "its policy was retired" in str(explain_timeout(row))


def test_the_undeclared_policies_are_named_if_no_timeout_has_the_label(order: Order) -> None:
    forgotten()
    pending(order)
    words = f"No timeout has the policy 'testapp.order.fogotten'. Not declared, but in the ledger: {LABEL}."
    with pytest.raises(UnknownPolicy, match=f"^{re.escape(words)}$"):
        retire("testapp.order.fogotten", by=BY)


def test_it_is_audited_once_with_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 4)
    forgotten(10)
    assert retire(LABEL, by=BY, reason="gone").changed == 10
    change = PolicyChange.objects.get()
    assert (change.policy, change.what, change.by, change.reason) == (LABEL, "retired", BY, "gone")
    assert change.moved == 10 and change.finished_at is not None
    assert retire(LABEL, by=BY).changed == 0
    assert PolicyChange.objects.count() == 1, "nothing was changed, so nothing is audited"


def test_a_call_that_dies_is_audited_as_far_as_it_came_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 4)
    forgotten(10)

    def die(page: Result) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retire(LABEL, by=BY, progress=die)
    assert PolicyChange.objects.get().moved == 4 == Timeout.objects.filter(cause="retired").count()
    assert retire(LABEL, by=BY).changed == 6
    assert sum(PolicyChange.objects.values_list("moved", flat=True)) == 10


@pytest.mark.parametrize("label", ["testapp.order.remind", "testapp.order.former"])
def test_a_declared_policy_is_refused_also_by_an_alias(
    order: Order, declare: Callable[..., TimeoutPolicy[Any]], label: str
) -> None:
    declare(Order, name="current", aliases=("former",))
    pending(order)
    Timeout.objects.update(policy=label)
    with pytest.raises(PolicyConflict, match=r"testapp\.order\.(remind|current) is declared"):
        retire(label, by=BY)
    assert states() == [("pending", "")] and not PolicyChange.objects.exists()


def test_an_unknown_label_is_an_error(order: Order) -> None:
    pending(order)
    with pytest.raises(UnknownPolicy):
        retire("testapp.order.remnid", by=BY)


def test_a_dry_run_only_counts() -> None:
    forgotten(3)
    assert retire(LABEL, by=BY, dry_run=True).changed == 3
    assert states() == [("pending", "")] * 3 and not PolicyChange.objects.exists()


def test_the_command_asks_for_many_and_retires(do: Do, typing: Callable[[str | None], None]) -> None:  # noqa: F811
    forgotten(11)
    with pytest.raises(CommandError, match="11 timeouts. Without a terminal"):
        do("delayq_retire", LABEL)
    assert do("delayq_retire", LABEL, "--dry-run").out == f"{LABEL}: 11 cancelled (dry run: nothing was changed)\n"
    typing("y\n")
    assert do("delayq_retire", LABEL, "--reason", "gone").out.endswith(f"{LABEL}: 11 cancelled\n")
    assert PolicyChange.objects.get().by.startswith("cli:")
    with pytest.raises(CommandError, match="is declared"):
        do("delayq_retire", "testapp.order.remind")
