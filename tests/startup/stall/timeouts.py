"""The policy of a booking."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q

from django_delayq import timeout_policy
from django_delayq.models import Timeout
from tests.startup.stall.models import Booking


@timeout_policy(Booking, after=timedelta(minutes=30), since="created_at", when=Q(status="open"))
def release(booking: Booking, timeout: Timeout) -> None:
    booking.delete()
