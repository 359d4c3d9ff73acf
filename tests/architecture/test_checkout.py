"""No machine paths, no model change without a migration; only the ledger writes rows, only dialects know vendors."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "django_delayq"
WRITES = {"bulk_create", "bulk_update", "create", "delete", "get_or_create", "save", "update", "update_or_create"}
ASKS_FOR_THE_VENDOR = re.compile(
    r"\bvendor (==|!=|in|not in)|\[\w+\.vendor\]|\bmysql_is_mariadb\b|\bdef as_(mysql|postgresql|sqlite)\b"
)


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this is not a git checkout")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def machine_paths() -> re.Pattern[str]:
    """Return the patterns of home directories, and the place of this checkout."""
    places = {f"{Path.home()}/", str(ROOT)}
    if ROOT.parent not in {Path("/"), Path(tempfile.gettempdir())}:
        places.add(f"{ROOT.parent}/")
    homes = "|".join(("home", "Users"))
    return re.compile("|".join([*map(re.escape, places), rf"(?<![\w.])/({homes})/\w"]))


def writes_to_timeouts(module: Path) -> Iterator[str]:
    """Return calls like `Timeout.objects.filter(...).update(...)` and `timeout.save()`."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
            root: ast.AST = node.func
            while isinstance(root, ast.Attribute | ast.Call):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            if isinstance(root, ast.Name) and root.id in {"Timeout", "timeout"}:
                yield f"{module.name}:{node.lineno}"


def test_no_tracked_file_names_a_path_of_this_machine() -> None:
    pattern = machine_paths()
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.django_db
def test_no_model_has_changed_without_a_migration() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_only_the_ledger_writes_timeouts() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if not {"ledger", "migrations"} & {*path.parts, path.stem}]
    assert [found for path in others for found in writes_to_timeouts(path)] == []


def test_only_the_dialects_ask_for_the_vendor_of_a_database() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if path.name != "dialects.py" and path.parent.name != "migrations"]
    assert len(others) > 100
    assert [path.name for path in others if ASKS_FOR_THE_VENDOR.search(path.read_text())] == []
