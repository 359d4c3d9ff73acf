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
package = importlib.import_module(sys.argv[1])
if sys.argv[1] != "django_delayq":
    for found in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
        importlib.import_module(found.name)
"""

BREACHES = [
    ("sql/now.py", "from django_delayq.policy import policies", "Layers BROKEN"),
    ("utils.py", "# a module that is in no layer", "Layers BROKEN"),
    ("policy/options.py", "from django.utils import timezone", "No Django below conf BROKEN"),
    ("policy/policies.py", "import redis", "redis-py only in engine and redis_clients BROKEN"),
    ("conf.py", "import rest_framework", "Optional packages only in contrib BROKEN"),
    ("checks.py", "from django_delayq.ledger import writing", "Only these write the ledger BROKEN"),
    ("admin/filters.py", "from django_delayq.worker import background", "Web processes load no worker BROKEN"),
    ("engine/records.py", "from django_delayq.engine import engine", "No cycles BROKEN"),
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


@pytest.mark.parametrize(("file", "line", "verdict"), BREACHES, ids=[file for file, *_ in BREACHES])
def test_a_planted_breach_is_noticed(tmp_path: Path, file: str, line: str, verdict: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "django_delayq", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "django_delayq" / file).open("a") as module:
        module.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    assert verdict in " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("module", ["engine", "policy.options", "exceptions"])
def test_the_lowest_layers_work_where_django_cannot_be_imported(module: str) -> None:
    done = python("-c", WITHOUT_DJANGO, f"django_delayq.{module}")
    assert done.returncode == 0, done.stderr


def test_importing_the_package_needs_no_settings_and_no_django() -> None:
    done = python("-c", WITHOUT_DJANGO.replace('getattr(module, "__path__", ())', "()"), "django_delayq")
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
