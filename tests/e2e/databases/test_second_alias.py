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
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.e2e.databases.second_settings"}


def python(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_everything_happens_on_the_alias_that_the_routers_name(child_environment: dict[str, str]) -> None:
    done = python("-m", "tests.e2e.databases.on_second_alias", env=child_environment | SETTINGS)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_router_that_parts_ledger_and_business_is_found_by_the_check(child_environment: dict[str, str]) -> None:
    done = python("-m", "django", "check", env=child_environment | SETTINGS | {"DELAYQ_TEST_SPLIT": "1"})
    assert done.returncode != 0
    assert "django_delayq.E004" in done.stderr
    assert "Order is written to database 'business' and its timeouts to 'default'" in done.stderr
