"""`manage.py delayq_pause`: stop policies."""

from django_delayq.management.operating import StopCommand


class Command(StopCommand, name="pause", done="paused"):
    """Stops policies until they are resumed, or until a time. Timeouts that become due meanwhile fire then.

    A policy that is already paused keeps its end and reason unless given.

    Examples:
      manage.py delayq_pause shop.order.cancel_unpaid --until 2h --reason 'wrong price list'
      manage.py delayq_pause shop.order.cancel_unpaid --until never
      manage.py delayq_pause --all --until 1h --reason 'the database moves'
    """
