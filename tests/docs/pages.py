"""Parse README and `docs/`: code blocks, links and inline code, each with its line.

Conventions of a page:

    ```python            runs; a first line such as `# shop/models.py` names its file in the project
    # a/b.py, at the end     as the first line of such a block: it is appended to the file
    <!-- run             Python that runs without being shown, such as the passing of time
    -->
    <!-- not run: why -->    before a Python block that cannot run
    ```console           commands; if one has a leading `$ `, lines without it are output

A page with an effect outside the database, which names an idempotency key, gives its inputs again in a hidden block
with `repeat`, after they have fired: see `tests/docs/play.py`.

A translation (`docs/zh-Hans`, `README.zh-Hans.md`) has the blocks of its original, so they run only there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FILE = re.compile(r"# (?P<path>[\w/]+\.py)(?P<at_the_end>, at the end)?\s*\Z")
SHELLS = {"console", "sh", "shell", "bash"}
TRANSLATED = "zh-Hans"
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>.+) -->\s*\Z")
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_INLINE = re.compile(r"`(?P<code>[^`\n]+)`")
_HEADING = re.compile(r"#{1,6} (?P<title>.+)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, or a hidden one; `line` is that of its first line of code."""

    language: str
    code: str
    line: int
    hidden: bool = False
    not_run: str = ""

    @property
    def file(self) -> str:
        """The file of the project, or "" for code that is only run."""
        match = _FILE.match(self.code.partition("\n")[0])
        return match["path"] if match else ""

    @property
    def is_appended(self) -> bool:
        """Whether the block belongs at the end of its file."""
        return bool(self.file) and self.code.partition("\n")[0].rstrip().endswith(", at the end")

    def commands(self) -> Iterator[tuple[int, str]]:
        """Yield the commands of a block for a shell, with their lines; output and comments are left out."""
        if self.language not in SHELLS:
            return
        lines = self.code.splitlines()
        has_prompts = any(line.startswith("$ ") for line in lines)
        for number, line in enumerate(lines, self.line):
            if line.startswith("$ ") if has_prompts else line.strip() and not line.startswith("#"):
                yield number, line.removeprefix("$ ")


@dataclass(frozen=True, slots=True)
class Page:
    """One Markdown file."""

    path: Path
    blocks: tuple[Block, ...]
    prose: tuple[tuple[int, str], ...]
    """The lines outside all blocks and comments, with their numbers."""

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name

    @property
    def is_translation(self) -> bool:
        return TRANSLATED in self.name

    def __str__(self) -> str:
        return self.name

    def table(self, *header: str) -> list[list[str]]:
        """Return the rows of the tables whose header begins with the cells `header`.

        Raises:
            LookupError: there is no such table.
        """
        lines, found = [line for _, line in self.prose], []
        for number, line in enumerate(lines):
            if line.startswith("|") and _cells(line)[: len(header)] == list(header):
                body = takewhile(lambda row: row.startswith("|"), lines[number + 2 :])
                found += [_cells(row) for row in body]
        if not found:
            raise LookupError(f"{self.name} has no table that begins with {header}")
        return found

    def links(self) -> Iterator[tuple[int, str]]:
        """Yield the targets of links, as they are written."""
        for number, line in self.prose:
            for match in _LINK.finditer(_INLINE.sub("``", line)):
                yield number, match["target"]

    def inline_code(self) -> Iterator[tuple[int, str]]:
        """Yield the code between single backticks."""
        for number, line in self.prose:
            for match in _INLINE.finditer(line):
                yield number, match["code"]

    def anchors(self) -> set[str]:
        """Return the anchors of the headings, as GitHub generates them."""
        titles = [match["title"] for _, line in self.prose if (match := _HEADING.fullmatch(line))]
        return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def code(cell: str) -> list[str]:
    """Return the code between backticks in a cell."""
    return [match["code"] for match in _INLINE.finditer(cell)]


@cache
def read(path: Path) -> Page:
    """Parse the page at `path`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    prose: list[tuple[int, str]] = []
    not_run, number = "", 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("```") or line.strip() == "<!-- run":
            hidden = line.startswith("<!--")
            end = next(i for i in range(number, len(lines)) if lines[i].rstrip() == ("-->" if hidden else "```"))
            code = "\n".join(lines[number:end]) + "\n"
            blocks.append(Block("python" if hidden else line[3:].strip(), code, number + 1, hidden, not_run))
            number, not_run = end + 1, ""
        elif match := _NOT_RUN.match(line):
            not_run = match["why"]
        elif not line.startswith("<!--"):
            prose.append((number, line))
    return Page(path, tuple(blocks), tuple(prose))


def pages() -> list[Page]:
    """Return all pages: README first, then `docs/` by name, with its folders."""
    return [read(path) for path in (*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("**/*.md")))]
