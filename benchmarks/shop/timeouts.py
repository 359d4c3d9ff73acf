"""The same handlers as policies of django-delayq: the library locks and checks, the handler saves."""

from __future__ import annotations

from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any

from django.db.models import Q

import django_delayq
from benchmarks.shop.jobs import record
from benchmarks.shop.models import Invoice, Order, Task, Ticket
from django_delayq import timeout_policy

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_delayq.models import Timeout


UNPAID = Q(status="unpaid")
TOGETHER: Any = {"together": 50} if "together" in signature(timeout_policy).parameters else {}
"""Another checkout of the package, with which this one is compared, may not have the option."""
HALF_AN_HOUR = timedelta(minutes=30)


@timeout_policy(Order, after=HALF_AN_HOUR, since="created_at", when=UNPAID)
def cancel_unpaid(order: Order, timeout: Timeout) -> None:
    order.status = "cancelled"
    order.save()
    record(0.0)


if hasattr(django_delayq, "Working"):  # another checkout may not have it
    OFFICE = django_delayq.WorkingHours("Europe/Berlin", {"mon-fri": ("09:00-12:30", "13:00-17:00")})

    @timeout_policy(
        Ticket, after=django_delayq.Working(hours=4, calendar=OFFICE), since="created_at", when=UNPAID, name="answer"
    )
    def answer(ticket: Ticket, timeout: Timeout) -> None:
        record(0.0)


@timeout_policy(Invoice, after=HALF_AN_HOUR, when=UNPAID)
def settle(invoice: Invoice, timeout: Timeout) -> None:
    invoice.status = "cancelled"
    invoice.save()
    record(0.0)


@timeout_policy(Invoice, after=HALF_AN_HOUR, when=UNPAID, **TOGETHER)
def settle_together(invoice: Invoice, timeout: Timeout) -> None:
    settle(invoice, timeout)


@timeout_policy(Invoice, after=HALF_AN_HOUR, when=UNPAID, batch=500)
def settle_batch(invoices: QuerySet[Invoice], timeouts: list[Timeout]) -> None:
    invoices.update(status="cancelled")
    record(0.0, len(timeouts))


@timeout_policy(Task)
def note(task: Task, timeout: Timeout) -> None:
    record(timeout.due_at.timestamp())


@timeout_policy(Task, **TOGETHER)
def note_together(task: Task, timeout: Timeout) -> None:
    note(task, timeout)
