"""Retire: pending rows of a policy that is not declared any more are cancelled; others stay."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from django.core.management import CommandError

from django_delayq import UnknownPolicy, explain_timeout
from django_delayq.models import PolicyChange, Timeout
from django_delayq.operations import PolicyConflict, retire
from tests.integration.commands.conftest import Do, do, typing  # noqa: F401 - fixtures
from tests.integration.operations.conftest import BY, as_if, dead, many, pending, said
from tests.integration.operations.names import FORGOTTEN, REMIND, Declare
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


def forgotten(count: int = 1) -> list[Timeout]:
    rows = many(count)
    Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(policy=FORGOTTEN)
    return rows


def states() -> list[tuple[str, str]]:
    return list(Timeout.objects.order_by("pk").values_list("state", "cause"))


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


def test_the_command_asks_for_many_and_retires(do: Do, typing: Callable[[str | None], None]) -> None:  # noqa: F811
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
