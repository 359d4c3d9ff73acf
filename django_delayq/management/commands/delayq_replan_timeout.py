"""`manage.py delayq_replan_timeout`: compute the deadlines of timeouts again."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Computes deadlines of pending timeouts again, as their policies declare them now. --dry-run counts those due."""

    examples = ("--policy shop.order.cancel_unpaid --dry-run", "--id 17 --hand-set --reason 'agreed by mistake'")
    name, done = "replan", "computed again"
