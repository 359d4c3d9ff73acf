"""The sync asks the database which rounds no longer fit: whatever the type of the key, and in few queries."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

from django_delayq.arming.sync import Synced, sync_policy
from django_delayq.models import Timeout
from tests.support.seen import sql_of
from tests.testapp.models import ExpressOrder, Order, Parcel, Voucher
from tests.testapp.timeouts import cancel_unpaid

pytestmark = pytest.mark.django_db
KINDS: dict[str, tuple[Any, str, str]] = {
    "number": (Order, "created_at", "unpaid"),
    "child": (ExpressOrder, "created_at", "unpaid"),
    "uuid": (Parcel, "sent_at", "open"),
    "text": (Voucher, "issued_at", "open"),
}


@pytest.fixture
def now() -> datetime:
    return timezone.now().replace(microsecond=123456)


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_update_unmet_moved_or_deleted_is_found_and_nothing_else(
    kind: str, now: datetime, declare: Callable[..., Any]
) -> None:
    model, since, status = KINDS[kind]
    policy = declare(model, name="synced", since=since, when=Q(status=status), after=timedelta(hours=1))
    keys: list[dict[str, str]] = [{"code": f"Code {n}"} for n in range(4)] if model is Voucher else [{}] * 4
    unmet, moved, gone, kept = (model.objects.create(**{since: now}, **key) for key in keys)
    assert sync_policy(policy, "default") == Synced()
    model.objects.filter(pk=unmet.pk).update(status="another")
    model.objects.filter(pk=moved.pk).update(**{since: now + timedelta(minutes=5)})
    policy.concrete_model._base_manager.filter(pk=gone.pk)._raw_delete("default")  # as another program, without signals
    expected = sync_policy(policy, "default", dry_run=True)
    done = sync_policy(policy, "default")
    assert done == expected
    assert (done.armed, done.moved) == (0, 1)
    assert done.cancelled >= 2, "what is gone loses the timeouts of other policies, too"
    assert sync_policy(policy, "default") == Synced()
    found = dict(Timeout.objects.pending().of_labels(policy.labels).values_list("object_id", "due_at"))
    assert found == {str(moved.pk): now + timedelta(minutes=65), str(kept.pk): now + timedelta(minutes=60)}


def test_a_ledger_that_fits_costs_a_query_for_each_way_and_not_one_for_each_page(now: datetime) -> None:
    Order.objects.bulk_create([Order(created_at=now) for _ in range(1200)])
    assert sync_policy(cancel_unpaid, "default").armed == 1200
    sent = sql_of(lambda: sync_policy(cancel_unpaid, "default"))
    assert len(sent) == 5, "one for each way, one for moved deadlines, and two for what operators have done"


@pytest.mark.parametrize("text", ["", "abc", "12abc", "9" * 30, "-", "0x1", "12.5", "\u0661"])
def test_an_object_id_that_is_no_key_disturbs_nobody(now: datetime, text: str) -> None:
    order, other = (Order.objects.create(created_at=now) for _ in range(2))
    row = Timeout.objects.get(object_id=str(order.pk))
    Timeout.objects.filter(pk=row.pk).update(object_id=text)
    Order.objects.filter(pk=other.pk).update(status="paid")
    assert sync_policy(cancel_unpaid, "default").cancelled == 1
    assert Timeout.objects.get(object_id=str(other.pk)).state == "cancelled"
    assert Timeout.objects.get(pk=row.pk).state == "pending", "the firing settles it"
