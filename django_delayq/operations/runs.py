"""Change the rows of a selection page by page, so that an interrupted call that is repeated continues.

Postponed twice, a timeout would be an hour too late. So an operation that would change a row a second time stores after
each page how far it has come, in the transaction of that page. The same call, within a day, continues behind it: the
same operation and arguments, for what the same statement selects. Two such calls at a time share the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final, TypeVar

from django.db import connections
from django.db.models import Q, QuerySet

from django_delayq.clock import DatabaseNow, database_now
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
    """Return the run of this operation that was interrupted, or a new one, which is not saved yet.

    Raises the database's errors.
    """
    using = rows.db
    sql, parameters = rows.order_by().values("pk").query.get_compiler(using).as_sql()
    digest = hashlib.blake2b(repr((verb, arguments, sql, parameters)).encode(), digest_size=32).hexdigest()
    recent = Q(touched_at__gt=DatabaseNow() - FORGOTTEN_AFTER)
    found = UnfinishedRun.objects.using(using).filter(recent, digest=digest).first()
    if found is not None:
        return found
    newest = newest_id(using)
    cursor = newest + 1 if _is_descending(rows) else 0
    return UnfinishedRun(verb=verb, digest=digest, by=by, cursor=cursor, newest_id=newest)


def _is_descending(rows: QuerySet[Timeout]) -> bool:
    return rows.query.order_by == ("-pk",)


def each_page(
    rows: QuerySet[Timeout], run: UnfinishedRun, change: Callable[[Page], R], changed: Callable[[R], int]
) -> Iterator[R]:
    """Call `change` for each page of `rows`, ordered by id, behind the place of `run`; yield its results.

    Each page is a transaction of its own, which also stores the place, and how many rows were `changed`; the last one
    deletes the run. One page alone stores nothing.
    """
    using, beyond, is_last = rows.db, "pk__lt" if _is_descending(rows) else "pk__gt", False
    while not is_last:
        with transaction_of(using):
            if run.pk is not None:
                place = next(iter(for_update(UnfinishedRun.objects.using(using).filter(pk=run.pk), using)), None)
                if place is None:  # another call has completed it
                    return
                run = place
            behind = rows.filter(pk__lte=run.newest_id, **{beyond: run.cursor})
            page: list[int] = list(behind.values_list("pk", flat=True)[: statements.CHUNK])
            result = change(read_page(list(dict.fromkeys(page)), using, only=Q()))
            is_last = len(page) < statements.CHUNK
            if not is_last:
                run.cursor, run.changed = page[-1], run.changed + changed(result)
                _save(run, using)
            elif run.pk is not None:
                run.delete(using=using)
        yield result


def _save(run: UnfinishedRun, using: str) -> None:
    """Store the place of `run`; the first time, forget those that no call has continued."""
    run.touched_at = database_now(using)
    runs = UnfinishedRun.objects.using(using)
    if run.pk is not None:
        run.save(using=using, update_fields=["cursor", "changed", "touched_at"])
        return
    runs.filter(touched_at__lte=run.touched_at - FORGOTTEN_AFTER).delete()
    run.at = run.touched_at
    run.save(using=using)
