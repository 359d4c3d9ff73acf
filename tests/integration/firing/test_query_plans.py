"""What a firing with `batch_by` reads of a long ledger: the due rows of one value, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from django_delayq import TimeoutPolicy, timeout_policy
from django_delayq.firing.gathering import Gathering
from django_delayq.firing.report import ReportBuilder
from django_delayq.firing.works import RunningWork, Work
from django_delayq.ledger.shares import provide_lock
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from tests.integration.worker.test_query_plans import check, many_rows, plans_of
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db, pytest.mark.timeout(600)]
OWNERS = 4_999
"""Each has some twenty due rows, and as many others. The last one has a hundredth of all rows."""


@pytest.fixture(scope="module", autouse=True)
def ledger_of_owners(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Of each owner some rows are settled, some due, and some due later."""
    text = "CHAR(20)" if connection.vendor == "mysql" else "varchar(20)"
    with many_rows(django_db_blocker, f"CAST(CASE WHEN n % 100 = 99 THEN {OWNERS} ELSE n % {OWNERS} END AS {text})"):
        yield


@pytest.fixture(params=[(), ("reminded",)], ids=["one name", "two names"])
def policy(request: pytest.FixtureRequest) -> Iterator[TimeoutPolicy[Any]]:
    registry.remove(before := registry.get("testapp.order.remind"))  # type: ignore[arg-type]
    options: dict[str, Any] = {"batch": 500, "batch_by": "status", "aliases": request.param}
    declared: TimeoutPolicy[Any] = timeout_policy(Order, name="remind", **options)(lambda orders, timeouts: None)
    yield declared
    registry.remove(declared)
    registry.add(before)  # type: ignore[arg-type]


def gathered(policy: TimeoutPolicy[Any], owner: str) -> list[int]:
    work = Work(policy.label, (-1,), ("-1",), share=owner)
    provide_lock(policy, owner, "default")
    gathering = Gathering(RunningWork(work, "default", ReportBuilder(), policy), work)
    return [candidate.id for candidate in gathering.gather()]


@pytest.mark.parametrize("owner", ["17", str(OWNERS), "unknown"])
def test_the_due_rows_of_one_value_are_read_from_its_index(policy: TimeoutPolicy[Any], owner: str) -> None:
    due = Timeout.objects.due().filter(share=owner).count()
    assert (due == 0) == (owner == "unknown")
    assert len(gathered(policy, owner)) == min(due, 500)
    # Of few rows PostgreSQL reads all, and sorts them.
    check(plans_of(lambda: gathered(policy, owner)), "delayq_share", is_short=due < 500)
