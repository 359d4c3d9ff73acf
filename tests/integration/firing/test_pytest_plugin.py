"""The pytest plugin `delayq`, in a pytest run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from django.db import connection

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import pytest
from django.conf import settings
from django_delayq import clock
from django_delayq.testing import fire_due, travel
from tests.testapp.models import Order

def test_a_statement_applies_until_the_test_ends(timeouts):
    order = Order.objects.create(created_at=clock.now())
    timeouts.assert_scheduled(order, "cancel_unpaid")
    timeouts.travel(minutes=31)
    assert timeouts.fire_due() == 1
    timeouts.assert_fired(order, "cancel_unpaid")
    assert settings.DELAYQ["REDIS"] is None

def test_and_not_longer():
    assert not clock.is_set()
    assert settings.DELAYQ.get("REDIS", "not set") is not None

@pytest.fixture
def tomorrow():
    travel(days=1)

@pytest.mark.django_db(transaction=True)
def test_fixtures_and_functions_move_the_clock_too(tomorrow):
    Order.objects.create(created_at=clock.now())
    travel(minutes=31)
    assert fire_due() == 1

def test_wrong(timeouts):
    timeouts.assert_fired(Order.objects.create(), "remind")
"""


@pytest.mark.skipif(connection.vendor != "sqlite", reason="it is the same on each database")
def test_the_fixture_and_the_functions(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    inherited = {name: os.environ[name] for name in os.environ.keys() - {"PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"}}
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(ROOT)}
    plugins = ["-p", "pytest_django.plugin", "-p", "django_delayq.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=inherited | own, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert "1 failed, 3 passed" in output, output
    assert "testapp.order.remind of 1 did not fire: it was never scheduled." in output
    assert "django_delayq/testing.py" not in output, "the traceback ends in the test"


def test_the_plugin_imports_neither_django_nor_the_library_and_is_an_entry_point() -> None:
    code = "import sys, django_delayq.pytest_plugin; print([x for x in sys.modules if x.startswith('django')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['django_delayq', 'django_delayq.pytest_plugin']"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"delayq": "django_delayq.pytest_plugin"}
