"""`manage.py delayq_late`: limit how late timeouts of a policy may fire."""

from django_delayq.management.operating import GuardCommand


class Command(GuardCommand, name="late", arguments="LABEL DURATION|off|declared"):
    """Limits the lateness: timeouts whose first attempt would begin later than that are skipped, or dead.

    Examples:
      manage.py delayq_late shop.order.cancel_unpaid 6h --then dead
      manage.py delayq_late shop.order.cancel_unpaid off
    """
