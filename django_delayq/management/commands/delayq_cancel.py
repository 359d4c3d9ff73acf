"""`manage.py delayq_cancel`: cancel timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="cancel", done="cancelled"):
    """Cancels timeouts. Their rounds are closed: saving their objects does not arm them again.

    Examples:
      manage.py delayq_cancel --policy shop.order.cancel_unpaid --object 1234 --reason 'paid by phone'
      manage.py delayq_cancel --id 17
      manage.py delayq_cancel --policy shop.order.cancel_unpaid --state dead --dry-run
    """
