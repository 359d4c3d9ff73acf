"""Real workers that are killed, stopped and terminated, and what their ledger says afterwards."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from django_delayq import get_policy
from django_delayq.models import Timeout
from tests.testapp.models import Effect, Order

StartWorker = Callable[..., "subprocess.Popen[bytes]"]
SHORT = {"LEASE": 1.0, "SWEEP_INTERVAL": 1.0}


@pytest.fixture
def start_worker(start_command: Callable[..., subprocess.Popen[bytes]]) -> StartWorker:
    """Start `delayq_worker`; keywords are environment variables of the tests' settings, without their prefix."""

    def start(*arguments: str, seconds: Mapping[str, float] = SHORT, **variables: str) -> subprocess.Popen[bytes]:
        environment = {f"DELAYQ_TEST_{name}": value for name, value in variables.items()}
        environment["DELAYQ_TEST_SECONDS"] = json.dumps(dict(seconds))
        return start_command("delayq_worker", *arguments, env=environment)

    return start


def wait_until(holds: Callable[[], object], what: str, patience: float = 60) -> None:
    """Returns as soon as `holds()` does; fails after `patience` seconds, saying what was waited for."""
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain until {what}; the ledger: {states()}"
        time.sleep(0.02)


def states() -> dict[str, int]:
    return dict(Counter(Timeout.objects.values_list("state", flat=True)))


def settled(count: int) -> Callable[[], bool]:
    return lambda: Timeout.objects.filter(settled_at__isnull=False).count() == count


def effects(what: str) -> dict[int | None, int]:
    """How often the handler of each timeout did its work."""
    return dict(Counter(Effect.objects.filter(what=what).values_list("timeout_id", flat=True)))


def due_now(policy: str, count: int = 1) -> list[Timeout]:
    """Timeouts of so many new orders, due now; nobody has told Redis, the sweep has to."""
    from django_delayq import clock
    from django_delayq.ledger import writing
    from django_delayq.ledger.subjects import subject_at

    declared: Any = get_policy((Order, policy))
    rows = []
    for _ in range(count):
        order = Order.objects.create(status="new")
        rows.append(writing.new_row(subject_at(declared, order.pk, "", "default"), clock.now(), None))
    Timeout.objects.bulk_create(rows)
    return list(Timeout.objects.filter(slot__in=[row.slot for row in rows]))
