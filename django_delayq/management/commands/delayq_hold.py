"""`manage.py delayq_hold`: stop the clock of policies."""

from django_delayq.management.operating import StopCommand


class Command(StopCommand, name="hold", done="held"):
    """Stops policies and their clocks, until they are resumed or until a time. Replaces a pause.

    At the end of the hold, pending deadlines move by its duration. A policy that is already held keeps the end and
    reason of its hold unless given.

    Examples:
      manage.py delayq_hold shop.order.cancel_unpaid --reason 'the payment provider is down'
      manage.py delayq_hold --all --until 1h --reason 'the shop is closed'
    """
