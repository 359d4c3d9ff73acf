"""What operators ask of a ledger of any size is answered by an index, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models import QuerySet
from django.utils import timezone

from django_delayq.models import Timeout, slot_of
from django_delayq.operations.selection import CONDITIONS
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect]

ROWS = 2_000
# The policy asked about is rare: were it a quarter of all rows, PostgreSQL could as cheaply read another index.
REMIND, OTHERS = "testapp.order.remind", ("linger", "cancel_unpaid", "forgotten")


@pytest.fixture(scope="module")
def ledger(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Rows of several policies, pending and settled, and statistics that the planner has seen."""
    with django_db_blocker.unblock():
        now = timezone.now()
        kind = ContentType.objects.get_for_model(Order).pk
        rows = []
        for number in range(ROWS):
            label = REMIND if number % 20 == 0 else f"testapp.order.{OTHERS[number % 3]}"
            moment = now + timedelta(minutes=number - ROWS // 2)
            common = {
                "policy": label, "content_type_id": kind, "object_id": str(number), "created_at": now,
                "due_at": moment, "run_at": moment, "first_due_at": moment, "attempts": number % 80 == 0,
                "slot": slot_of(label, kind, str(number), ""), "queue": "rare" if number % 100 == 7 else "default",
            }  # fmt: skip
            rows.append(Timeout(**common))
            state, cause = ("dead", "retries") if number % 60 == 0 else ("fired", "due")
            rows.append(Timeout(**common, state=state, cause=cause, settled_at=moment, slot_taken=None))
        Timeout.objects.bulk_create(rows, batch_size=500)
        analyze()
        yield
        Timeout.objects.all().delete()
        analyze()


def analyze() -> None:
    table = connection.ops.quote_name(Timeout._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE TABLE {table}" if connection.vendor == "mysql" else f"ANALYZE {table}")


def rows_of(state: str, **conditions: Any) -> QuerySet[Any]:
    return Timeout.objects.filter(policy=REMIND, state=state, **conditions).order_by("policy", "state", "run_at", "id")


def queued(state: str) -> QuerySet[Any]:
    rows = Timeout.objects.filter(CONDITIONS["queue"]("rare"), state=state).order_by("run_at", "id")
    return rows.defer("history", "payload")[:51]


def failing() -> QuerySet[Any, Any]:
    rows = Timeout.objects.filter(policy=REMIND).failing()
    return rows.order_by("policy", "state", "attempts", "id").values("pk")[:10_001]


POLICY, QUEUE, FAILING = "delayq_policy", "delayq_queue", "delayq_failing"
READS: dict[str, tuple[str, Callable[[], QuerySet[Any, Any]]]] = {
    "due of a policy": (POLICY, lambda: rows_of("pending", run_at__lte=timezone.now()).values("pk")[:100]),
    "dead of a policy": (POLICY, lambda: rows_of("dead").values("pk")[:100]),
    "late firings of a policy": (
        POLICY, lambda: rows_of("fired", run_at__lt=timezone.now()).reverse().values("settled_at")[:100]
    ),
    "the next label": (
        POLICY, lambda: Timeout.objects.filter(policy__gt="testapp.order.l").order_by("policy").values("policy")[:1]
    ),
    # As `delayq_list --queue` reads it: at 1,000,000 rows, the index of all unsettled rows took a second.
    "a rare queue": (QUEUE, lambda: queued("pending")),
    "a rare queue, settled": (QUEUE, lambda: queued("fired")),
    # Of 1,000,000 pending rows of a policy some dozens may fail.
    "failing": (FAILING, failing),
}  # fmt: skip
"""What is asked, and the index that answers."""


@pytest.mark.django_db
def test_what_is_asked_of_a_policy_or_a_rare_queue_is_answered_by_its_index(ledger: None) -> None:
    for name, (index, read) in READS.items():
        plan = read().explain()
        assert index in plan, (name, plan)
        if index == POLICY and "Bitmap Index Scan on delayq_policy" not in plan:  # which sorts a few rows
            assert not any(word in plan for word in ("Sort", "filesort", "USE TEMP B-TREE")), (name, plan)
    assert Timeout.objects.filter(CONDITIONS["queue"]("rare")).count() == 2 * ROWS // 100
    assert failing().count() == ROWS // 80
