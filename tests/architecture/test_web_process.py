"""A web process loads neither the worker nor the firing, and redis-py only with the first push."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PARTS = [["delayq"], ["admin", "rest", "delayq"]]
NEVER = {
    "django_delayq.worker",
    "django_delayq.firing",
    "django_delayq.firing.executors",
    "django_delayq.monitoring.doctor",
    "django_delayq.management",
    "django_delayq.testing",
    "drf_spectacular",
}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = str(tmp_path_factory.mktemp("startup") / "startup.sqlite3")
    run(file, "prepare")
    return file


def run(file: str, *parts: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")}
    command = [sys.executable, "-m", "tests.startup.process", file, *parts]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(file: str, *parts: str) -> dict[str, set[str]]:
    """Return the modules after the start, and after a save."""
    steps: dict[str, Any] = json.loads(run(file, *parts))
    return {step: set(figures["modules"]) for step, figures in steps.items()}


@pytest.mark.parametrize("parts", PARTS, ids=" ".join)
def test_without_redis_neither_the_worker_nor_firing_nor_redis_py_is_loaded(database: str, parts: list[str]) -> None:
    modules = loaded(database, *parts)
    assert "django_delayq.arming.reconcile" in modules["saved"], "it saved nothing"
    assert not modules["saved"] & {*NEVER, "redis", "django_redis"}
    pages = {"django_delayq.admin.pages", "django_delayq.contrib.rest_framework.views"}
    assert modules["started"] & pages == (pages if "admin" in parts else set())


@pytest.mark.parametrize("parts", PARTS, ids=" ".join)
def test_with_redis_redis_py_is_loaded_by_the_first_push(database: str, redis_url: str, parts: list[str]) -> None:
    modules = loaded(database, *parts, f"redis={redis_url}")
    assert "redis" not in modules["started"]
    assert "redis" in modules["saved"]
    assert not modules["saved"] & NEVER
