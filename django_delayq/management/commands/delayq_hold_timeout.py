"""`manage.py delayq_hold_timeout`: put timeouts on hold."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="hold_timeout", done="held"):
    """Holds timeouts, until they are resumed or until a time. The rest of their time is kept.

    Examples:
      manage.py delayq_hold_timeout --policy shop.order.cancel_unpaid --object 1234 --reason 'in talks'
      manage.py delayq_hold_timeout --id 17 --until 2d
    """
