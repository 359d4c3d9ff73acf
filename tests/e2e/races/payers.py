"""A paying process: it pays its orders, each at its planned time by the clock of the database."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.utils import timezone

from django_delayq.sql.now import database_now
from tests.e2e.races.paying import RIGHT_WAYS
from tests.e2e.races.paying_rows import ROW_WAYS
from tests.testapp.market import Purchase
from tests.testapp.models import Order


def pay(way: str, share: Sequence[tuple[int, float]]) -> list[tuple[int, bool, float]]:
    """Pay `share`, keys of orders with times in Unix time, in this order.

    Return each key with the result of the payment, and its lateness in seconds.
    """
    model: Any
    payment: Callable[[Any], bool]
    model, payment = (Purchase, ROW_WAYS[way]) if way in ROW_WAYS else (Order, RIGHT_WAYS[way])
    _warm_up(model, payment)
    ahead = _database_is_ahead_by()
    answers = []
    for pk, moment in share:
        order = model.objects.get(pk=pk)  # as a view reads it, some time before it decides
        # Not to wait for anything to happen: this is the planned instant of the race.
        time.sleep(max(0.0, moment - ahead - time.time()))
        late = time.time() + ahead - moment
        answers.append((pk, payment(order), late))
    return answers


def _warm_up(model: Any, payment: Callable[[Any], bool]) -> None:
    """Make a first payment that does not count, because it is many times slower than the next ones."""
    order = model.objects.create(created_at=timezone.now())
    payment(model.objects.get(pk=order.pk))
    order.delete()


def _database_is_ahead_by() -> float:
    """Return the seconds by which the clock of the database is ahead, from the fastest of several queries."""
    looks = []
    for _ in range(10):
        began = time.time()
        there: datetime = database_now(DEFAULT_DB_ALIAS)
        ended = time.time()
        looks.append((ended - began, there.timestamp() - (began + ended) / 2))
    return min(looks)[1]
