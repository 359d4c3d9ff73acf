"""`manage.py delayq_late`: limit how late timeouts of a policy may fire."""

from django_delayq.management.operating import GuardCommand


class Command(GuardCommand):
    """Limits the lateness: timeouts whose first attempt would begin later than that are skipped, or dead."""

    arguments = "LABEL DURATION|off|declared"
    examples = ("shop.order.cancel_unpaid 6h --then dead", "shop.order.cancel_unpaid off")
    name = "late"
