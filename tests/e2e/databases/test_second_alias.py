"""Business and ledger may live on any alias, as long as it is the same one; the routers decide."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
]


def test_everything_happens_on_the_alias_that_the_routers_name(child_environment: dict[str, str]) -> None:
    environment = {**child_environment, "DJANGO_SETTINGS_MODULE": "tests.e2e.databases.second_settings"}
    command = [sys.executable, "-m", "tests.e2e.databases.on_second_alias"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
