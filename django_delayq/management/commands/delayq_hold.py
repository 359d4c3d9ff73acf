"""`manage.py delayq_hold`: stop the clock of policies."""

from django_delayq.management.operating import PolicyCommand


class Command(PolicyCommand):
    """Stops policies until they are resumed, which then moves all pending deadlines by as long. Replaces a pause."""

    examples = ("shop.order.cancel_unpaid --reason 'the payment provider is down'",)
    name, done = "hold", "held"
