"""`manage.py delayq_retry`: give dead timeouts all their attempts again."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Makes dead timeouts pending and due now, with all their attempts."""

    examples = ("--policy shop.order.cancel_unpaid --reason 'the provider is back'", "--id 17")
    name, done = "retry", "pending again"
