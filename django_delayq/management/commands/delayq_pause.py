"""`manage.py delayq_pause`: stop policies."""

from django_delayq.management.operating import StopCommand


class Command(StopCommand):
    """Stops policies until they are resumed, or until a time. Timeouts that become due meanwhile fire then.

    A policy that is already paused keeps its end and reason unless given.
    """

    examples = (
        "shop.order.cancel_unpaid --until 2h --reason 'wrong price list'",
        "shop.order.cancel_unpaid --until never",
        "--all --until 1h --reason 'the database moves'",
    )
    name, done = "pause", "paused"
