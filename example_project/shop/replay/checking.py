"""Check that each order has one outcome, and that its timeouts agree with it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_delayq.models import Timeout
from shop.models import CancelReason, Customer, Order, TextMessage, TrialMembership
from shop.replay.results import policy_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from django.db.models import Model

    from shop.models import Delivery, Review
    from shop.replay.results import Ledger
    from shop.replay.steps import Life

CHUNK = 500


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected outcome of one timeout, from the columns of the order; `fired` None: both are correct."""

    policy: str
    obj: Model | None
    armed: bool
    fired: bool | None


class Rows:
    """Return the timeouts by policy and object."""

    def __init__(self, ledger: Ledger) -> None:
        self._rows: dict[tuple[str, str], list[Timeout]] = defaultdict(list)
        for row in ledger.rows().order_by("id"):
            self._rows[policy_name(row.policy), row.object_id].append(row)

    def of(self, expected: Expected) -> list[Timeout]:
        return self._rows.get((expected.policy, str(expected.obj.pk)), []) if expected.obj is not None else []


def contradictions(lives: Iterable[Life], ledger: Ledger, *, may_be_open: bool = False) -> list[str]:
    """Return descriptions of all contradictions.

    Call it when everything has settled: an open timeout is a contradiction. With `may_be_open` it is not, and its
    possible effects are not checked.
    """
    lives = list(lives)
    rows = Rows(ledger)
    found = list(_check_messages(ledger))
    for start in range(0, len(lives), CHUNK):
        chunk = lives[start : start + CHUNK]
        pks = [life.order.pk for life in chunk if life.order]
        orders = Order.objects.select_related("acceptance", "delivery", "review").in_bulk(pks)
        for life in chunk:
            order = orders.get(life.order.pk) if life.order else None
            if order is None:
                found.append(f"{life.record.order_id}: was never placed")
            else:
                found += [f"{order}: {words}" for words in _check_order(order, rows, may_be_open=may_be_open)]
        trials = TrialMembership.objects.filter(customer__reference__in=[life.record.customer_id for life in chunk])
        for trial in trials.select_related("customer"):
            name = f"trial of {trial.customer.reference}"
            found += [f"{name}: {words}" for words in _check_trial(trial, rows, may_be_open=may_be_open)]
    return found


def _check_order(order: Order, rows: Rows, *, may_be_open: bool) -> Iterator[str]:
    delivery: Delivery | None = getattr(order, "delivery", None)
    review: Review | None = getattr(order, "review", None)
    paid, cancelled_as = order.paid_at is not None, order.cancel_reason
    everything = (
        Expected("cancel_unpaid", order, True, cancelled_as == CancelReason.UNPAID),
        Expected("cancel_unaccepted", order, paid, cancelled_as == CancelReason.UNACCEPTED),
        Expected("remind_late_delivery", delivery, bool(delivery and delivery.promised_at), None),
        Expected("review_by_default", review, bool(review and review.asked_at), bool(review and review.by_default)),
    )
    for expected in everything:
        yield from _check_round(expected, rows.of(expected), may_be_open=may_be_open)
    if may_be_open and any(not row.is_settled for expected in everything for row in rows.of(expected)):
        return
    if paid == (cancelled_as == CancelReason.UNPAID):
        yield "is both paid and cancelled as unpaid, or neither"
    if paid and hasattr(order, "acceptance") == (cancelled_as == CancelReason.UNACCEPTED):
        yield "is both accepted and cancelled as unaccepted, or neither"
    if review is not None and review.asked_at and not review.answered_at:
        yield "has no review, not even by default"
    reminded = any(row.state == Timeout.State.FIRED for row in rows.of(everything[2]))
    if delivery is not None and delivery.promised_at and not delivery.delivered_at and not reminded:
        yield "was not delivered, and the customer was not notified"


def _check_trial(trial: TrialMembership, rows: Rows, *, may_be_open: bool) -> Iterator[str]:
    expected = Expected("notify_trial_expiry", trial, True, trial.status == TrialMembership.Status.EXPIRED)
    yield from _check_round(expected, rows.of(expected)[-1:], may_be_open=may_be_open)  # a new order, a new round


def _check_round(expected: Expected, timeouts: list[Timeout], *, may_be_open: bool) -> Iterator[str]:
    if len(timeouts) != expected.armed:
        yield f"{expected.policy} has {len(timeouts)} rows in the ledger"
    for timeout in timeouts:
        if not timeout.is_settled:
            if not may_be_open:
                yield f"{expected.policy} is {timeout.state}"
        elif timeout.state == Timeout.State.DEAD:
            yield f"{expected.policy} is dead"
        elif expected.fired is not None and (timeout.state == Timeout.State.FIRED) != expected.fired:
            yield f"{expected.policy} is {timeout.state}, expected {'fired' if expected.fired else 'in time'}"


def _check_messages(ledger: Ledger) -> Iterator[str]:
    """Check that every fired reminder has sent one message; the unique key prevents a second one."""
    fired = ledger.rows().filter(state=Timeout.State.FIRED)
    told = [row for row in fired if policy_name(row.policy) in {"remind_late_delivery", "notify_trial_expiry"}]
    for start in range(0, len(told), CHUNK):
        keys = {row.idempotency_key: row for row in told[start : start + CHUNK]}
        sent = set(TextMessage.objects.filter(idempotency_key__in=keys).values_list("idempotency_key", flat=True))
        for key in keys.keys() - sent:
            yield f"{keys[key]}: fired, and no message was sent"


def forget(references: Iterable[str], customers: Iterable[str]) -> int:
    """Remove the orders and customers with these references from an earlier run; return the number of orders."""
    removed = 0
    for model, names in ((Order, list(references)), (Customer, list(customers))):
        for start in range(0, len(names), CHUNK):
            _, counts = model._base_manager.filter(reference__in=names[start : start + CHUNK]).delete()
            removed += counts.get(Order._meta.label, 0)
    return removed
