"""Wrong arguments are refused by a documented error; nothing is written, and the caller's transaction stays usable."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

import django_delayq as dq
from django_delayq import operations
from django_delayq.conf import ConfigError, get_settings
from django_delayq.models import Timeout
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

HUGE = 10**5000


class Abstract(Order):
    class Meta:
        abstract = True


def guard(order: Order, **wrong: Any) -> None:
    with dq.before_deadline(order, "remind", **wrong):
        pass


def orders() -> Any:
    return Order.objects.all()


WRONG: dict[str, tuple[Callable[[Order], Any], type[Exception], str]] = {
    "NUL in a key": (lambda order: list(dq.pending_timeouts(order, key="\0")), ValueError, "without NUL"),
    "a key for all": (lambda order: list(dq.pending_timeouts(key="\0")), ValueError, "without NUL"),
    "a lone surrogate": (lambda order: list(dq.pending_timeouts(order, key="\ud800")), ValueError, "surrogates"),
    "a key to schedule": (lambda order: dq.schedule_timeout(order, "remind", key="\udcff", hours=1), ValueError, "key"),
    "a key of many": (lambda order: dq.schedule_timeouts([order], "remind", key="\udcff", hours=1), ValueError, "key"),
    "a key to cancel": (lambda order: dq.cancel_timeout(order, "remind", key="\ud800"), ValueError, "key"),
    "a key to read": (lambda order: dq.get_deadline(order, "remind", key="\ud800"), ValueError, "key"),
    "a queryset as key": (lambda order: dq.pending_timeouts(order, key=orders()), ValueError, "not of type QuerySet"),
    "a queryset as key to schedule": (
        lambda order: dq.schedule_timeout(order, "remind", key=orders(), hours=1), ValueError, "not of type QuerySet"
    ),
    "a class": (lambda order: dq.pending_timeouts(int), TypeError, "not the class int"),  # type: ignore[type-var]
    "an abstract model": (lambda order: dq.pending_timeouts(Abstract), TypeError, "not the class Abstract"),
    "an unsaved timeout": (lambda order: dq.cancel_timeouts(Timeout()), ValueError, "not a row of the ledger"),
    "unsaved timeouts": (lambda order: dq.cancel_timeouts([Timeout()]), ValueError, "not a row of the ledger"),
    "unsaved to move": (lambda order: dq.reschedule_timeouts(Timeout(), hours=1), ValueError, "not a row"),
    "unsaved to extend": (lambda order: dq.extend_timeouts([Timeout()], hours=1), ValueError, "not a row"),
    "unsaved for operators": (lambda order: operations.cancel([Timeout()], by="me"), ValueError, "not a row"),
    "strict": (lambda order: guard(order, strict=[]), TypeError, "strict is True or False, not of type list"),
    "too many days": (lambda order: dq.schedule_timeout(order, "remind", days=HUGE), dq.InvalidDelay, r"days=\.\.\."),
    "too many to move": (lambda order: dq.Snooze(hours=-HUGE), dq.InvalidDelay, r"hours=\.\.\."),
    "too many to snooze": (lambda order: dq.Snooze(seconds=HUGE), dq.InvalidDelay, r"seconds=\.\.\."),
    "too many, but few digits": (lambda order: dq.Snooze(days=10**12), dq.InvalidDelay, "days=1000000000000"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_leaves_the_transaction_usable(wrong: str, order: Order) -> None:
    call, error, words = WRONG[wrong]
    dq.schedule_timeout(order, "remind", hours=1)
    with transaction.atomic():
        with pytest.raises(error, match=words):
            call(order)
        assert Order.objects.count() == 1
        order.save()
    (row,) = Timeout.objects.all()
    assert (row.state, row.history) == ("pending", [])


@pytest.mark.parametrize("path", ["..", ".a", "a.", "", "a b.c", "no_dot", "a..b"])
@pytest.mark.parametrize("key", ["SCRUB", "EXECUTOR"])
def test_a_setting_that_is_not_a_dotted_path_is_refused_when_it_is_read(settings: Any, key: str, path: str) -> None:
    settings.DELAYQ = {**settings.DELAYQ, key: path}
    with pytest.raises(ConfigError, match=rf"DELAYQ\['{key}'\] must be .*dotted path"):
        get_settings()


def test_a_deadline_beyond_the_supported_years_is_refused_for_one_of_many(order: Order) -> None:
    with pytest.raises(dq.InvalidDelay, match="too far in the future"):
        dq.schedule_timeouts([order], "remind", after=timedelta(days=900_000))
