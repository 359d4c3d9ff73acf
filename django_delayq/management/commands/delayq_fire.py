"""`manage.py delayq_fire`: make a worker fire timeouts now."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Makes timeouts due now. A worker fires them if their condition still holds."""

    examples = ("--policy shop.order.cancel_unpaid --object 1234", "--id 17")
    name, done = "fire", "due now"
