"""`manage.py delayq_shadow`: switch the shadow mode of a policy."""

from django_delayq.management.operating import GuardCommand


class Command(GuardCommand):
    """Switches shadow mode: everything happens but the handler, and due timeouts are skipped, for good."""

    arguments = "LABEL on|off|declared"
    examples = ("shop.order.cancel_unpaid on --share 10", "shop.order.cancel_unpaid declared")
    name = "shadow"
