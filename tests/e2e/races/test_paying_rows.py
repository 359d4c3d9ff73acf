"""Of "a payment was written in time" and "the purchase was lost, as it was due" exactly one wins (P5).

The payment is a row of its own. Only its writer saves the purchase.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from tests.e2e.races.paying_rows import ROW_WAYS
from tests.e2e.races.racing import Goods
from tests.e2e.races.stage import Actor
from tests.e2e.races.test_paying import PAYERS, race_until_fair
from tests.support.purchases import Declare
from tests.testapp.market import Payment, Purchase
from tests.testapp.timeouts import LOSE_UNPAID, lose

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.django_db(transaction=True)]


@pytest.fixture
def child_environment(child_environment: dict[str, str]) -> dict[str, str]:
    """Child processes declare the policy, too."""
    return {**child_environment, "DELAYQ_TEST_POLICIES": "lose_unpaid"}


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
    goods = Goods(Purchase, policy, status_of_purchases, open_payments)
    race_until_fair(way, actors(PAYERS), goods)
