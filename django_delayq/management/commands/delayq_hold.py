"""`manage.py delayq_hold`: put policies on hold."""

from django_delayq.management.operating import StopCommand


class Command(StopCommand, name="hold", done="held"):
    """Holds policies, until they are resumed or until a time. Replaces a pause.

    At the end of the hold, pending deadlines move by its duration. A policy that is already held keeps the end and
    reason of its hold unless given.

    Examples:
      manage.py delayq_hold shop.order.cancel_unpaid --reason 'the payment provider is down'
      manage.py delayq_hold --all --until 1h --reason 'the shop is closed'
    """
