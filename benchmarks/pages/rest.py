"""The REST API: the list with each filter, sixty pages of 500 in sequence, one timeout, the policies and the status."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from benchmarks.pages import summary, timed

LIST = "/api/timeouts/"
PAGES = 60


def addresses() -> dict[str, str]:
    """Return the measured requests by name."""
    from django.utils import timezone

    from django_delayq.models import Timeout

    def after(**span: float) -> str:
        return (timezone.now() + timedelta(**span)).isoformat()

    queries: dict[str, dict[str, Any]] = {
        "list": {},
        "list, 500 a page": {"page_size": 500},
        **{f"state {state}": {"state": state} for state in Timeout.State.values},
        "policy, frequent": {"policy": "testapp.order.cancel_unpaid"},
        "policy, rare": {"policy": "gone.order.forgotten"},
        "pending of a policy": {"policy": "testapp.order.remind", "state": "pending"},
        "dead of a policy": {"policy": "testapp.order.remind", "state": "dead"},
        "queue, frequent": {"queue": "default"},
        "queue, rare": {"queue": "rare"},
        "key": {"key": "part-5007"},
        "object": {"object": "testapp.order:777777"},
        "object, pending": {"object": "testapp.order:777", "state": "pending"},
        "search: object id": {"search": "777777"},
        "search: key": {"search": "part-5007"},
        "search: field of a policy": {"search": "N-777"},
        "search: nothing there": {"search": "nothing"},
        "search, pending of a policy": {"search": "777", "policy": "testapp.order.remind", "state": "pending"},
        "overdue": {"overdue": "true"},
        "due in the next hour": {"due_from": after(), "due_until": after(hours=1)},
        "due on one day in a month": {"due_from": after(days=30), "due_until": after(days=31)},
        "due after a month, rare queue": {"due_from": after(days=30), "queue": "rare"},
        "settled in the last hour": {"settled_from": after(hours=-1)},
        "dead for twenty days": {"settled_until": after(days=-20), "state": "dead"},
    }
    newest = Timeout.objects.order_by("-id").values_list("pk", flat=True)[0]
    return {
        **{name: f"{LIST}?{urlencode(query)}" for name, query in queries.items()},
        "detail": f"{LIST}{newest}/",
        "policies": "/api/policies/",
        "status": "/api/status/",
    }


def measure(client: Any, address: str, times: int) -> dict[str, Any]:
    answer, figures = timed(lambda: client.get(address), times)
    found = answer.data.get("results") if isinstance(answer.data, dict) else None
    return figures | ({} if found is None else {"rows": f"{len(found)}{'+' if answer.data['next'] else ''}"})


def walk(client: Any, address: str) -> dict[str, Any]:
    """Read pages in sequence, by their cursors, as far as there are any."""
    took: list[float] = []
    while address and len(took) < PAGES:
        began = time.perf_counter()
        answer = client.get(address)
        took.append((time.perf_counter() - began) * 1000)
        address = answer.data["next"]
    return summary(took) | {"last": round(took[-1], 1)}


def figures(times: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each request, through DRF's test client. `first` is the first request."""
    from django.contrib.auth.models import User
    from django.test import override_settings
    from rest_framework.test import APIClient

    client = APIClient()
    client.force_authenticate(User.objects.get_or_create(username="rest", is_superuser=True, is_staff=True)[0])
    with override_settings(ROOT_URLCONF="tests.integration.contrib.rest.urls"):
        client.get(LIST)
        results = {name: measure(client, address, times) for name, address in addresses().items()}
        for name, query in (("all", ""), ("pending", "&state=pending")):
            results[f"{PAGES} pages of {name}"] = walk(client, f"{LIST}?page_size=500{query}")
    return results
