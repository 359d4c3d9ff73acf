"""`manage.py delayq_cancel`: cancel timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Cancels timeouts. Their rounds are closed: saving their objects does not arm them again."""

    help = __doc__
    name, done = "cancel", "cancelled"
