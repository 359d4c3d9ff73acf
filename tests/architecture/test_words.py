"""Check the plain English of docs, docstrings, comments and messages against a deny-list.

    python tests/architecture/test_words.py django_delayq/firing README.md

prints `file:line: "words" -> replacement` for each finding. Code, identifiers and anything between backticks are
not checked. The list is a minimum: a page without findings may still be hard to read.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SUPPORT.md")
CHECKED = (*FILES, "django_delayq", ".github", "docs", "example_project", "tools", "benchmarks", "tests")
SUFFIXES = (".py", ".md", ".lua", ".html")

# Regular expression -> what to write instead. A space matches any white space, also a line break.
_WORDS = {
    r"tells?|telling|told|untold": "log, notify, report, acknowledge, send, distinguish",
    r"says|said|saying": "state, return, report, contain",
    r"whoever|whomever|whom|nobody|somebody|anybody": "the worker that ..., no worker, another transaction",
    r"someone else('s)?": "another transaction/process/user",
    r"he|him|his|himself": "the user, the caller, it",
    r"(?<!there\s)(is|are|was|were) no (?!longer|more|less|later|earlier|older|newer|fewer|greater|larger|such"
    r"|way|need)[a-z]+": "is not a ...",
    r"of (theirs|ours|yours|hers|mine)": "another ..., your ..., our ...",
    r"mend(s|ed|ing)?": "fix, repair",
    r"(make|makes|made|making) (it |them |this |that )?good": "fix, repair, catch up",
    r"deeds?": "action",
    r"errands?": "call",
    r"troubles?": "error, transient error",
    r"colleagues?": "other worker",
    r"in vain": "unnecessarily, without effect",
    r"for ?ever": "indefinitely",
    r"lest": "so that ... not",
    r"the like|suchlike": "similar",
    r"(go|goes|went|going|gone) on": "continue",
    r"(stand|stands|stood|standing)(?! for| alone|-)": "is, is written, is listed",
    r"(workers?|process(es)?|leases?|threads?|connections?|rows?|locks?) lived?s?": "runs, exists, is valid",
    r"(orders?|rows?|timeouts?|leases?|rounds?) (die|dies|died)": "is cancelled, expires, ends",
    r"live and die": "are created and cancelled",
    r"look(s|ed|ing)?(?! (like|for|(it |them )?up)|-up)": "check, recheck, read",
    r"what (is|was|are|were) ((over)?due|pending|waiting|running|left|settled|reserved|leased|committed|in flight)": (
        "due timeouts, pending timeouts, running handlers, settled entries"
    ),
    r"what (waits|waited|runs|ran|stands|stood|comes|lies|lay|hangs|counts|remains)": "pending timeouts",
    r"a text(?! (message|file|column|field|node|format))|texts": "a string, a message",
    r"moments?": "a datetime, a time, now",
    r"(length|lengths|span|spans) of time": "a duration",
    r"hand(s|ed|ing)? ((it|them|rows?|work|entries) )?(over|out|back|down)(?! to the courier)": "pass, release",
    r"g(ive|ives|ave|iven|iving) ((it|them|rows?|leases?|entries|the rest|a \w+|the \w+) )?back": "release, requeue",
    r"put(s|ting)? ((it|them|rows?|leases?|entries|the \w+) )?(back|aside|off)": "requeue, release, defer",
    r"(takes?|took|taking|taken) ((it|them|rows?|leases?|entries) )?(up|over|back|heed)": "claim, reserve, replace",
    r"(workers?|process|processes|threads?|sweeps?|pollers?|sources?) (takes?|took)": "claim, reserve, lock",
    r"crowd(s|ed|ing)?": "backlog, many timeouts",
    r"(a|its|their|the|own|your|equal) shares?": "fair share, percentage",
    r"hungry|hunger": "underserved",
    r"appetites?": "prefetch",
    r"patien(ce|t|tly)|impatient": "backoff",
    r"pace": "group size, speed",
    r"knows? nothing": "holds no ..., has no ...",
    r"without a word": "by default",
    r"anew": "again",
    r"whence|whereupon|thereupon|thereof|therein|henceforth|hitherto|forthwith|likewise|ere": "a plain conjunction",
    r"innocents?|guilty|blameless|blamed?|blames": "other timeouts, the failing timeout, count an attempt",
    r"befalls?|beset|betake|bids?|bidden|wont|alas|behold|betide|nought|naught|woe": "a plain verb",
    r"cease(s|d)?": "stop, end",
    r"(fall|falls|fell|fallen|falling) silent": "stop answering",
    r"of itself": "automatically",
    r"(see|sees|saw|seen|seeing) to (it|that)": "ensure",
    r"(come|comes|came|coming) (by|round|upon|again|to pass)": "be retried, occur",
    r"(?<!-)steer(s|ed|able|ing)?(?!/)": "operate, control",
}
_PATTERNS = {
    re.compile(rf"\b(?:{words})\b".replace(" ", r"\s+"), re.IGNORECASE): instead for words, instead in _WORDS.items()
}
_CODE = re.compile(r"``.+?``|`[^`]+`|\{[%{].*?[%}]\}|\{\w*\}|</?\w[^<>]*>", re.DOTALL)
_FENCED = re.compile(r"^```.*?^```|^<!--.*?-->", re.DOTALL | re.MULTILINE)


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line number, words and replacement for each word of the deny-list in `path`."""
    source = path.read_text(encoding="utf-8")
    for line, text in _texts(path.suffix, source):
        prose = _CODE.sub(_blank, text)
        for pattern, instead in _PATTERNS.items():
            for match in pattern.finditer(prose):
                yield line + prose.count("\n", 0, match.start()), " ".join(match[0].split()), instead


def _texts(suffix: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the content of each piece of prose in a source file."""
    if suffix == ".py":
        yield from _comments(source)
        yield from _strings(ast.parse(source))
    elif suffix == ".lua":
        yield 1, "\n".join(line.partition("--")[2] for line in source.splitlines())
    elif suffix == ".html":
        yield 1, source
    else:
        yield 1, _FENCED.sub(lambda match: "\n" * match[0].count("\n"), source)  # a backtick would open code
        for block in re.finditer(r"^```python\n(.*?)^```", source, re.DOTALL | re.MULTILINE):
            first = source.count("\n", 0, block.start(1))
            yield from ((first + line, text) for line, text in _comments(block[1]))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield runs of comment lines, so that a phrase is found across a line break."""
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != first + len(lines):
                yield first, "\n".join(lines)
                lines = []
            if not lines:
                first = token.start[0]
            lines.append(token.string.lstrip("# "))
    if lines:
        yield first, "\n".join(lines)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings and all strings of several words; an f-string counts as one string."""
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and node not in parts:
            yield node.lineno, node.value


def _blank(match: re.Match[str]) -> str:
    return "`" + "\n" * match[0].count("\n")


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the files below `paths` that are checked: not migrations, and not this file, which lists the words."""
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            is_this = file.resolve() == Path(__file__).resolve()
            if file.suffix in SUFFIXES and not is_this and "migrations" not in file.parts:
                yield file


def report(paths: list[Path]) -> list[str]:
    """Return a sorted line for each finding in the files below `paths`."""
    return [
        f"{path}:{line}: {words!r} -> {instead}"
        for path in files(paths)
        for line, words, instead in sorted(findings(path))
    ]


@pytest.mark.parametrize("folder", CHECKED)
def test_words_of_the_deny_list_are_not_used(folder: str) -> None:
    assert report([ROOT / folder]) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""Nobody looks."""', ["Nobody", "looks"]),
        ("# It is repeated in\n# vain.\n", ["in vain"]),
        ('tell = nobody("lest")  # `whoever` may call it', []),
        ('"""There is no row, which looks like a mistake. Look up the key; the row is no longer pending."""', []),
    ],
)
def test_words_are_found_in_prose_alone(tmp_path: Path, text: str, found: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert sorted(words for _, words, _ in findings(path)) == sorted(found)


if __name__ == "__main__":
    result = report([Path(argument) for argument in sys.argv[1:]] or [ROOT / folder for folder in CHECKED])
    sys.stdout.write("\n".join((*result, f"{len(result)} findings\n")))
    sys.exit(1 if result else 0)
