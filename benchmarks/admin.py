"""Measure the pages of the admin with 1,000,000 pending and 300,000 settled rows.

The list without and with each filter, search and date, its later pages, and the other pages.

DELAYQ_TEST_DB=postgresql python benchmarks/admin.py [--rows 1000000] [--times 5]

Each figure is a whole request through Django's test client, without the network: middleware, login, queries and
template. `first` is the first request, `p50` and `max` are those of the repetitions; `cpu` is the CPU time of this
process per request.
"""

from __future__ import annotations

import argparse
import html
import re
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ground import ground, show

SERIES = {
    "postgresql": "(SELECT generate_series(1, {rows}) AS n) AS series",
    "mysql": "(SELECT seq AS n FROM seq_1_to_{rows}) AS series",
    "sqlite": (
        "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}) SELECT n FROM s) AS series"
    ),
}
AFTER_NOW = {
    "postgresql": "now() + ({seconds}) * interval '1 second'",
    "mysql": "UTC_TIMESTAMP(6) + INTERVAL ({seconds}) SECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', ({seconds}) || ' seconds')",
}
FURTHER = re.compile(r'<a href="(\?[^"]*\bfurther=[^"]*)"')
COUNT = re.compile(r"(\d+) timeouts?\s")
MONTH = 30 * 86400
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
     claims)
SELECT {policy}, {kind}, {n} , CASE WHEN n % 1000 = 7 THEN {keyed} ELSE '' END,
       CASE WHEN n % 5003 = 0 THEN 'rare' ELSE 'default' END,
       {state}, {cause}, {due}, {due}, {due}, 0, 0, '{{"basket": ["one", "two"]}}', '{history}', '', {made}, {settled},
       {n}, {slot}, {taken}, {no}, 0
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
        for slot, count, values in (("s", settled, SETTLED | over), ("w", waiting, WAITING | ahead)):
            series = SERIES[vendor].format(rows=count)
            cursor.execute(FORM.format(**_common(vendor), **values, slot=_numbered(vendor, slot), series=series))
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


TODAY = "due_at__gte={today}&due_at__lt={tomorrow}"
LISTS = {
    "list": "",
    **{f"state {state}": f"state__exact={state}" for state in ("pending", "firing", "fired", "skipped", "cancelled")},
    "policy, frequent": "policy=testapp.order.cancel_unpaid",
    "policy, rare": "policy=gone.order.forgotten",
    "queue, frequent": "queue=default",
    "queue, rare": "queue=rare",
    "due in the next hour": "due=hour",
    "overdue": "due=overdue",
    "to be retried": "due=retrying",
    "dead": "due=dead",
    "pending of a policy": "policy=testapp.order.remind&state__exact=pending",
    "dead of a policy": "policy=testapp.order.remind&state__exact=dead",
    "rare policy, rare queue": "policy=gone.order.forgotten&queue=rare",
    "search: object id": "q=777777",
    "search: key": "q=part-5007",
    "search: nothing there": "q=nothing",
    "search + state": "q=777&state__exact=pending",
    "one year": "due_at__gte={year}&due_at__lt={next_year}",
    "one month": "due_at__gte={month}&due_at__lt={next_month}",
    "one day": TODAY,
    "one day, dead": f"{TODAY}&state__exact=dead",
    "one day, pending": f"{TODAY}&state__exact=pending",
    "page 50": "p=50",
    "page 50 of pending": "p=50&state__exact=pending",
}


def pages() -> dict[str, str]:
    """Return the measured URLs by name."""
    from django.urls import reverse
    from django.utils import timezone

    from django_delayq.models import Timeout

    newest = Timeout.objects.order_by("-id").values_list("pk", flat=True)[0]
    dead = Timeout.objects.filter(state="dead").order_by("-id").values_list("pk", flat=True)[0]
    detail, steer = "admin:django_delayq_timeout_change", "admin:django_delayq_timeout_steer"
    thousand = ",".join(map(str, Timeout.objects.order_by("-id").values_list("pk", flat=True)[:1000]))
    listed, today = reverse("admin:django_delayq_timeout_changelist"), timezone.localdate()
    days = {
        "today": today,
        "tomorrow": today + timedelta(days=1),
        "month": today.replace(day=1),
        "next_month": (today.replace(day=1) + timedelta(days=32)).replace(day=1),
        "year": today.replace(month=1, day=1),
        "next_year": today.replace(year=today.year + 1, month=1, day=1),
    }
    moments = {name: quote(f"{day} 00:00:00+00:00") for name, day in days.items()}
    return {
        **{name: f"{listed}?{query.format(**moments)}" for name, query in LISTS.items()},
        "detail, pending": reverse(detail, args=[newest]),
        "detail, dead": reverse(detail, args=[dead]),
        "confirmation of 1,000 rows": f"{reverse(steer, args=['cancel'])}?ids={thousand}",
        "policies": reverse("admin:django_delayq_policycontrol_changelist"),
    }


def further(client: Any, address: str, windows: int) -> str:
    """Return the URL after following the link to further rows this many times."""
    for _ in range(windows):
        link = FURTHER.search(client.get(address).content.decode())
        assert link, address
        address = address.partition("?")[0] + html.unescape(link[1])
    return address


def measure(client: Any, address: str, times: int) -> dict[str, Any]:
    took = []
    cpu = time.process_time()
    for _ in range(times + 1):
        began = time.perf_counter()
        answer = client.get(address)
        took.append((time.perf_counter() - began) * 1000)
        assert answer.status_code == 200, (address, answer.status_code)
    page = answer.content.decode()
    found = COUNT.search(page)
    rows = {"rows": f"{found[1]}{'+' if FURTHER.search(page) else ''}"} if found else {}
    return {
        "first": round(took[0], 1),
        "p50": round(statistics.median(took[1:]), 1),
        "max": round(max(took[1:]), 1),
        "cpu": round((time.process_time() - cpu) * 1000 / (times + 1), 1),
        **rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="pending rows; the number of settled ones is three tenths of it"
    )
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with ground():
        from django.contrib.auth.models import User
        from django.test import Client

        began = time.perf_counter()
        fill(options.rows, options.rows * 3 // 10)
        filled = time.perf_counter() - began
        client = Client()
        client.force_login(User.objects.create_superuser("bench"))
        client.get("/admin/")
        addresses = pages()
        listed = addresses["list"]
        addresses["50 windows further"] = further(client, listed, 50)
        results = {name: measure(client, address, options.times) for name, address in addresses.items()}
        show(f"admin pages, ms, {options.rows} rows wait", {"filled in, s": {"s": round(filled, 1)}, **results})


if __name__ == "__main__":
    main()
