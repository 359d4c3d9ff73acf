"""Of "it was paid in time" and "it was cancelled, as it was due" exactly one wins, and both sides learn which (P5)."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from django.db import connection

from tests.e2e.races import racing
from tests.e2e.races.actor import Actor
from tests.e2e.races.paying import RIGHT_WAYS, ROW_WAYS
from tests.e2e.races.racing import Goods, Pace, race
from tests.support.typed import Declare
from tests.testapp.market import Payment, Purchase
from tests.testapp.timeouts import LOSE_UNPAID, lose

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

ORDERS = 100
PAYERS = 3
PER_SECOND = {"sqlite": 40, "postgresql": 50, "mysql": 50}
"""The load that two cores can handle: payers that are late for every order do not race."""
FAIR = 0.1
"""The fraction of one attempt's orders that the losers must have won in all attempts together: otherwise there was no
race. A busy machine moves one side or the other by more than the time in which they compete."""
ATTEMPTS = 8
STEP = 0.015
"""Seconds by which the payers move at first: then by twice as many, and by half as many once they went too far."""
_fair_shifts = [0.0]
"""Where earlier races were fair: the next one begins with the last of them, because it depends on the machine."""


@pytest.fixture
def child_environment(child_environment: dict[str, str]) -> dict[str, str]:
    """Child processes declare the policy of purchases, too."""
    return {**child_environment, "DELAYQ_TEST_POLICIES": "lose_unpaid"}


@pytest.mark.usefixtures("two_workers")
@pytest.mark.parametrize("way", RIGHT_WAYS)
def test_an_order_is_paid_or_cancelled_and_both_sides_know_which(
    way: str, actors: Callable[[int], list[Actor]]
) -> None:
    race_until_fair(way, actors(PAYERS), racing.ORDERS)


def status_of_purchases(pks: Collection[int]) -> dict[int, str]:
    """Lost, or paid by a row; a payment may also have come too late."""
    rows = Purchase.objects.filter(pk__in=pks)
    paid = set(rows.filter(payments__status="captured").values_list("pk", flat=True))
    status = dict(rows.values_list("pk", "status"))
    return {pk: "paid" if status[pk] == "unpaid" and pk in paid else status[pk] for pk in pks}


def open_payments(pks: Collection[int]) -> None:
    """Give each purchase a payment that may be captured, or voided by the worker."""
    Payment._base_manager.bulk_create([Payment(purchase_id=pk) for pk in pks])


@pytest.mark.usefixtures("two_workers")
@pytest.mark.parametrize("way", ROW_WAYS)
def test_a_purchase_has_its_payment_or_is_lost_and_the_writer_knows_which(
    way: str, declare: Declare, actors: Callable[[int], list[Actor]]
) -> None:
    policy = declare(Purchase, lose, name="lose_unpaid", **LOSE_UNPAID)
    race_until_fair(way, actors(PAYERS), Goods(Purchase, policy, status_of_purchases, open_payments))


def race_until_fair(way: str, payers: list[Actor], goods: Goods) -> None:
    """Race until each side has won its part against a stronger one."""
    shift, step, shares = _fair_shifts[-1], 0.0, []
    for attempt in range(ATTEMPTS):
        pace = Pace(ORDERS, PER_SECOND[connection.vendor], shift)
        share = race(way, payers, pace, seed=f"{way} {attempt}", goods=goods)
        shares.append(share)
        if sum(min(each, 1 - each) for each in shares) >= FAIR:
            _fair_shifts.append(shift)
            return
        # Too many were paid: the workers were slower than the payers, so these shall come later, and vice versa.
        wanted = STEP if share > 0.5 else -STEP
        step = wanted if not step else 2 * step if (step > 0) == (wanted > 0) else -step / 2
        shift += step
    pytest.fail(f"no race in {ATTEMPTS} attempts: the fractions of paid orders are {shares}")
