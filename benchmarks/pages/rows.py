"""Fill the ledger with 1,000,000 pending and 300,000 settled rows for the pages of operators."""

from __future__ import annotations

from typing import Any

SERIES = {
    "postgresql": "(SELECT generate_series(1, {rows}) AS n) AS series",
    "mysql": "(SELECT CAST(seq AS SIGNED) AS n FROM seq_1_to_{rows}) AS series",
    "sqlite": (
        "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}) SELECT n FROM s) AS series"
    ),
}
AFTER_NOW = {
    "postgresql": "now() + ({seconds}) * interval '1 second'",
    "mysql": "UTC_TIMESTAMP(6) + INTERVAL ({seconds}) SECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', ({seconds}) || ' seconds')",
}
MONTH = 30 * 86400
ORDERS, CUSTOMERS, MANY_ORDERS = 50_000, 500, 2_000
# n: the number of the row. Deadlines are within 60 days from 30 minutes ago, spread so that neighbours in time are far
# apart on the disk. Every hundredth settled row is dead; one policy and one queue are rare; few rows have a key.
POLICY = (
    "CASE WHEN n % 20011 = 0 THEN 'gone.order.forgotten' WHEN n % 5 < 3 THEN 'testapp.order.cancel_unpaid' "
    "WHEN n % 5 = 3 THEN 'testapp.order.remind' ELSE 'testapp.parcel.chase' END"
)
FORM = """
INSERT INTO django_delayq_timeout
    (policy, content_type_id, object_id, {key_column}, queue, state, cause, due_at, run_at, first_due_at, extensions,
     attempts, payload, history, reason, created_at, settled_at, idempotency_key, slot, slot_taken, final_attempt,
     claims, snoozes, deaths, is_requested, is_due_by_request, held_by_hand, held_when, trace, share, step, steps_over,
     keeps_deadline, is_guarded, since_at, terms, computed_due_at)
SELECT {policy}, {kind}, {n} , CASE WHEN n % 1000 = 7 THEN {keyed} ELSE '' END,
       CASE WHEN n % 5003 = 0 THEN 'rare' ELSE 'default' END,
       {state}, {cause}, {due}, {due}, {due}, 0, 0, '{{"basket": ["one", "two"]}}', '{history}', '', {made}, {settled},
       {digits}, {digits}, {taken}, {no}, 0, 0, 0, {no}, {no}, {no}, {no}, '', '', '', '', {no}, {no}, {made}, '', {due}
FROM {series}
"""
HISTORY = '[{"at": "2026-01-01T00:00:00+00:00", "what": "extended", "by": "admin:anna", "reason": "on request"}]'


SETTLED = {
    "state": "CASE WHEN n % 100 = 0 THEN 'dead' WHEN n % 100 < 3 THEN 'skipped' "
    "WHEN n % 100 < 60 THEN 'cancelled' ELSE 'fired' END",
    "cause": "CASE WHEN n % 100 = 0 THEN 'retries' WHEN n % 100 < 3 THEN 'gone' "
    "WHEN n % 100 < 60 THEN 'condition' ELSE 'due' END",
    "taken": "NULL",
}
WAITING = {"state": "'pending'", "cause": "''", "taken": "1"}


def fill_orders() -> None:
    """Insert orders of many customers, the first of which has 2,000, and declare a policy that searches orders."""
    from django.db import connection

    from django_delayq import timeout_policy
    from tests.testapp.models import Customer, Order

    timeout_policy(Order, name="searched", search="note", owner="customer")(lambda order, timeout: None)
    Customer.objects.bulk_create([Customer(pk=pk) for pk in range(1, CUSTOMERS + 1)])
    Order.objects.bulk_create(
        [
            Order(pk=pk, note=f"N-{pk}", customer_id=1 if pk <= MANY_ORDERS else pk % CUSTOMERS + 1)
            for pk in range(1, ORDERS + 1)
        ],
        batch_size=5_000,
    )
    with connection.cursor() as cursor:
        cursor.execute("CREATE INDEX bench_note ON testapp_order (note)")


def fill(waiting: int, settled: int) -> None:
    """Insert pending and settled rows, with two statements in the database."""
    from django.db import connection

    vendor = connection.vendor
    after = AFTER_NOW[vendor]
    spread = "((n % 200000) * 7919) % "
    over = {
        "due": after.format(seconds=f"-({spread}{MONTH}) - 60"),
        "settled": after.format(seconds=f"-({spread}{MONTH}) - 59"),
    }
    ahead = {
        "due": after.format(seconds=f"({spread}{MONTH * 2}) - 1800"),
        "settled": "CAST(NULL AS timestamptz)" if vendor == "postgresql" else "NULL",
    }
    with connection.cursor() as cursor:
        for digit, count, values in (("5", settled, SETTLED | over), ("a", waiting, WAITING | ahead)):
            series = SERIES[vendor].format(rows=count)
            cursor.execute(FORM.format(**_common(vendor), **values, digits=_digits(vendor, digit), series=series))
        cursor.execute("ANALYZE TABLE django_delayq_timeout" if vendor == "mysql" else "ANALYZE django_delayq_timeout")
        if vendor == "mysql":
            cursor.fetchall()


def _common(vendor: str) -> dict[str, Any]:
    """Return the values that all rows share."""
    from django.contrib.contenttypes.models import ContentType

    from tests.testapp.models import Order

    return {
        "key_column": "`key`" if vendor == "mysql" else '"key"',
        "policy": POLICY,
        "kind": ContentType.objects.get_for_model(Order).pk,
        "n": "CAST(n AS CHAR(20))" if vendor == "mysql" else "CAST(n AS VARCHAR)",
        "history": HISTORY,
        "keyed": _numbered(vendor, "part-"),
        "no": "false" if vendor == "postgresql" else "0",
        "made": AFTER_NOW[vendor].format(seconds=f"n * 0.1 - {MONTH * 2}"),
    }


def _numbered(vendor: str, word: str) -> str:
    return f"CONCAT('{word}', n)" if vendor == "mysql" else f"'{word}' || n"


def _digits(vendor: str, first: str) -> str:
    """Return 32 hexadecimal digits, different for each row."""
    if vendor == "sqlite":
        return f"printf('{first}%031d', n)"
    padded = f"CONCAT('{first}', LPAD(CAST(n AS CHAR(20)), 31, '0'))"
    return f"('{first}' || lpad(CAST(n AS varchar), 31, '0'))::uuid" if vendor == "postgresql" else padded
