"""`manage.py delayq_resume`: let paused or held policies continue."""

from typing import Any

from django_delayq.ledger.controls import PolicyState
from django_delayq.management.operating import PolicyCommand


class Command(PolicyCommand, name="resume", done="resumed"):
    """Lets policies continue. After a hold pending deadlines are moved first, page by page; may be repeated.

    Examples:
      manage.py delayq_resume shop.order.cancel_unpaid
      manage.py delayq_resume shop.order.cancel_unpaid --no-shift
      manage.py delayq_resume --all --dry-run
    """

    all_help = "all policies that are stopped, for any reason: --dry-run shows the reasons"

    def left_alone(self, state: PolicyState, options: dict[str, Any]) -> str:
        return "" if state.is_stopped else "nothing to change"
