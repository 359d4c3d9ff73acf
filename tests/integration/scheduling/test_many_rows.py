"""Bulk functions with many rows: the same rows as one by one, in few statements, with little memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

import django_delayq as dq
from django_delayq import clock
from django_delayq.ledger.paging import update_each
from django_delayq.models import Timeout
from tests.support.seen import sql_of
from tests.testapp.models import ExpressOrder, Order, Parcel, Voucher

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

DIFFERENT = {"id", "idempotency_key"}
ODD_KEYS = ["a", "Ünï", 'quote"d', "com,ma", "back\\slash", "percent%s", "{brace}", "new\nline"]


@pytest.fixture
def now() -> Iterator[datetime]:
    moment = timezone.now().replace(microsecond=123456)
    with clock.set_to(moment):
        yield moment


def columns() -> list[dict[str, Any]]:
    names = [field.attname for field in Timeout._meta.concrete_fields if field.name not in DIFFERENT]
    return list(Timeout.objects.order_by("object_id").values(*names))


@pytest.mark.parametrize("model", [Order, ExpressOrder, Parcel, Voucher])
def test_a_row_scheduled_in_bulk_is_the_row_scheduled_alone(model: Any, now: datetime, declare: Any) -> None:
    keys = [{"code": code} for code in ODD_KEYS] if model is Voucher else [{}] * 3
    objects = [model.objects.create(status="new", **key) for key in keys]
    policy = declare(model, name="bulky", queue="other")
    words: Any = {"key": "k\"'%s", "payload": {"n": [1, None, "ü", {"deep": "\\"}]}, "reason": "Because ü", "hours": 2}
    for obj in objects:
        dq.schedule_timeout(obj, policy, **words)
    alone = columns()
    Timeout.objects.all().delete()
    assert dq.schedule_timeouts(model.objects.filter(status="new"), policy, **words) == len(objects)
    assert columns() == alone
    keys_of_rows = set(Timeout.objects.values_list("idempotency_key", flat=True))
    assert (len(keys_of_rows), {len(key) for key in keys_of_rows}) == (len(objects), {32})


def test_rows_written_together_are_as_those_written_alone(now: datetime) -> None:
    values: dict[str, Any] = {
        "queue": "ü\"'\\ {x}", "due_at": now, "run_at": now - timedelta(days=1), "since_at": None, "attempts": 7,
        "payload": {"n": [1, None, "ü\"'\\n", {}]}, "history": [{"what": "x", "at": now.isoformat()}], "reason": "%s",
        "claims": 3, "claimed_until": now, "final_attempt": True, "extensions": 2, "idempotency_key": "f" * 32,
        "state": "cancelled", "cause": "hand", "settled_at": now, "slot_taken": None,
    }  # fmt: skip
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(5)], "remind", hours=1)
    *rows, fired = Timeout.objects.order_by("object_id")
    for row in (*rows, fired):
        vars(row).update(values)
    rows[2].payload = rows[0].payload = None
    Timeout.objects.filter(pk=fired.pk).update(state="fired", cause="due", settled_at=now, slot_taken=None)
    for page in (rows[:1], rows[1:2], [*rows[2:], fired]):
        update_each(page, "default")
    same = [{**row, "object_id": "", "slot": ""} for row in columns()]
    assert same[:2] == same[2:4]
    assert all(same[1][name] == value for name, value in values.items() if name not in DIFFERENT)
    fired.refresh_from_db()
    assert (fired.state, fired.attempts) == ("fired", 0), "it was settled meanwhile"


def test_only_what_was_changed_in_one_of_the_rows_is_written() -> None:
    dq.schedule_timeouts([Order.objects.create(status="new") for _ in range(3)], "remind", hours=1)
    rows = list(Timeout.objects.order_by("pk"))
    Timeout.objects.update(reason="by another transaction")
    rows[1].extensions = 2
    sent = sql_of(lambda: update_each(rows, "default"))
    sent += sql_of(lambda: update_each(rows, "default"))  # nothing has changed since
    assert all("reason" not in sql for sql in sent)
    found = Timeout.objects.order_by("pk").values_list("extensions", "reason")
    assert list(found) == [(number, "by another transaction") for number in (0, 2, 0)]


def test_a_thousand_more_rows_cost_a_few_statements_each_page() -> None:
    Order.objects.bulk_create([Order(status="new") for _ in range(2000)], batch_size=200)
    first, rest = Order.objects.order_by("pk")[:1000], list(Order.objects.order_by("-pk")[:1000])
    pending = dq.pending_timeouts(Order, "remind")
    for most, call in (
        (12, lambda: dq.schedule_timeouts(first, "remind", minutes=5)),
        (20, lambda: dq.schedule_timeouts(Order.objects.all(), "remind", minutes=6)),
        # BEGIN is not counted everywhere; locking takes two statements where a database locks what it reads.
        (4 * 10 + 2, lambda: dq.extend_timeouts(pending, minutes=1)),
        (4 * 10 + 2, lambda: dq.reschedule_timeouts(pending, minutes=1)),
        (4 * 10 + 2, lambda: dq.cancel_timeouts(pending)),
        (12, lambda: dq.schedule_timeouts(rest, "remind", minutes=5)),
    ):
        assert len(sql_of(call)) <= most
    assert Timeout.objects.pending().count() == 1000


def test_an_error_in_the_last_page_writes_nothing_and_leaves_the_transaction_usable(declare: Any) -> None:
    Order.objects.bulk_create([Order(status="new", created_at=timezone.now()) for _ in range(1200)], batch_size=200)
    last = Order.objects.latest("pk")
    Order.objects.filter(pk=last.pk).update(created_at=None)
    policy = declare(Order, name="bulky", since="created_at", after=timedelta(hours=1), when=None)
    with transaction.atomic():
        with pytest.raises(dq.InvalidDelay, match="no deadline of its own"):
            dq.schedule_timeouts(Order.objects.all(), policy)
        assert not Timeout.objects.exists()
        with pytest.raises(ValueError, match="not in the database"):
            orders = list(Order.objects.all())
            Order.objects.filter(pk=last.pk)._raw_delete("default")
            dq.schedule_timeouts(orders, policy, hours=1)
        assert not Timeout.objects.exists()
        assert dq.schedule_timeouts(Order.objects.all(), policy) == 1199
