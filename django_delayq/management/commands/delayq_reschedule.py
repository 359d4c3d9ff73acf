"""`manage.py delayq_reschedule`: change the deadlines of timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="reschedule", done="changed"):
    """Changes deadlines of pending timeouts, earlier or later. One in the past becomes now: --dry-run counts those.

    Examples:
      manage.py delayq_reschedule --id 17 --to 2026-03-01T18:00
      manage.py delayq_reschedule --policy shop.order.cancel_unpaid --by=-198d --dry-run
    """
