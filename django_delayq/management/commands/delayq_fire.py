"""`manage.py delayq_fire`: make a worker fire timeouts now."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="fire", done="due now"):
    """Makes timeouts due now. A worker fires them if their condition still holds.

    Examples:
      manage.py delayq_fire --policy shop.order.cancel_unpaid --object 1234
      manage.py delayq_fire --id 17
    """
