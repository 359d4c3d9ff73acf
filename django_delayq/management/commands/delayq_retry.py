"""`manage.py delayq_retry`: give dead timeouts all their attempts again."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Retry dead timeouts, after the cause of their failures is fixed."""

    help = "Makes dead timeouts pending and due now, with all their attempts."
    name = "retry"
    done = "pending again"
