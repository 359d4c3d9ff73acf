"""Each list of the admin and of REST is read through its index, in its order: no database scans or sorts the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq.admin import changelist, filters, mixins
from django_delayq.contrib.rest_framework import inputs
from django_delayq.ledger import search
from django_delayq.models import Timeout
from tests.support.plans import SORTING, ledger_of, plan_of, planned_row
from tests.support.typed import Patch
from tests.testapp.models import Order, Voucher

pytestmark = [pytest.mark.slow, pytest.mark.dialect]

ROWS = 6000
# One policy is rare: what is asked of one that has a third of all rows, PostgreSQL reads as cheaply from another index,
# and which of the two it takes changes with the sample of its statistics.
RARE, OTHERS = "testapp.order.remind", ("testapp.order.cancel_unpaid", "testapp.parcel.chase")
SETTLED = {"fired": "due", "cancelled": "hand", "dead": "retries"}
STATES = ["pending", "pending", "pending", "fired", "cancelled", "dead"]


@pytest.fixture(scope="module", autouse=True)
def ledger(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Rows of several policies in several states, over two months."""
    with django_db_blocker.unblock():
        order, voucher = (ContentType.objects.get_for_model(model).pk for model in (Order, Voucher))
    rows = [_row(number, order) for number in range(ROWS)]
    rows += [_row(ROWS + number, voucher, "testapp.voucher.expire") for number in range(ROWS // 12)]
    with ledger_of(rows, django_db_blocker):
        yield


def _row(number: int, kind: int, label: str = "") -> Timeout:
    state, label = STATES[number % 6], label or (RARE if number % 11 == 0 else OTHERS[number // 7 % 2])
    due = timezone.now() + timedelta(minutes=number * 7919 % 86400 - 43200)
    settled = {"settled_at": due, "cause": SETTLED[state], "slot_taken": None} if state in SETTLED else {}
    return planned_row(label, kind, number, due, f"key-{number}" if number % 50 == 0 else "", state=state, **settled)


def ledger_rows() -> Any:
    return Timeout.objects.using("default")


def windows(**params: str) -> Callable[[], object]:
    """Each read of the first window for what an address asks, and of the second one."""

    def read() -> None:
        for scan in filters.scans(params, ledger_rows()):
            first = changelist.read_window(scan)
            if first.further:
                changelist.read_window(scan, first.further)

    return read


def filtered(value: str) -> Callable[[], object]:
    """What the filter of the mixin reads for the list of a model with few timeouts."""
    return lambda: mixins._objects_condition(Voucher, value, Timeout.objects.all())


TODAY = timezone.localdate()
YEAR = {"due_at__gte": f"{TODAY.year}-01-01", "due_at__lt": f"{TODAY.year + 1}-01-01"}
READS: list[tuple[Callable[[], object], str]] = [
    (windows(state__exact="pending"), "delayq_unsettled"),
    (windows(due="overdue"), "delayq_unsettled"),
    (windows(due="failing"), "delayq_unsettled"),  # and `delayq_failing`: see below
    (windows(due="failing", policy=RARE), "delayq_policy"),
    (windows(state__exact="fired"), "delayq_settled"),
    (windows(due="dead"), "delayq_settled"),
    *(
        (windows(policy=RARE, **more), "delayq_policy")
        for more in ({"state__exact": "pending"}, {"state__exact": "dead"}, {})
    ),
    (windows(**YEAR), "delayq_due"),
    *((filtered(value), "delayq_policy") for value in ("dead", "hour", "overdue", "waiting")),
    (lambda: filters.urgent(ledger_rows()), "delayq_unsettled"),
    (lambda: search.labels_in(ledger_rows()), "delayq_policy"),
    (lambda: search.distinct(ledger_rows(), "content_type_id", "object_id", limit=9), "delayq_object"),
    (lambda: list(Timeout.objects.of_key("key-50").order_by("-id").values_list("pk", flat=True)[:9]), "delayq_key"),
]


@pytest.mark.django_db
@pytest.mark.parametrize(("call", "index"), READS)
def test_a_read_of_the_list_goes_through_its_index(monkeypatch: Patch, call: Callable[[], object], index: str) -> None:
    for module, name in ((changelist, "WINDOW"), (filters, "CHUNK"), (mixins, "MAX_OBJECTS")):
        monkeypatch.setattr(module, name, 8)
    with CaptureQueriesContext(connection) as captured:
        call()
    looks = [query["sql"] for query in captured if "django_delayq_timeout" in query["sql"]]
    assert looks
    for sql in looks:
        plan = plan_of(sql)
        if "Impossible WHERE" in plan:  # MariaDB has searched the index already, and found no row
            continue
        assert any(name in plan for name in (index, "delayq_policy", "delayq_failing")), (sql, plan)
        if index != "delayq_key":  # the few rows of one key may be sorted
            assert not any(word in plan for word in SORTING), (sql, plan)


def moment(minutes: int) -> str:
    return (timezone.now() + timedelta(minutes=minutes)).isoformat()


PRIMARY = ("PRIMARY", "django_delayq_timeout_pkey", "SCAN django_delayq_timeout", "USING INTEGER PRIMARY KEY")
REST_LISTS: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({}, PRIMARY),
    ({"state": "pending"}, ("delayq_unsettled",)),
    ({"overdue": "true"}, ("delayq_unsettled",)),
    ({"due_from": moment(100)}, ("delayq_unsettled",)),
    ({"policy": RARE, "state": "pending"}, ("delayq_policy",)),
    ({"settled_from": moment(-99)}, ("delayq_settled",)),
]


@pytest.mark.django_db
@pytest.mark.parametrize(("query", "index"), REST_LISTS, ids=[",".join(query) or "all" for query, _ in REST_LISTS])
def test_a_list_of_rest_reads_its_index_in_order_from_any_place(
    monkeypatch: Patch, query: dict[str, str], index: tuple[str, ...]
) -> None:
    monkeypatch.setattr(inputs, "MAX_SORTED", 1)  # what has few rows is read by other ways
    found, is_narrow = inputs.Selection.of(query).rows(ledger_rows())
    assert not is_narrow
    for rows in (found, search.Cursor.at(found[40], search.Order.of(found)).after(found)):
        plan = rows[:50].explain()
        assert any(word in plan for word in index), plan
        if index != ("delayq_policy",):  # which has few rows of one policy here, and sorting those is as good
            assert not any(word in plan for word in SORTING), plan
