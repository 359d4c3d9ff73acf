"""factory_boy makes objects with deadlines, one by one and many at a time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import factory
import pytest
from django.utils import timezone
from factory.django import DjangoModelFactory

from django_delayq import clock, get_deadline, pending_timeouts
from django_delayq.testing import fire_due
from tests.beside.project.models import ImportedDeal

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


class DealFactory(DjangoModelFactory):
    class Meta:
        model = ImportedDeal
        skip_postgeneration_save = True

    begun_at = factory.LazyFunction(timezone.now)

    class Params:
        overdue = factory.Trait(begun_at=factory.LazyFunction(lambda: timezone.now() - 2 * HOUR))
        paid = factory.Trait(status="paid")


def make(**options: Any) -> ImportedDeal:
    deal: ImportedDeal = DealFactory.create(**options)
    return deal


def test_a_factory_arms_what_the_condition_wants() -> None:
    deal = make()
    assert get_deadline(deal, "end") == deal.begun_at + HOUR
    assert get_deadline(make(paid=True), "end") is None
    DealFactory.create_batch(20)
    assert pending_timeouts(ImportedDeal).count() == 21


def test_an_overdue_object_of_a_factory_fires() -> None:
    deal = make(overdue=True)
    make()
    assert fire_due() == 1
    deal.refresh_from_db()
    assert deal.status == "ended"


def test_an_object_that_is_only_built_has_no_deadline() -> None:
    deal = DealFactory.build()
    assert deal.pk is None
    with pytest.raises(ValueError, match="not saved"):
        get_deadline(deal, "end")


def test_the_clock_of_a_test_decides_for_a_factory() -> None:
    deal = make()
    with clock.set_to(deal.begun_at + HOUR - timedelta(seconds=1)):
        assert fire_due() == 0
    with clock.set_to(deal.begun_at + HOUR):
        assert fire_due() == 1
