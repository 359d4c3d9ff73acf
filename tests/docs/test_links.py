"""Links have a target, and every page can be reached."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import ROOT, Page, pages, read

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
