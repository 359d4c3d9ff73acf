"""`manage.py delayq_cancel`: cancel timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Cancels timeouts. Their rounds are closed: saving their objects does not arm them again."""

    examples = (
        "--policy shop.order.cancel_unpaid --object 1234 --reason 'paid by phone'",
        "--id 17",
        "--policy shop.order.cancel_unpaid --state dead --dry-run",
    )
    name, done = "cancel", "cancelled"
