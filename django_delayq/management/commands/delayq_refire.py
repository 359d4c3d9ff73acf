"""`manage.py delayq_refire`: repeat settled timeouts."""

from django_delayq.management.operating import TimeoutCommand


class Command(TimeoutCommand):
    """Gives settled timeouts a new round with the same payload. A worker fires it if its condition holds."""

    examples = ("--policy shop.order.cancel_unpaid --state dead --dry-run", "--id 17 --at 2h")
    name, done = "refire", "scheduled again"
