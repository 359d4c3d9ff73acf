"""`manage.py delayq_shadow`: switch the shadow mode of a policy."""

from django_delayq.management.operating import GuardCommand


class Command(GuardCommand, name="shadow", arguments="LABEL on|off|declared"):
    """Switches shadow mode: everything happens but the handler, and due timeouts are skipped, for good.

    Examples:
      manage.py delayq_shadow shop.order.cancel_unpaid on --share 10
      manage.py delayq_shadow shop.order.cancel_unpaid declared
    """
