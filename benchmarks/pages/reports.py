"""The report of a policy, as a page, by REST and in Python, when workers have counted the days of all settled rows.

With 1,000,000 settled rows: `python -m benchmarks.pages reports --settled 1000000`. A page may take 150 ms.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from benchmarks.pages import summary, timed

LABEL = "testapp.order.cancel_unpaid"
MAX_MS = 150
"""What the page of a report may take, with 1,000,000 settled rows."""
PAGES = {
    "30 days": "",
    "7 days": "days=7",
    "90 days": "days=90",
    "12 months": "by=month&days=365",
    "CSV of 12 months": "by=month&days=365&format=csv",
    "a field": "by=field&field=customer",
}


def roll_up_all() -> dict[str, Any]:
    """Count all settled rows, as a worker does each minute; return the milliseconds, also of a second time."""
    from django.db import connection

    from django_delayq.ledger.rollups import roll_up

    pauses: list[float] = []
    began = time.perf_counter()

    def between() -> None:
        pauses.append(time.perf_counter())

    roll_up(connection.alias, between)
    took = (time.perf_counter() - began) * 1000
    began = time.perf_counter()
    roll_up(connection.alias)
    again = (time.perf_counter() - began) * 1000
    steps = [(after - before) * 1000 for before, after in pairwise(pauses)]
    return {"all": round(took, 1), "again": round(again, 1), "longest page": round(max(steps, default=0.0), 1)}


def figures(times: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each request. `slow` is there if its median is more than `MAX_MS`."""
    from django.contrib.auth.models import User
    from django.test import Client, override_settings
    from django.urls import reverse

    from django_delayq.monitoring.reports import policy_report
    from django_delayq.monitoring.whatif import what_if

    results = {"counting all rows": roll_up_all()}
    client = Client()
    client.force_login(User.objects.get_or_create(username="reports", is_superuser=True, is_staff=True)[0])
    client.get("/admin/")
    page = reverse("admin:django_delayq_policycontrol_report", args=[LABEL])
    for name, query in PAGES.items():
        results[f"page, {name}"] = timed(lambda query=query: client.get(f"{page}?{query}"), times)[1]
    with override_settings(ROOT_URLCONF="tests.integration.contrib.rest.urls"):
        for name, query in (("30 days", ""), ("months", "by=month"), ("a field", "by=customer")):
            address = f"/api/policies/{quote(LABEL)}/report/?{query}"
            results[f"REST, {name}"] = timed(lambda address=address: client.get(address), times)[1]
    calls = {
        "Python, all policies": lambda: policy_report(by="policy"),
        "what-if, 20 minutes": lambda: what_if(LABEL, timedelta(minutes=20), limit=3_000),
    }
    for name, call in calls.items():
        took = []
        for _ in range(times + 1):
            began = time.perf_counter()
            call()
            took.append((time.perf_counter() - began) * 1000)
        results[name] = summary(took)
    slow = {name: {"slow": f"more than {MAX_MS}"} for name, each in results.items() if each.get("p50", 0) > MAX_MS}
    return {name: each | slow.get(name, {}) for name, each in results.items()}
