"""`manage.py delayq_retry`: give dead timeouts all their attempts again."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="retry", done="pending again"):
    """Makes dead timeouts pending and due now, with all their attempts.

    Examples:
      manage.py delayq_retry --policy shop.order.cancel_unpaid --reason 'the provider is back'
      manage.py delayq_retry --id 17
    """
