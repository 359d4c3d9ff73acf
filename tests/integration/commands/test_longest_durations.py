"""The longest durations that the settings accept overflow no datetime on any database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from django.utils import timezone

from django_delayq import schedule_timeout
from django_delayq.conf import MAX_LEASE
from django_delayq.monitoring.doctor import examine
from django_delayq.testing import perform
from django_delayq.times.clock import MAX_DURATION
from tests.integration.commands.conftest import Do
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.usefixtures("without_redis")
def test_the_longest_durations_of_the_settings_break_nothing(settings: Settings, do: Do) -> None:
    names = ("HORIZON", "SWEEP_INTERVAL", "SYNC_INTERVAL", "CATCH_UP", "RETENTION", "HANDLER_LIMIT")
    settings.DELAYQ = {**settings.DELAYQ, **dict.fromkeys(names, MAX_DURATION), "LEASE": MAX_LEASE}
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    schedule_timeout(order, "remind", seconds=0)
    assert perform("remind", order).state == "fired"
    for command in ("delayq_sync", "delayq_prune", "delayq_status"):
        do(command)
    assert not [finding.msg for finding in examine() if "The check failed" in finding.msg]
