"""The import contracts hold and detect violations, and the lowest layers do not import Django."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "django_delayq"

# import-linter does not see the package's own `__init__`; an interpreter that refuses to import Django does.
WITHOUT_DJANGO = """
import importlib, pkgutil, sys

class NoDjango:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"django", "django_redis", "asgiref"}:
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, NoDjango())
import django_delayq
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
        importlib.import_module(found.name)
"""

# file, line, contract, and what its report names
BREACHES = [
    ("sql/now.py", "from django_delayq.policy import policies", "Layers", "sql.now -> django_delayq.policy.policies"),
    ("utils.py", "# a module that is in no layer", "Layers", "utils"),
    ("policy/options.py", "from django.utils import timezone", "No Django below conf", "policy.options -> django"),
    ("policy/policies.py", "import redis", "redis-py only in engine and redis_clients", "policies -> redis"),
    ("conf.py", "import rest_framework", "Optional packages only in contrib", "conf -> rest_framework"),
    (
        "checks.py",
        "from django_delayq.ledger import writing",
        "Only these write the ledger",
        "checks -> django_delayq.ledger",
    ),
    (
        "admin/filters.py",
        "from django_delayq.worker import background",
        "Web processes load no worker",
        "admin.filters",
    ),
    ("engine/records.py", "from django_delayq.engine import engine", "No cycles", "records"),
]


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")}
    full = {**clean, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *arguments], env=full, capture_output=True, text=True, check=False)


def test_the_import_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_planted_breaches_are_noticed(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "django_delayq", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line, _, _ in BREACHES:
        with (tmp_path / "django_delayq" / file).open("a") as module:
            module.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    output = " ".join((done.stdout + done.stderr).split())
    assert [each for each in BREACHES if f"{each[2]} BROKEN" not in output or each[3] not in output] == [], output


def test_the_lowest_layers_work_where_django_cannot_be_imported_and_the_package_needs_neither_it_nor_settings() -> None:
    lowest = (f"django_delayq.{module}" for module in ("engine", "policy.options", "exceptions"))
    done = python("-c", WITHOUT_DJANGO, *lowest)
    assert done.returncode == 0, done.stderr


def test_every_module_of_the_package_imports_alone() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(PACKAGE.rglob("*.py"))
        if "contrib" not in path.parts
    ]
    script = "import sys, importlib, django; django.setup(); [importlib.import_module(name) for name in sys.argv[1:]]"
    done = python("-W", "error", "-c", script, *names, DJANGO_SETTINGS_MODULE="tests.settings")
    assert done.returncode == 0, done.stderr
