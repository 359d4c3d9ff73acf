"""The import contracts hold and detect violations, and the lowest layers do not import Django."""

from __future__ import annotations

import os
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
