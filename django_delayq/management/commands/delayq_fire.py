"""`manage.py delayq_fire`: make a worker fire timeouts now."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Make them due; a worker fires them."""

    help = "Makes timeouts due now. A worker fires them if their condition still holds."
    name = "fire"
    done = "due now"
