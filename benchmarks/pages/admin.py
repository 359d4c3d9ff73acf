"""The pages of the admin: the list without and with each filter, search and date, its later pages, and the others."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from benchmarks.pages import timed

FURTHER = re.compile(r'<a href="(\?[^"]*\bfurther=[^"]*)"')
COUNT = re.compile(r"(\d+) timeouts?\s")

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
    "search: field of a policy": "q=N-777",
    "search + state": "q=777&state__exact=pending",
    "object": "object=testapp.order:777",
    "owner of 100 orders": "related=testapp.customer:7",
    "owner of 2,000 orders": "related=testapp.customer:1",
    "owner of 2,000 orders, pending": "related=testapp.customer:1&state__exact=pending",
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
    detail, operate = "admin:django_delayq_timeout_change", "admin:django_delayq_timeout_operate"
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
        "confirmation of 1,000 rows": f"{reverse(operate, args=['cancel'])}?ids={thousand}",
        "policies": reverse("admin:django_delayq_policycontrol_changelist"),
        "first page": reverse("admin:app_list", args=["django_delayq"]),
    }


def further(client: Any, address: str, windows: int) -> str:
    """Return the URL after following the link to further rows this many times."""
    for _ in range(windows):
        link = FURTHER.search(client.get(address).content.decode())
        assert link, address
        address = address.partition("?")[0] + html.unescape(link[1])
    return address


def measure(client: Any, address: str, times: int) -> dict[str, Any]:
    answer, figures = timed(lambda: client.get(address), times)
    page = answer.content.decode()
    found = COUNT.search(page)
    return figures | ({"rows": f"{found[1]}{'+' if FURTHER.search(page) else ''}"} if found else {})


def figures(times: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each page. `first` is the first request; `cpu` the CPU ms of this process a request."""
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.create_superuser("bench"))
    client.get("/admin/")
    addresses = pages()
    addresses["50 windows further"] = further(client, addresses["list"], 50)
    return {name: measure(client, address, times) for name, address in addresses.items()}
