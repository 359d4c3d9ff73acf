"""Change many rows, page by page: lock their objects, then the rows, change them, and continue with the next page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections
from django.db.models import Model, Q, QuerySet

from django_delayq.key_types import pk_of
from django_delayq.ledger.locking import (
    database_of,
    lock_in_slot_order,
    lock_objects,
    locking_rows,
    transaction_of,
    with_keys,
)
from django_delayq.ledger.subjects import model_and_pk_of, model_of_kind, objects_of, order_matters
from django_delayq.models import Timeout

if TYPE_CHECKING:
    Rows = Timeout | QuerySet[Timeout] | Iterable[Timeout]

CHUNK = 500
R = TypeVar("R")
_EXPECTED = "Expected timeouts, such as pending_timeouts(...) returns, not {}."


@dataclass(frozen=True)
class Page:
    """Rows and their objects, both locked until the transaction ends; not locked in a dry run."""

    using: str
    ids: Sequence[int]
    """The rows that were asked for."""
    rows: list[Timeout]
    """Those of them that exist, or that are pending if only those were asked for, in the order of their slots."""
    locked: dict[type[Model], dict[Any, Model]] | None
    """The existing objects of `rows` by model and key, if they are locked and the caller asked for them."""

    def object_of(self, row: Timeout) -> Any:
        """Return the object of `row`; None: it does not exist."""
        model, pk = model_and_pk_of(row, self.using)
        return None if model is None else self._objects.get(model, {}).get(pk)

    @cached_property
    def _objects(self) -> dict[type[Model], dict[Any, Model]]:
        """Return `locked`; in a dry run, which rarely needs the objects, read them now."""
        if self.locked is not None:
            return self.locked
        places = objects_of(self.rows, self.using)
        return {model: model._base_manager.using(self.using).in_bulk(pks) for model, pks in places}


def each_page(
    rows: Rows,
    change: Callable[[Page], R],
    *,
    pending_only: bool = True,
    or_firing: bool = False,
    by_id: bool = False,
    newest_first: bool = False,
    dry_run: bool = False,
    columns: Sequence[str] = (),
) -> Iterator[R]:
    """Call `change` for each page of `rows` in a transaction of its own, or in the caller's; yield its results.

    Inside a caller's transaction the locks of all pages add up, so the pages come in lock order. Outside, each
    transaction ends before its result is yielded, so that the caller may stop between two pages.

    Args:
        rows: a `Timeout`, a queryset or an iterable of them. They are read again on the writer.
        change: gets a `Page`, and writes.
        pending_only: leave out rows that are not pending any more.
        or_firing: with `pending_only`, do not leave out those that are firing.
        by_id: outside a transaction, read the ids of a queryset page by page. A list of a million ids is not needed.
            Rows that are created meanwhile are left out: workers may fire rows of the first pages, and their handlers
            schedule the next rounds, which belong to the queryset, too.
        newest_first: of each object, the newest row comes first, whatever `rows` is.
        dry_run: lock nothing and open no transaction.
        columns: those of the rows that `change` reads, if it needs no others and no objects: half of the work is to
            make instances.
    """
    using, pages = _pages(rows, by_id=by_id, newest_first=newest_first)
    for ids in pages:
        with nullcontext() if dry_run else transaction_of(using):
            options: Any = {"pending_only": pending_only, "or_firing": or_firing, "columns": columns}
            result = change(read_page(ids, using, lock=not dry_run, **options))
        yield result


def read_page(
    ids: Sequence[int],
    using: str,
    *,
    pending_only: bool = True,
    or_firing: bool = False,
    lock: bool = True,
    columns: Sequence[str] = (),
) -> Page:
    """Return the rows `ids` and their objects, locked in the order in which all callers lock: objects, then rows.

    The objects are fresh. Call it inside `transaction_of(using)`. The other arguments are those of `each_page`.
    """
    rows: Any = with_keys(Timeout.objects.using(using).all(), ids)
    if pending_only:
        rows = rows.filter(Q(slot_taken=1) | Q(state=Timeout.State.FIRING) if or_firing else Q(slot_taken=1))
    if columns:
        rows = rows.only(*columns)
    if not lock:
        return Page(using, ids, list(rows.defer("payload").order_by("slot", "id")), None)
    objects: dict[type[Model], dict[Any, Model]] = {}
    places: Any = rows.values_list("policy", "content_type_id", "object_id", named=True)
    for model, pks in objects_of(places, using):
        if columns:
            list(locking_rows(model, pks, using).values_list("pk", flat=True))
        else:
            objects[model] = lock_objects(model, pks, using)
    return Page(using, ids, lock_in_slot_order(rows, using), objects)


def chunks(rows: Sequence[Any], size: int | None = None) -> Iterator[Sequence[Any]]:
    """Yield `rows` in pieces of `size`, by default in pieces that every database takes in one statement."""
    size = size or CHUNK
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def newest_id(using: str) -> int:
    """Return the id of the newest row; 0: there is none."""
    return Timeout.objects.using(using).order_by("-pk").values_list("pk", flat=True).first() or 0


def _pages(rows: Rows, *, by_id: bool, newest_first: bool) -> tuple[str, Iterator[Sequence[int]]]:
    """Return the writer and pages of ids, in the order of the objects' kinds and keys, in which all callers lock them.

    Not in the order of the strings, where 10 comes before 9. Of one object the newest row comes first. A queryset is
    evaluated again, by the writer.
    """
    names = ("content_type_id", "object_id", "pk")
    if isinstance(rows, QuerySet):
        if rows.model is not Timeout:
            raise TypeError(_EXPECTED.format(rows.model.__name__ + " queryset"))
        using = database_of(Timeout, rows)
        found: Any = rows.using(using)
        if not order_matters(rows):
            if by_id and not connections[using].in_atomic_block:
                return using, _pages_by_id(found, newest_id(using), newest_first=newest_first)
            found = found.order_by()
        found = found.values_list(*names)
    else:
        listed = _listed(rows)
        writers = sorted({database_of(Timeout, row) for row in listed}) or [database_of(Timeout)]
        if len(writers) > 1:
            raise TypeError(f"The timeouts are in several databases, {', '.join(writers)}. Pass those of one.")
        using, found = writers[0], [tuple(getattr(row, name) for name in names) for row in listed]
    places = sorted({_place(kind, key, row_id, using) for kind, key, row_id in found})  # a join may repeat a row
    return using, chunks([-place[-1] for place in places])


def _pages_by_id(rows: QuerySet[Timeout], newest: int, *, newest_first: bool) -> Iterator[Sequence[int]]:
    order, beyond, last = ("-pk", "pk__lt", newest + 1) if newest_first else ("pk", "pk__gt", 0)
    rows = rows.filter(pk__lte=newest).order_by(order)
    while page := list(rows.filter(**{beyond: last}).values_list("pk", flat=True)[:CHUNK]):
        yield list(dict.fromkeys(page))
        last = page[-1]


def _listed(rows: Any) -> list[Timeout]:
    if isinstance(rows, Timeout):
        return [rows]
    if isinstance(rows, type | str | Model) or not isinstance(rows, Iterable):
        raise TypeError(_EXPECTED.format(rows.__name__ if isinstance(rows, type) else type(rows).__name__))
    listed = list(rows)
    for row in listed:
        if not isinstance(row, Timeout):
            raise TypeError(_EXPECTED.format(type(row).__name__))
    return listed


def _place(content_type_id: int, object_id: str, row_id: int, using: str) -> tuple[int, bool, Any, int]:
    model = model_of_kind(content_type_id, using)
    try:
        return content_type_id, False, object_id if model is None else pk_of(model, object_id), -row_id
    except ValueError:  # not a key of this model: no object will be locked for it
        return content_type_id, True, object_id, -row_id
