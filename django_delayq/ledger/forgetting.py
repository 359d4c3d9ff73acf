"""What pruning may do with rows: delete those that nobody needs any more."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.models import Timeout

PAGE: Final = 500


def delete_page(using: str, before: datetime, start: datetime | None) -> tuple[int, datetime | None]:
    """Of the rows settled from `start` on and settled and due before `before`, the first are deleted.

    Returns how many, and from where to go on; None: there are no more. Going on from there, rows that must stay are
    passed once, and not once a page. Sorted by `settled_at` alone, as the index is: with ids behind it PostgreSQL
    would sort all that were settled by one bulk call, for each page anew.
    """
    old = Timeout.objects.using(using).filter(settled_at__lt=before, due_at__lt=before)
    rows = old if start is None else old.filter(settled_at__gte=start)
    page = list(rows.order_by("settled_at").values_list("settled_at", "id")[:PAGE])
    with transaction_of(using):
        # Asked for again: an operator may have revived one in between. One that somebody holds stays until the next
        # time: he may be waiting for another of them.
        found = old.filter(pk__in=[id for _, id in page]).order_by("pk")
        free = list(for_update(found, using, wait=False).values_list("pk", flat=True))
        count, _ = old.filter(pk__in=free).delete()
    return count, page[-1][0] if count and len(page) == PAGE else None
