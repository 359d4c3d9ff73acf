"""The site of the docs: what it is built with, its navigation, and how much a beginner has to read."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.docs.test_facts import PROJECT
from tools.environment import PURPOSES


def test_the_site_is_built_in_an_environment_without_the_test_suite() -> None:
    assert PURPOSES["docs"][-2:] == ["--group", "docs"]
    heavy = {"selenium", "mypy", "pytest", "schemathesis", "pyright"}
    assert not heavy & {re.split(r"\W", name)[0] for name in PROJECT["dependency-groups"]["docs"]}
    makefile = (ROOT / "Makefile").read_text()
    for target in ("docs", "docs-links"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert recipe and "DELAYQ_VENV=$(CURDIR)/.venv-docs" in recipe[1] and "$(BIN)" not in recipe[1]


INDEX = (ROOT / "docs" / "index.md").read_text()
FIRST_HOUR = ("tutorial", "start/policies", "start/scheduling", "start/handlers", "races", "start/worker")
FIRST_HOUR_WORDS = 6000
"""An hour of reading and trying. Details belong in the reference, which these pages link."""


def words(page: str) -> int:
    """Return how many words a reader sees, with code and without what only runs."""
    return len(re.sub(r"<!--.*?-->", "", (ROOT / page).read_text(), flags=re.DOTALL).split())


def test_the_first_hour_has_at_most_6000_words() -> None:
    counted = {page: words(page) for page in ("README.md", *(f"docs/{name}.md" for name in FIRST_HOUR))}
    assert sum(counted.values()) <= FIRST_HOUR_WORDS, counted


def test_races_are_decided_in_at_most_900_words() -> None:
    assert words("docs/races.md") <= 900


def test_the_eight_pages_for_a_small_shop_begin_with_the_first_hour() -> None:
    eight = re.findall(r"^\d\. \[[^\]]+\]\(([\w/-]+)\.md\)", INDEX, re.MULTILINE)
    assert len(eight) == 8 and tuple(eight[: len(FIRST_HOUR)]) == FIRST_HOUR


def test_the_navigation_has_each_page_once_in_groups_that_can_be_surveyed() -> None:
    sections = re.split(r"^## ", INDEX, flags=re.MULTILINE)[1:]
    listed = [re.findall(r"^(?:\*|\d\.) \[[^\]]+\]\(([\w/-]+)\.md\)", text, re.MULTILINE) for text in sections]
    pages = [page for group in listed for page in group]
    assert len(pages) == len(set(pages))
    assert max(map(len, listed)) <= 14


def test_no_table_of_options_or_commands_is_longer_than_a_screen() -> None:
    for name in ("worker",):
        blocks = (ROOT / "docs" / f"{name}.md").read_text().split("\n\n")
        tables = [block.splitlines() for block in blocks if re.match(r"\| (argument|command|option) ", block)]
        assert max(map(len, tables)) - 2 <= 10, name


def test_the_first_pages_use_no_term_of_the_implementation() -> None:
    pages = ("README.md", "docs/index.md", *(f"docs/{name}.md" for name in FIRST_HOUR))
    inside = re.compile(r"\b(ledger|arm|arms|armed|arming|sweep|lease|leases)\b", re.IGNORECASE)
    assert {page: found for page in pages if (found := inside.findall((ROOT / page).read_text()))} == {}
