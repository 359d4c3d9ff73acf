"""`manage.py delayq_postpone`: give timeouts later deadlines."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="postpone", done="postponed"):
    """Gives timeouts a later deadline; never an earlier one.

    Examples:
      manage.py delayq_postpone --policy shop.order.cancel_unpaid --due-before 3h --by 2h --dry-run
      manage.py delayq_postpone --id 17 --to 2026-03-01T18:00
    """
