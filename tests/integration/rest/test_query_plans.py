"""Each list reads its index in its order, from any place in it, on every database: none sorts or scans the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.utils import timezone

from django_delayq.contrib.rest_framework import inputs
from django_delayq.contrib.rest_framework.inputs import Selection
from django_delayq.ledger import search
from django_delayq.models import Timeout, slot_of
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect]

ROWS = 4000


@pytest.fixture(scope="module")
def rows(django_db_setup: None, django_db_blocker: Any) -> Iterator[int]:
    """A ledger with as many rows that wait as settled ones, and statistics that the planner has seen."""
    with django_db_blocker.unblock():
        kind, now = ContentType.objects.get_for_model(Order).pk, timezone.now()
        made = []
        for number in range(ROWS):
            at = now + timedelta(minutes=number * 7919 % ROWS - ROWS // 2)
            common: dict[str, Any] = {
                "policy": f"some.model.policy{number % 40}",
                "content_type_id": kind,
                "object_id": str(number),
            }
            common |= dict.fromkeys(("due_at", "run_at", "first_due_at", "created_at"), at)
            common |= {"slot": slot_of(f"some.model.policy{number % 40}", kind, str(number), "")}
            common |= {"key": f"k{number}"}
            made.append(Timeout(**common))
            state = "dead" if number % 100 == 0 else "fired"
            made.append(Timeout(**common, state=state, cause="due", settled_at=at, slot_taken=None))
        Timeout.objects.bulk_create(made, batch_size=500)
        _analyze()
        yield kind
        Timeout.objects.all().delete()
        _analyze()


def _analyze() -> None:
    table = connection.ops.quote_name(Timeout._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE TABLE {table}" if connection.vendor == "mysql" else f"ANALYZE {table}")
        if connection.vendor == "mysql":
            cursor.fetchall()


MIDDLE = {"due_from": timezone.now() + timedelta(minutes=100), "settled_from": timezone.now() - timedelta(minutes=99)}
LISTS = [
    ({}, "PRIMARY"),
    ({"state": "pending"}, "delayq_unsettled"),
    ({"overdue": "true"}, "delayq_unsettled"),
    ({"due_from": MIDDLE["due_from"].isoformat()}, "delayq_unsettled"),
    ({"policy": "some.model.policy7", "state": "pending"}, "delayq_policy"),
    ({"settled_from": MIDDLE["settled_from"].isoformat()}, "delayq_settled"),
]


@pytest.mark.django_db
@pytest.mark.parametrize("far", [False, True], ids=["first page", "far page"])
@pytest.mark.parametrize(("query", "index"), LISTS, ids=[",".join(query) or "all" for query, _ in LISTS])
def test_a_list_reads_its_index_in_order(
    monkeypatch: pytest.MonkeyPatch, rows: int, query: dict[str, str], index: str, far: bool
) -> None:
    monkeypatch.setattr(inputs, "MAX_SORTED", 1)  # what has few rows is read by other ways
    found, narrow = Selection.of(query).rows(Timeout.objects.using("default"))
    assert not narrow
    if far:
        found = search.Cursor.at(found[40], search.Order.of(found)).after(found)
    plan = found[:50].explain()
    assert any(word in plan for word in names_of(index)), plan
    if index != "delayq_policy":  # which has few rows of one policy here, and sorting those is as good
        assert not any(word in plan for word in ("Sort", "TEMP B-TREE", "filesort")), plan


@pytest.mark.django_db
def test_few_dead_rows_among_many_settled_are_found_by_their_policies(rows: int) -> None:
    found, narrow = Selection.of({"state": "dead"}).rows(Timeout.objects.using("default"))
    assert not narrow
    assert found.count() == ROWS // 100
    if connection.vendor != "mysql":  # whose plans name indexes that were not taken, too
        assert not any(name in found[:50].explain() for name in ("delayq_settled", "delayq_unsettled", "Seq Scan"))


@pytest.mark.django_db
def test_few_failing_rows_among_many_pending_are_found_by_their_policies(rows: int) -> None:
    failing = Timeout.objects.filter(state="pending", object_id__in=[str(number) for number in range(30)])
    assert failing.update(attempts=2) == 30
    statements = []

    def record(execute: Any, sql: str, *arguments: Any) -> Any:
        statements.append(sql)
        return execute(sql, *arguments)

    with connection.execute_wrapper(record):
        found, narrow = Selection.of({"failing": "true"}).rows(Timeout.objects.using("default"))
    assert not narrow
    assert found.count() == 30
    labels = search.labels_in(Timeout.objects.using("default"))
    assert "delayq_failing" in (plan := Timeout.objects.of_labels(labels).failing()[:501].explain()), plan
    assert not any("COUNT(" in sql for sql in statements)
    if connection.vendor != "mysql":
        assert not any(name in found[:50].explain() for name in ("delayq_unsettled", "Seq Scan"))


@pytest.mark.django_db
@pytest.mark.parametrize(("name", "value"), [("object", "testapp.order:17"), ("key", "k17")])
def test_the_rows_of_one_object_or_key_are_found_by_its_index(rows: int, name: str, value: str) -> None:
    found, _ = Selection.of({name: value}).rows(Timeout.objects.using("default"))
    assert f"delayq_{name}" in found[:50].explain()


def names_of(index: str) -> set[str]:
    """What the databases call an index in their plans."""
    if index != "PRIMARY":
        return {index}
    return {"PRIMARY", "django_delayq_timeout_pkey", "SCAN django_delayq_timeout", "USING INTEGER PRIMARY KEY"}
