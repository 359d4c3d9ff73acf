"""`manage.py delayq_erase`: erase the personal data of settled timeouts."""

from typing import ClassVar

from django_delayq.management.operating import TimeoutCommand
from django_delayq.models import Timeout


class Command(TimeoutCommand):
    """Empties payloads, keys, reasons and error messages of settled timeouts. The rows stay.

    Timeouts that are not settled need their data: they are left unchanged, and reported. Cancel them first.
    """

    examples = ("--related shop.customer:7 --dry-run", '--related shop.customer:7 --reason "request 4711"')
    name, done = "erase", "erased"
    states: ClassVar[tuple[str, ...]] = tuple(Timeout.State.values)
