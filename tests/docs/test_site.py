"""The pages as a whole: how much there is to read, the navigation, and links, which have a target."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import ROOT, Page, pages, read

INDEX = (ROOT / "docs" / "index.md").read_text()
EIGHT = (
    *("how-to/install", "tutorial", "declaring", "handlers"),
    *("how-to/steps", "how-to/digest", "races", "how-to/deploy"),
)
GENERATED = {"docs/reference.md", "docs/benchmarks.md"}
MOST_WORDS = {"index": 310, "races": 700, "eight pages": 4_000, "all pages": 40_000}
"""How many words of prose there may be. Lower a number when the pages have become shorter, and never raise one."""


def words(page: str) -> int:
    """Return the number of words outside of code blocks, without bars of tables and other marks."""
    return sum(1 for _, line in read(ROOT / page).prose for word in line.split() if re.search(r"\w", word))


def test_the_docs_are_read_in_one_evening() -> None:
    every = {page.name for page in pages() if page.name.startswith("docs/")} - GENERATED
    eight = [f"docs/{name}.md" for name in EIGHT]
    parts = {"index": ["docs/index.md"], "races": ["docs/races.md"], "eight pages": eight, "all pages": every}
    counted = {what: sum(map(words, names)) for what, names in parts.items()}
    assert {what: number for what, number in counted.items() if number > MOST_WORDS[what]} == {}


def test_contributors_pages_are_in_the_last_section_and_nowhere_else() -> None:
    """A user never meets them: other pages link the promises and the figures for users instead."""
    own = {"internals.md", "events.md", "benchmarks.md", "guarantees-tests.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", INDEX.partition("## For contributors")[2])) == own
    users = [page for page in pages() if page.name.removeprefix("docs/") not in {*own, "index.md"}]
    links = [(page.name, target.partition("#")[0]) for page in users for _, target in page.links()]
    found = {page for page, target in links if target.rpartition("/")[2] in own}
    assert found <= {"README.md", "README.zh-Hans.md"}


def test_the_navigation_has_each_page_once_in_groups_that_can_be_surveyed_and_begins_with_the_eight_pages() -> None:
    assert tuple(re.findall(r"^\d\. \[[^\]]+\]\(([\w/-]+)\.md\)", INDEX, re.MULTILINE)) == EIGHT
    sections = re.split(r"^## ", INDEX, flags=re.MULTILINE)[1:]
    listed = [re.findall(r"^(?:\*|\d\.) \[[^\]]+\]\(([\w/-]+)\.md\)", text, re.MULTILINE) for text in sections]
    names = [page for group in listed for page in group]
    assert len(names) == len(set(names))
    assert max(map(len, listed)) <= 14


def test_no_table_of_the_worker_is_longer_than_a_screen() -> None:
    blocks = (ROOT / "docs" / "worker.md").read_text().split("\n\n")
    tables = [block.splitlines() for block in blocks if re.match(r"\| (argument|command|option) ", block)]
    assert max(map(len, tables)) - 2 <= 10


def test_the_first_pages_use_no_term_of_the_implementation() -> None:
    names = ("README.md", "docs/index.md", *(f"docs/{name}.md" for name in EIGHT))
    inside = re.compile(r"\b(ledger|arm|arms|armed|arming|sweep|lease|leases)\b", re.IGNORECASE)
    assert {page: found for page in names if (found := inside.findall((ROOT / page).read_text()))} == {}


PAGES = pages()
OTHERS = [read(ROOT / name) for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "SUPPORT.md")]


def broken(page: Page) -> list[str]:
    """Return broken links of `page`, as `page:line: target`."""
    found = []
    for number, target in page.links():
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        exists = path.is_file() and (not anchor or anchor in read(path).anchors())
        if not exists:
            found.append(f"{page.name}:{number}: {target}")
    return found


def test_links_lead_to_a_page_and_to_a_heading() -> None:
    assert [link for page in (*PAGES, *OTHERS) for link in broken(page)] == []


def test_the_index_lists_every_page_and_the_readme_links_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    every = {page.path for page in PAGES if page.path.is_relative_to(ROOT / "docs")}
    assert every - {index} <= linked(index)
    assert index in linked(ROOT / "README.md")


def linked(start: Path) -> set[Path]:
    return {(start.parent / target.partition("#")[0]).resolve() for _, target in read(start).links()}
