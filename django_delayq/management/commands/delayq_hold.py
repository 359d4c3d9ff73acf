"""`manage.py delayq_hold`: stop the clock of policies."""

from django_delayq.management.operating import PolicyCommand


class Command(PolicyCommand):
    """Stops policies and their clocks: resuming them moves pending deadlines by the hold. Replaces a pause."""

    examples = ("shop.order.cancel_unpaid --reason 'the payment provider is down'",)
    name, done = "hold", "held"
