"""Of "it was paid in time" and "it was cancelled, as it was due" exactly one wins, and both sides learn which (P5)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from django.db import connection

from tests.e2e.races import racing
from tests.e2e.races.paying import RIGHT_WAYS
from tests.e2e.races.racing import Goods, Pace, race
from tests.e2e.races.stage import Actor

pytestmark = [pytest.mark.dialect, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.django_db(transaction=True)]
logger = logging.getLogger(__name__)

ORDERS = 100
PAYERS = 3
PER_SECOND = {"sqlite": 40, "postgresql": 50, "mysql": 50}
"""The load that two cores can handle: payers that are late for every order do not race."""
FAIR = 0.1
"""The least fraction that each side must win, otherwise there was no race."""
ATTEMPTS = 8
STEP = 0.015
"""Seconds by which the payers move at first: then by twice as many, and by half as many once they went too far."""
_fair_shifts = [0.0]
"""Where earlier races were fair: the next one begins with the last of them, because it depends on the machine."""


@pytest.mark.usefixtures("two_workers")
@pytest.mark.parametrize("way", RIGHT_WAYS)
def test_an_order_is_paid_or_cancelled_and_both_sides_know_which(
    way: str, actors: Callable[[int], list[Actor]]
) -> None:
    race_until_fair(way, actors(PAYERS), racing.ORDERS)


def race_until_fair(way: str, payers: list[Actor], goods: Goods) -> None:
    """Race until each side has won its part."""
    shift, step, shares = _fair_shifts[-1], 0.0, []
    for attempt in range(ATTEMPTS):
        pace = Pace(ORDERS, PER_SECOND[connection.vendor], shift)
        outcome = race(way, payers, pace, seed=f"{way} {attempt}", goods=goods)
        logger.info("%s, shifted by %.0f ms: %s", way, shift * 1000, outcome)
        shares.append(outcome.share_paid)
        if FAIR <= outcome.share_paid <= 1 - FAIR:
            _fair_shifts.append(shift)
            return
        # Too many were paid: the workers were slower than the payers, so these shall come later, and vice versa.
        wanted = STEP if outcome.share_paid > 0.5 else -STEP
        step = wanted if not step else 2 * step if (step > 0) == (wanted > 0) else -step / 2
        shift += step
    pytest.fail(f"no race in {ATTEMPTS} attempts: the fractions of paid orders are {shares}")
