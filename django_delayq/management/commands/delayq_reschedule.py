"""`manage.py delayq_reschedule`: change the deadlines of timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Changes deadlines of pending timeouts, earlier or later. One in the past becomes now: --dry-run counts those."""

    examples = ("--id 17 --to 2026-03-01T18:00", "--policy shop.order.cancel_unpaid --by=-198d --dry-run")
    name, done = "reschedule", "changed"
