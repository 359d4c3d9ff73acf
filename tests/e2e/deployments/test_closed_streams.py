"""Commands under a process manager that gives them no standard input, or no standard streams at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

import django_delayq as dq
from django_delayq.models import Timeout
from tests.conftest import ROOT
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("redis_client")]


def run(command: str, environment: dict[str, str]) -> int:
    words = f'exec "{sys.executable}" -m django {command}'
    return subprocess.run(["sh", "-c", words], env=environment, cwd=ROOT, check=False, timeout=60).returncode


def test_workers_without_standard_streams_fire_and_exit_with_0_and_a_command_asks_nothing(
    child_environment: dict[str, str],
) -> None:
    dq.schedule_timeout(Order.objects.create(status="new"), "remind", seconds=0)
    assert run("delayq_worker --burst --processes 2 <&- >&- 2>&-", child_environment) == 0
    assert Timeout.objects.get().state == "fired"
    assert run("delayq_prune <&-", child_environment) == 0
