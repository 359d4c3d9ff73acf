"""`manage.py delayq_erase`: erase the personal data of settled timeouts."""

from django_delayq.management.operating import TimeoutCommand
from django_delayq.models import Timeout


class Command(TimeoutCommand, name="erase", done="erased", states=tuple(Timeout.State.values)):
    """Empties payloads, keys, reasons and error messages of settled timeouts. The rows stay.

    Timeouts that are not settled need their data: they are left unchanged, and reported. Cancel them first.

    Examples:
      manage.py delayq_erase --related shop.customer:7 --dry-run
      manage.py delayq_erase --related shop.customer:7 --reason "request 4711"
    """
