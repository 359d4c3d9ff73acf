"""`manage.py delayq_pause_timeout`: let timeouts not fire, with their deadlines kept."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="pause_timeout", done="paused"):
    """Pauses timeouts, until they are resumed or until a time. Their deadlines stay where they are.

    Examples:
      manage.py delayq_pause_timeout --related shop.merchant:7 --reason 'their provider is down'
      manage.py delayq_pause_timeout --id 17 --until 2d
    """
