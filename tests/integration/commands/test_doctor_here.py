"""`delayq_doctor --here`, the probe that restarts a worker: only a restart that would help makes it fail."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone

import django_delayq
from django_delayq.management.commands import delayq_doctor
from django_delayq.models import WorkerSeen
from tests.integration.commands.conftest import Do

pytestmark = pytest.mark.django_db


def a_worker(host: str, **values: Any) -> None:
    now = timezone.now()
    same = {"concurrency": 4, "uses_redis": False, "version": django_delayq.__version__}
    times = {"started_at": now, "seen_at": now, "passed_at": now}
    WorkerSeen.objects.create(id=host, host=host, pid=7, **{**same, **times, **values})


def test_only_a_worker_of_this_machine_that_checks_for_due_timeouts_counts(
    do: Do, capsys: pytest.CaptureFixture[str]
) -> None:
    here = socket.gethostname()
    a_worker("another-pod")
    with pytest.raises(SystemExit) as end:
        do("delayq_doctor", "--here")
    assert end.value.code == 1

    a_worker(here)
    assert f"{here}:7 checked for due timeouts 0 s ago" in do("delayq_doctor", "--here").out

    WorkerSeen.objects.filter(host=here).update(passed_at=timezone.now() - timedelta(minutes=3))
    with pytest.raises(SystemExit) as end:
        do("delayq_doctor", "--here")
    assert end.value.code == 1


def test_a_database_that_is_away_is_not_the_fault_of_the_worker(do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(using: str) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr(delayq_doctor, "workers_alive", refuse)
    assert "do not restart them" in do("delayq_doctor", "--here").out
