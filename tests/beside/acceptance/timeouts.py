"""One automatic policy."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q

from django_delayq import timeout_policy
from django_delayq.models import Timeout

from .models import Ticket


@timeout_policy(Ticket, after=timedelta(minutes=30), since="opened_at", when=Q(status="open"))
def close_unused(ticket: Ticket, timeout: Timeout) -> None:
    ticket.status = "closed"
    ticket.save()
