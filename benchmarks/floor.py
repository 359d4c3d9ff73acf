"""The floor of a work of django-delayq: the same statements on PostgreSQL without the library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import redis
from django.apps import apps
from django.db import connection, transaction

from benchmarks.rivals.base import REDIS_URL, Contestant, Meter, copy_rows

LEDGER = "django_delayq_timeout"
TOGETHER = 50
SETTLED = {"state": "'fired'", "cause": "'due'", "settled_at": "now()", "slot_taken": "NULL"}


class Floor:
    """The statements of a work, by Django's cursor and redis-py alone."""

    def __init__(self, adapter: Contestant) -> None:
        self._adapter = adapter

    def measure(self, work: str, count: int) -> dict[str, float]:
        """Do a work of `CASES` this many times."""
        figures: dict[str, float] = getattr(self, f"_{work}")(count)
        return figures

    def _newest(self) -> dict[str, Any]:
        """Return the columns of the newest row of the ledger, except its id."""
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {LEDGER} ORDER BY id DESC LIMIT 1")
            row = dict(zip([column.name for column in cursor.description], cursor.fetchone(), strict=True))
        del row["id"]
        return row

    def _schedule(self, count: int, context: Callable[[], Any] = contextlib.nullcontext) -> dict[str, float]:
        """Insert rows with the columns of a scheduled one, and call one script of Redis for each."""
        row, client = self._newest(), redis.Redis.from_url(REDIS_URL)
        script = client.script_load("return redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])")
        columns, marks = ", ".join(f'"{name}"' for name in row), ", ".join(["%s"] * len(row))
        statement = f"INSERT INTO {LEDGER} ({columns}) VALUES ({marks}) RETURNING id"
        rows = [row | {"slot": uuid4().hex, "idempotency_key": uuid4().hex} for _ in range(count)]
        with Meter() as meter, context():
            for number, values in enumerate(rows):
                with connection.cursor() as cursor:
                    cursor.execute(statement, list(values.values()))
                    cursor.fetchone()
                client.evalsha(script, 1, "floor", number, number)
        return meter.per_call(count)

    def _inside(self, count: int) -> dict[str, float]:
        return self._schedule(count, transaction.atomic)

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

    def _alone(self, count: int) -> dict[str, float]:
        return self._fire("Task", count, 1)

    def _settle(self, count: int) -> dict[str, float]:
        return self._fire("Invoice", count, 1, save=True)

    def _together(self, count: int) -> dict[str, float]:
        return self._fire("Task", count, TOGETHER)

    def _fire(self, name: str, count: int, size: int, *, save: bool = False) -> dict[str, float]:
        """Lock the objects, mark the rows as fired, have the handler save, and commit: `size` with each transaction."""
        from django_delayq.models import Timeout

        model = apps.get_model("shop", name)
        values = ", ".join(f"{column} = {value}" for column, value in SETTLED.items() if column in self._newest())
        lock = f"SELECT * FROM {model._meta.db_table} WHERE id = ANY(%s) FOR UPDATE"
        mark = f"UPDATE {LEDGER} SET {values} WHERE id = ANY(%s) AND state = 'pending' RETURNING *"
        rows = list(Timeout.objects.due().order_by("run_at", "pk").values_list("pk", "object_id")[:count])
        fields = [field.attname for field in model._meta.concrete_fields]
        with Meter() as meter:
            for start in range(0, count, size):
                part = rows[start : start + size]
                with transaction.atomic():
                    with connection.cursor() as cursor:
                        cursor.execute(lock, [[int(object_id) for _, object_id in part]])
                        objects = [model.from_db("default", fields, values) for values in cursor.fetchall()]
                        cursor.execute(mark, [[pk for pk, _ in part]])
                        cursor.fetchall()
                    for obj in objects if save else ():
                        obj.save()
        return meter.per_call(count)
