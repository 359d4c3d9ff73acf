"""`manage.py delayq_replan_timeout`: compute the deadlines of timeouts again."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="replan", done="computed again"):
    """Computes deadlines of pending timeouts again, as their policies declare them now. --dry-run counts those due.

    Examples:
      manage.py delayq_replan_timeout --policy shop.order.cancel_unpaid --dry-run
      manage.py delayq_replan_timeout --id 17 --hand-set --reason 'agreed by mistake'
    """
