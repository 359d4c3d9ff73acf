"""Each statement that settles a row compares before it sets: what changed since it was read stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import get_policy, schedule_timeout, schedule_timeouts
from django_delayq.ledger import marking, writing
from django_delayq.ledger.outbox import line_of
from django_delayq.models import Timeout, slot_of
from django_delayq.rounds.columns import waiting
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]

State, Cause = Timeout.State, Timeout.Cause
MINUTE = timedelta(minutes=1)


def due(**changed: Any) -> Timeout:
    """Return a row that is due, as it was before `changed` was written by another transaction."""
    row = schedule_timeout(Order.objects.create(status="new"), "remind", after=timedelta(0))
    Timeout.objects.filter(pk=row.pk).update(run_at=timezone.now() - MINUTE)
    row.refresh_from_db()
    Timeout.objects.filter(pk=row.pk).update(**changed)
    return row


def stored(row: Timeout) -> dict[str, Any]:
    names = ("state", "cause", "attempts", "run_at", "settled_at")
    return {name: getattr(Timeout.objects.get(pk=row.pk), name) for name in names}


SETTLED = {"state": State.FIRED, "cause": Cause.DUE, "slot_taken": None, "settled_at": timezone.now()}
CHANGED: dict[str, dict[str, Any]] = {
    "settled": SETTLED,
    "moved": {"run_at": timezone.now() + timedelta(hours=1)},
    "tried": {"attempts": 1},
    "restarted": {"idempotency_key": "a" * 32},
    "firing": {"state": State.FIRING, "slot_taken": None},
}
"""What another transaction has made of a row since it was read."""
STATEMENTS: dict[str, tuple[Callable[[Timeout], object], str]] = {
    "fired": (lambda row: marking.mark_fired([row], timezone.now(), "default"), "settled moved"),
    "begun": (lambda row: marking.mark_firing(row, timezone.now() + MINUTE, "default"), "settled moved tried"),
    "skipped": (lambda row: marking.mark_settled([row], Cause.CONDITION, timezone.now(), "default"), "settled"),
    "cancelled": (lambda row: writing.cancel_ids({row.pk: line_of(row)}, "default", Cause.HAND), "settled"),
    "failed": (
        lambda row: marking.compare_and_set(row, "default", **waiting(timezone.now() + MINUTE)),
        "settled moved tried restarted firing",
    ),
}
"""Each statement, and what it leaves as it is."""


@pytest.mark.parametrize("statement", STATEMENTS)
def test_what_has_changed_since_it_was_read_stays_as_it_is(statement: str) -> None:
    execute, changes = STATEMENTS[statement]
    for changed in changes.split():
        row = due(**CHANGED[changed])
        before = stored(row)
        done = execute(row)
        assert statement == "skipped" or not done, changed
        assert stored(row) == before, changed


def test_a_newer_round_is_seen_under_every_label_of_its_policy(declare: Any) -> None:
    present, other = declare(Order, name="present", aliases=["former"]), declare(Order, name="other")
    order = Order.objects.create(status="new")
    former = schedule_timeout(order, present, minutes=5)
    label = f"{present.label.rpartition('.')[0]}.former"
    slot = slot_of(label, former.content_type_id, former.object_id, former.key)
    Timeout.objects.filter(pk=former.pk).update(policy=label, slot=slot, slot_taken=None, state=State.FIRING)
    former.refresh_from_db()
    schedule_timeout(order, other, minutes=5)
    assert not marking.is_superseded(former, "default")
    schedule_timeout(order, present, minutes=5)
    assert marking.is_superseded(former, "default")


def test_extending_a_firing_leaves_rows_that_are_not_firing() -> None:
    firing, pending = due(state=State.FIRING, slot_taken=None), due()
    before, until = stored(pending), timezone.now() + timedelta(hours=1)
    marking.extend([firing.pk, pending.pk], until, "default")
    assert stored(pending) == before
    assert stored(firing)["run_at"] == until


def test_a_value_that_the_database_refuses_raises_an_error() -> None:
    """MySQL and MariaDB would insert an empty string, or the beginning of a long one, if errors were ignored."""
    row = due()
    row.pk, row.slot, row.queue = None, "e" * 32, None  # type: ignore[assignment]
    with pytest.raises(DatabaseError), transaction.atomic():
        writing.insert([row], "default")
    assert not Timeout.objects.filter(slot="e" * 32).exists()


def test_a_row_that_was_settled_long_before_its_deadline_is_not_pruned() -> None:
    """It closes its round: without it the object would be armed again."""
    old = timezone.now() - timedelta(days=40)
    row = due(**{**SETTLED, "settled_at": old})
    ahead = timezone.now() + timedelta(days=1)
    for deadlines in ({"due_at": ahead, "first_due_at": old}, {"due_at": old, "first_due_at": ahead}):
        Timeout.objects.update(**deadlines)
        assert marking.delete_settled("default", marking.Old(timezone.now() - timedelta(days=30)), None)[0] == 0
    Timeout.objects.update(due_at=old, first_due_at=old)
    assert marking.delete_settled("default", marking.Old(timezone.now() - timedelta(days=30)), None)[0] == 1
    assert not Timeout.objects.filter(pk=row.pk).exists()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="other databases count rows in the index when they plan")
def test_statistics_that_miss_due_rows_do_not_make_a_group_read_all_rows_of_its_policy() -> None:
    policy = get_policy((Order, "remind"))
    later = Order.objects.bulk_create([Order(status="new") for _ in range(300)])
    schedule_timeouts(later, policy, after=timedelta(days=1))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_delayq_timeout")
    orders = Order.objects.bulk_create([Order(status="new") for _ in range(300)])
    schedule_timeouts(orders, policy, after=timedelta(0))
    about = Timeout.objects.filter(object_id__in=[str(order.pk) for order in orders[:20]])
    pks = {id: int(object_id) for id, object_id in about.values_list("id", "object_id")}
    with transaction.atomic(), CaptureQueriesContext(connection) as captured:
        assert len(marking.mark_at_once(policy, pks, "default", late=None)) == 20
        transaction.set_rollback(True)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {captured[0]['sql']}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "django_delayq_timeout_pkey" in plan  # an index scan, or a bitmap of it
    assert "Seq Scan on django_delayq_timeout" not in plan, plan
    assert [index.name for index in Timeout._meta.indexes if f" {index.name} " in plan] == [], plan
