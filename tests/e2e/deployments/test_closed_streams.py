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


@pytest.mark.parametrize("options", ["", "--processes 2"])
def test_a_worker_without_standard_streams_fires_and_exits_with_0(
    options: str, child_environment: dict[str, str]
) -> None:
    row = dq.schedule_timeout(Order.objects.create(status="new"), "remind", seconds=0)
    assert run(f"delayq_worker --burst {options} <&- >&- 2>&-", child_environment) == 0
    assert Timeout.objects.get(pk=row.pk).state == "fired"


@pytest.mark.parametrize("command", ["delayq_prune", "delayq_sync --backfill --policy testapp.order.cancel_unpaid"])
def test_a_command_without_standard_input_asks_nothing(command: str, child_environment: dict[str, str]) -> None:
    assert run(f"{command} <&-", child_environment) == 0
