"""`manage.py delayq_pause_timeout`: let timeouts not fire, with their deadlines kept."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Pauses timeouts, until they are resumed or until a time. Their deadlines stay where they are."""

    examples = ("--related shop.merchant:7 --reason 'their provider is down'", "--id 17 --until 2d")
    name, done = "pause_timeout", "paused"
