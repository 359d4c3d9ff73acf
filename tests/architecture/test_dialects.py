"""What one database does otherwise than the others is in `dialects`, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "django_delayq"
ASKS_FOR_THE_VENDOR = re.compile(
    r"\bvendor (==|!=|in|not in)|\[\w+\.vendor\]|\bmysql_is_mariadb\b|\bdef as_(mysql|postgresql|sqlite)\b"
)


def branches(module: Path) -> list[str]:
    lines = module.read_text().splitlines()
    return [f"{module.name}:{number}" for number, line in enumerate(lines, 1) if ASKS_FOR_THE_VENDOR.search(line)]


def test_only_the_dialects_ask_for_the_vendor_of_a_database() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if path.name != "dialects.py" and path.parent.name != "migrations"]
    assert [found for path in others for found in branches(path)] == []
