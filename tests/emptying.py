"""Empty the test database after a test with `transaction=True`, ten times as fast as Django's `flush`.

Django truncates every table and then creates all content types and permissions again: some 100 queries, for each of
several thousand tests. Here these two tables are left as they are, unless a test has changed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.management.color import no_style
from django.db import connections
from django.test import TransactionTestCase

KEPT = {"django_content_type", "auth_permission"}
LARGE_TABLE_BYTES = 200_000
"""PostgreSQL truncates from here on: plans of later queries must not depend on dead rows."""


@contextmanager
def quick() -> Iterator[None]:
    """Tests inside the block are followed by a quick emptying of their databases."""
    cases: Any = TransactionTestCase
    flush = cases._fixture_teardown
    kept: dict[Any, list[Any]] = {}

    def empty_all(case: Any) -> None:
        opened = [connections[alias] for alias in type(case)._databases_names(include_mirrors=False)]
        if all(kept.get(_name(connection)) == _fingerprint(connection) for connection in opened):
            for connection in opened:
                connection.ops.execute_sql_flush(_statements(connection))
            return
        flush(case)
        kept.update({_name(connection): _fingerprint(connection) for connection in opened})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", empty_all)
        yield


def _name(connection: Any) -> tuple[str, str]:
    return connection.alias, str(connection.settings_dict["NAME"])


def _fingerprint(connection: Any) -> list[Any]:
    """Return what differs after a row of the kept tables was added, removed or created again."""
    with connection.cursor() as cursor:
        tables = sorted(KEPT.intersection(connection.introspection.table_names(cursor)))
        if not tables:  # a database of the application alone, without the ledger
            return []
        cursor.execute(" UNION ALL ".join(f"SELECT '{table}', count(*), sum(id) FROM {table}" for table in tables))
        return sorted((name, int(count), int(total or 0)) for name, count, total in cursor.fetchall())


def _statements(connection: Any) -> list[str]:
    names = connection.introspection.django_table_names(only_existing=True, include_views=False)
    tables = [name for name in names if name not in KEPT]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT relname, pg_relation_size(oid) FROM pg_class "
                "WHERE relname = ANY(%s) AND pg_relation_size(oid) > 0",
                [tables],
            )
            sizes = dict(cursor.fetchall())
        if max(sizes.values(), default=0) < LARGE_TABLE_BYTES:
            return [f"DELETE FROM {connection.ops.quote_name(table)}" for table in sizes]
    statements: list[str] = connection.ops.sql_flush(no_style(), tables, reset_sequences=False, allow_cascade=False)
    return statements
