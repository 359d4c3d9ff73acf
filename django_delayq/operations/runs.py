"""Change the rows of a selection page by page, so that an interrupted call that is repeated continues.

Postponed twice, a timeout would be an hour too late. So an operation that would change a row a second time stores after
each page how far it has come, in the transaction of that page. The same call, within a day, continues behind it: the
same operation and arguments, for what the same statement selects. Two such calls at a time share the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final, TypeVar

from django.db import connections
from django.db.models import Q, QuerySet

from django_delayq.clock import database_now
from django_delayq.ledger import statements
from django_delayq.ledger.locking import for_update, transaction_of
from django_delayq.ledger.paging import Page, newest_id, read_page
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import order_matters
from django_delayq.models import Timeout, UnfinishedRun

R = TypeVar("R")
FORGOTTEN_AFTER: Final = timedelta(days=1)
"""An operator who repeats an operation on another day means to do it again."""


def may_continue(target: object) -> bool:
    """Return whether `target` is a selection whose rows can be read in the order of their ids, page by page."""
    if not isinstance(target, QuerySet) or target.model is not Timeout or order_matters(target):
        return False
    return not connections[database_of(Timeout, target)].in_atomic_block


def begin_or_continue(rows: QuerySet[Timeout], verb: str, arguments: object, by: str) -> UnfinishedRun:
    """Return the run of this operation that was interrupted, or a new one. Raises the database's errors."""
    using = rows.db
    sql, parameters = rows.order_by().values("pk").query.get_compiler(using).as_sql()
    digest = hashlib.blake2b(repr((verb, arguments, sql, parameters)).encode(), digest_size=32).hexdigest()
    runs, now = UnfinishedRun.objects.using(using), database_now(using)
    runs.filter(touched_at__lt=now - FORGOTTEN_AFTER).delete()
    newest = newest_id(using)
    values = {"verb": verb, "by": by, "at": now, "touched_at": now, "newest_id": newest}
    values["cursor"] = newest + 1 if _is_descending(rows) else 0
    run, _ = runs.get_or_create(digest=digest, defaults=values)
    return run


def _is_descending(rows: QuerySet[Timeout]) -> bool:
    return rows.query.order_by == ("-pk",)


def each_page(
    rows: QuerySet[Timeout], run: UnfinishedRun, change: Callable[[Page], R], changed: Callable[[R], int]
) -> Iterator[R]:
    """Call `change` for each page of `rows`, ordered by id, behind the place of `run`; yield its results.

    Each page is a transaction of its own, which also stores the place, and how many rows were `changed`. At the end the
    run is deleted.
    """
    using, beyond = rows.db, "pk__lt" if _is_descending(rows) else "pk__gt"
    runs = UnfinishedRun.objects.using(using).filter(pk=run.pk)
    while True:
        with transaction_of(using):
            place = next(iter(for_update(runs, using)), None)
            if place is None:  # another call has completed it
                return
            page: list[int] = list(
                rows.filter(pk__lte=place.newest_id, **{beyond: place.cursor}).values_list("pk", flat=True)[
                    : statements.CHUNK
                ]
            )
            if not page:
                runs.delete()
                return
            result = change(read_page(list(dict.fromkeys(page)), using, only=Q()))
            _advance(place, page[-1], changed(result), database_now(using))
        yield result


def _advance(run: UnfinishedRun, cursor: int, changed: int, now: datetime) -> None:
    run.cursor, run.changed, run.touched_at = cursor, run.changed + changed, now
    run.save(update_fields=["cursor", "changed", "touched_at"])
