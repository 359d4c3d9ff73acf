"""Each list reads its index in its order, from any place in it, on every database: none sorts or scans the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq.contrib.rest_framework import inputs
from django_delayq.contrib.rest_framework.inputs import Selection
from django_delayq.ledger import search
from django_delayq.models import Timeout
from tests.support.plans import SORTING, ledger_of, planned_row
from tests.support.typed import Patch
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.dialect]

ROWS = 4000


@pytest.fixture(scope="module")
def rows(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """As many rows that wait as settled ones."""
    with django_db_blocker.unblock():
        kind, now, made = ContentType.objects.get_for_model(Order).pk, timezone.now(), []
    for number in range(ROWS):
        at = now + timedelta(minutes=number * 7919 % ROWS - ROWS // 2)
        settled: dict[str, Any] = {"state": "dead" if number % 100 == 0 else "fired", "cause": "due", "settled_at": at}
        about = (f"some.model.policy{number % 40}", kind, number, at, f"k{number}")
        made += [planned_row(*about), planned_row(*about, **settled, slot_taken=None)]
    with ledger_of(made, django_db_blocker):
        yield


def selected(**query: str) -> tuple[Any, Any]:
    return Selection.of(query).rows(Timeout.objects.using("default"))


def moment(minutes: int) -> str:
    return (timezone.now() + timedelta(minutes=minutes)).isoformat()


PRIMARY = ("PRIMARY", "django_delayq_timeout_pkey", "SCAN django_delayq_timeout", "USING INTEGER PRIMARY KEY")
LISTS: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({}, PRIMARY),
    ({"state": "pending"}, ("delayq_unsettled",)),
    ({"overdue": "true"}, ("delayq_unsettled",)),
    ({"due_from": moment(100)}, ("delayq_unsettled",)),
    ({"policy": "some.model.policy7", "state": "pending"}, ("delayq_policy",)),
    ({"settled_from": moment(-99)}, ("delayq_settled",)),
]


@pytest.mark.django_db
@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("far", [False, True], ids=["first page", "far page"])
@pytest.mark.parametrize(("query", "index"), LISTS, ids=[",".join(query) or "all" for query, _ in LISTS])
def test_a_list_reads_its_index_in_order(
    monkeypatch: Patch, query: dict[str, str], index: tuple[str, ...], far: bool
) -> None:
    monkeypatch.setattr(inputs, "MAX_SORTED", 1)  # what has few rows is read by other ways
    found, narrow = selected(**query)
    assert not narrow
    if far:
        found = search.Cursor.at(found[40], search.Order.of(found)).after(found)
    plan = found[:50].explain()
    assert any(word in plan for word in index), plan
    if index != ("delayq_policy",):  # which has few rows of one policy here, and sorting those is as good
        assert not any(word in plan for word in SORTING), plan


@pytest.mark.django_db
@pytest.mark.usefixtures("rows")
def test_few_rows_among_many_are_found_by_their_policies() -> None:
    failing = Timeout.objects.filter(state="pending", object_id__in=[str(number) for number in range(30)])
    assert failing.update(attempts=2) == 30
    with CaptureQueriesContext(connection) as captured:
        of_failing, of_dead = (selected(**query) for query in ({"failing": "true"}, {"state": "dead"}))
        assert not of_failing[1] and not of_dead[1]
    assert not any("COUNT(" in query["sql"] for query in captured.captured_queries)
    for (found, _), count in ((of_failing, 30), (of_dead, ROWS // 100)):
        assert found.count() == count
        if connection.vendor != "mysql":  # whose plans name indexes that were not taken, too
            plan = found[:50].explain()
            assert not any(name in plan for name in ("delayq_settled", "delayq_unsettled", "Seq Scan")), plan
    labels = search.labels_in(Timeout.objects.using("default"))
    assert "delayq_failing" in (plan := Timeout.objects.of_labels(labels).failing()[:501].explain()), plan
