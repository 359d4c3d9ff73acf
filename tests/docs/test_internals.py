"""The page about internals follows six paths, and each file and function that it names exists."""

from __future__ import annotations

import importlib
from functools import reduce

from tests.docs.pages import ROOT, Page, code, read

PAGE = ROOT / "docs" / "internals.md"
PACKAGE = ROOT / "django_delayq"
PATHS = [
    "schedule_timeout",
    "Saving an object",
    "One firing",
    "cancel_timeout",
    "An action in the admin",
    "Pausing a policy",
]
MAX_STEPS = 10


def steps(page: Page) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the file and the functions of each step, by the heading of its path."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    heading, inside = "", False
    for _, line in page.prose:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            heading, inside = line.removeprefix("## "), False
        elif cells == ["file", "function", "what happens"]:
            inside = True
            found[heading] = []
        elif inside and line.startswith("|") and not set(line) <= set("|- "):
            found[heading].append((code(cells[0])[0], code(cells[1])))
    return found


def _exists(file: str, name: str) -> bool:
    if not (PACKAGE / file).is_file():
        return False
    if not name or not file.endswith(".py"):
        return not name
    module = "django_delayq." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    try:
        reduce(getattr, name.split("."), importlib.import_module(module))
    except AttributeError:
        return False
    return True


def test_the_page_follows_six_paths_in_few_steps_whose_files_and_functions_exist() -> None:
    page = read(PAGE)
    assert list(steps(page)) == PATHS
    assert [name for name, path in steps(page).items() if not 3 < len(path) <= MAX_STEPS] == []
    named = [(file, name) for path in steps(page).values() for file, names in path for name in names or [""]]
    assert [step for step in named if not _exists(*step)] == []
