"""`manage.py delayq_cancel`: cancel timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Cancel by hand, so that no save arms the round again."""

    help = "Cancels timeouts. Their rounds are closed: saving their objects does not arm them again."
    name = "cancel"
    done = "cancelled"
