"""A process whose models are on a second alias: it calls every function once, and fires and recovers timeouts."""

from __future__ import annotations

from datetime import timedelta

import django

from tests.support.lines import remove_ids


def main() -> None:
    django.setup()
    from django.db import connections, transaction
    from django.utils import timezone

    import django_delayq as dq
    from django_delayq.models import Timeout
    from django_delayq.redis_clients import get_engine
    from django_delayq.worker import Worker
    from tests.testapp.models import Effect, Order

    long_ago = timezone.now() - timedelta(minutes=31)
    overdue = Order.objects.create(created_at=long_ago)  # armed by saving
    Order.objects.bulk_create([Order(created_at=long_ago)])  # armed by the worker's sync
    order = Order.objects.create(status="paid")
    with transaction.atomic(using="business"):
        row = dq.schedule_timeout(order, "remind", minutes=4)
        assert row._state.db == "business"
        engine = get_engine("business")
        assert engine is not None
        assert engine.queue("default", 0).stats().total == 1, "the overdue one, as this is not committed yet"
    assert engine.queue("default", 0).stats().total == 2
    assert dq.extend_timeout(order, "remind", minutes=5) is not None
    assert dq.reschedule_timeouts(dq.pending_timeouts(Order, "remind"), hours=2) == 1
    assert dq.get_deadline(order, "remind") == Order.objects.annotate(d=dq.Deadline("remind")).get(pk=order.pk).d
    assert dq.schedule_timeouts(Order.objects.filter(pk=order.pk), "remind", minutes=1, on_conflict="keep") == 0
    assert "pending" not in str(dq.explain_timeout(overdue, "remind")).split("\n")[0]
    with dq.before_deadline(order, "remind") as guarded:
        assert guarded is not None and guarded.pk == row.pk
    remove_ids(
        engine.queue("default", 0), [Timeout.objects.get(object_id=overdue.pk).pk]
    )  # what Redis lost is swept up
    Worker(burst=True).run()
    states = sorted(Timeout.objects.values_list("state", flat=True))
    assert states == ["cancelled", "fired", "fired"], states
    assert Effect.objects.count() == 2
    overdue.delete()
    assert connections["default"].connection is None, "the default database was not used"


if __name__ == "__main__":
    main()
