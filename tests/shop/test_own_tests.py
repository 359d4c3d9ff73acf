"""The tests of the example shop, which use the testing kit, pass as its readers run them."""

from __future__ import annotations

import pytest

from tests.shop.conftest import Shop, on_sqlite

pytestmark = pytest.mark.slow


@on_sqlite
def test_the_shop_passes_its_own_tests_and_its_bulk_writes_arm(shop: Shop) -> None:
    assert "Found 6 test(s)." in shop.manage("test", "--no-input", "shop")
    found = shop.ask(
        "[each.id for each in run_checks(tags=['django_delayq'], include_deployment_checks=True)]",
        "from django.core.checks import run_checks",
    )
    assert "django_delayq.I002" not in found
