"""`manage.py delayq_refire`: repeat settled timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand, name="refire", done="scheduled again"):
    """Gives settled timeouts a new round with the same payload. A worker fires it if its condition holds.

    Examples:
      manage.py delayq_refire --policy shop.order.cancel_unpaid --state dead --dry-run
      manage.py delayq_refire --id 17 --at 2h
    """
