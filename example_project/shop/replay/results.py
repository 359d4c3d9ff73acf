"""The timeouts of a run, counted."""

from __future__ import annotations

from collections import defaultdict

from django.db.models import Count, Max, QuerySet

from django_delayq import get_policies, get_policy
from django_delayq.models import Timeout

Counts = dict[str, dict[str, int]]


class Ledger:
    """The timeouts that a run has created: those with a higher id than all earlier ones."""

    def __init__(self, after_id: int) -> None:
        self.after_id = after_id

    @classmethod
    def from_now_on(cls) -> Ledger:
        """Return the ledger of all timeouts that are scheduled from now on."""
        return cls(Timeout.objects.aggregate(highest=Max("id"))["highest"] or 0)

    def rows(self) -> QuerySet[Timeout]:
        return Timeout.objects.filter(id__gt=self.after_id)

    def open_rows(self) -> QuerySet[Timeout]:
        """Return the timeouts that have not settled."""
        return self.rows().filter(settled_at__isnull=True)

    def counts(self) -> Counts:
        """Return `{policy name: {state: count}}` in the order of declaration, without zeros."""
        found: Counts = defaultdict(dict)
        grouped = self.rows().order_by("policy", "state").values_list("policy", "state").annotate(count=Count("id"))
        for label, state, count in grouped:
            found[policy_name(label)][state] = count
        return {policy.name: found[policy.name] for policy in get_policies() if policy.name in found}


def policy_name(label: str) -> str:
    """Return `cancel_unpaid` for `shop.order.cancel_unpaid`."""
    return get_policy(label).name


def table(counts: Counts) -> str:
    """Return the counts as a table."""
    states = [state for state in Timeout.State.values if any(state in row for row in counts.values())]
    lines = [["policy", *states]]
    lines += [[name, *(str(row.get(state, "-")) for state in states)] for name, row in counts.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )
