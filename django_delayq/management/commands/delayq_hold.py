"""`manage.py delayq_hold`: stop the clock of policies."""

from django_delayq.management.operating import PolicyCommand


class Command(PolicyCommand):
    """Hold policies, for an outage during which the objects cannot meet their deadlines."""

    help = "Stops policies until they are resumed, which then moves all pending deadlines by as long. Replaces a pause."
    name = "hold"
    done = "held"
