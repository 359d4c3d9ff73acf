"""The floor of a work of django-delayq: its statements, recorded and executed again without the library.

The statements of `save` and `bulk` are written here, because the calls that they need are not theirs alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from django.apps import apps
from django.db import connection, transaction

from benchmarks.rivals.base import Contestant, Meter, copy_rows

LEDGER = "django_delayq_timeout"
TOGETHER = 50
CALLER = ("UPDATE shop_", 'UPDATE "shop_')
"""What the caller or the handler writes begins like this."""


class Transaction(NamedTuple):
    """Statements with their parameters. Not `is_atomic`: one statement that commits by itself."""

    is_atomic: bool
    statements: list[tuple[str, Any]]


def recorded(operation: Callable[[], Any]) -> list[Transaction]:
    """Return the statements that the metered blocks of an operation execute, except those of baselines.

    A prepared statement is recorded as its EXECUTE, which the same connection can repeat.
    """
    found: list[Transaction] = []
    blocks: list[Any] = [None]

    def record(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        block = connection.atomic_blocks[0] if connection.atomic_blocks else None
        if block is None or block is not blocks[0]:
            found.append(Transaction(block is not None, []))
        blocks[0] = block
        found[-1].statements.append((sql, params and list(params)))
        return execute(sql, params, many, context)

    Meter.recorder = record
    try:
        operation()
    finally:
        Meter.recorder = None
    return found


def _execute(statements: Sequence[tuple[str, Any]]) -> None:
    for sql, params in statements:
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            if cursor.description:
                cursor.fetchall()


class Floor:
    """The statements of a work, by Django's cursor alone.

    Args:
        adapter: django-delayq.
        found: the statements of the work, see `recorded`. The rows that they read and change are there again.
    """

    def __init__(self, adapter: Contestant, found: Sequence[Transaction]) -> None:
        self._adapter, self._found = adapter, found

    def measure(self, work: str, count: int) -> dict[str, float]:
        """Do a work of `CASES` this many times."""
        figures: dict[str, float] = getattr(self, f"_{work}", self._fire)(count)
        return figures

    def _schedule(self, count: int) -> dict[str, float]:
        with Meter() as meter:
            for is_atomic, statements in self._found:
                with transaction.atomic() if is_atomic else contextlib.nullcontext():
                    _execute(statements)
        return meter.per_call(count)

    def _inside(self, count: int) -> dict[str, float]:
        """Execute what is not the caller's, in one transaction."""
        own = [one for _, statements in self._found for one in statements if not one[0].startswith(CALLER)]
        with Meter() as meter, transaction.atomic():
            _execute(own)
        return meter.per_call(count)

    def _bulk(self, count: int) -> dict[str, float]:
        with Meter() as meter:
            copy_rows(LEDGER, self._adapter.unique_columns, count)
        return meter.per_call(count)

    def _save(self, count: int) -> dict[str, float]:
        """Read an object and its pending row."""
        from django.contrib.contenttypes.models import ContentType

        from benchmarks.shop.models import Order

        kind = ContentType.objects.get_for_model(Order).pk
        pks = list(Order.objects.values_list("pk", flat=True)[:count])
        statement = (
            f"SELECT o.*, t.id, t.run_at, t.since_at FROM shop_order o LEFT JOIN {LEDGER} t ON t.content_type_id = %s "
            "AND t.object_id = o.id::text AND t.state = 'pending' WHERE o.id = %s"
        )
        with Meter() as meter:
            for pk in pks:
                with connection.cursor() as cursor:
                    cursor.execute(statement, [kind, pk])
                    cursor.fetchone()
        return meter.per_call(len(pks))

    def _fire(self, count: int) -> dict[str, float]:
        """Execute the transactions of firings. What a handler saves, Django's ORM saves here, too."""
        from django_delayq.models import Timeout

        objects = _saved_objects(one for _, statements in self._found for one in statements)
        with Meter() as meter:
            for is_atomic, statements in self._found:
                with transaction.atomic() if is_atomic else contextlib.nullcontext():
                    _execute([one for one in statements if not one[0].startswith(CALLER)])
                    for sql, params in statements:
                        if sql.startswith(CALLER):
                            objects[params[-1]].save()
        fired = Timeout.objects.filter(state="fired").count()
        assert fired == count, f"{fired} of {count} fired"
        return meter.per_call(count)


def _saved_objects(statements: Iterator[tuple[str, Any]]) -> dict[Any, Any]:
    """Return the invoices that these statements save, by key, as a handler has changed them."""
    pks = [params[-1] for sql, params in statements if sql.startswith(CALLER)]
    found: dict[Any, Any] = apps.get_model("shop", "Invoice").objects.in_bulk(pks)
    for invoice in found.values():
        invoice.status = "cancelled"
    return found
