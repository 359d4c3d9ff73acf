"""Decisions read columns: a history is written for people, and drops events beyond its cap."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "django_delayq"

# module: what it shows. A decision in one of these modules must not depend on an event either.
DISPLAY = {
    "__init__.py": "exports `explain_timeout`",
    "admin/filters.py": "the types of last errors, and the rows with one of them",
    "admin/render.py": "events and failures as HTML",
    "contrib/rest_framework/outputs.py": "events as JSON",
    "rounds/memory.py": "appends events",
    "management/commands/delayq_explain.py": "the story in a terminal",
    "models/timeout.py": "`Timeout.errors`",
    "scheduling/story.py": "the story",
    "testing.py": "the message of a failed assertion",
}
# the reason that an operator has given for a hold, for the events of the rows that it has moved
DETAILS_FOR_WORDS = {"operations/changes.py": 'change.details.get("held_reason")'}
READING = {"F", "Q", "alias", "annotate", "attrgetter", "exclude", "filter", "getattr", "order_by", "values"}
READING |= {"values_list"}
STORIES = {"explain_timeout", "events_of", "story_of"}
OTHER_ERRORS = {"self", "self.monitor", "other", "report"}
"""What has an attribute `errors` and is not a timeout."""


def reads(source: str) -> list[str]:
    """Return the expressions of `source` that read a history, an event, a story, or the details of a change."""
    return sorted({ast.unparse(node) for node in _reads(ast.parse(source))})


def _reads(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="history" | "details", ctx=ast.Load()):
                yield node
            case ast.Attribute(attr="errors", ctx=ast.Load()) if ast.unparse(node.value) not in OTHER_ERRORS:
                yield node
            case ast.Subscript(slice=ast.Constant(value="history" | "what"), ctx=ast.Load()):
                yield node
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="history" | "what"), *_]):
                yield node
            case ast.Call() if _name(node.func) in READING and any(map(_is_of_history, _named(node))):
                yield node
            case ast.ImportFrom(names=names) if {each.name for each in names} & STORIES:
                yield node


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _named(call: ast.Call) -> list[str]:
    constants = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return [*constants, *(each.arg for each in call.keywords if each.arg)]


def _is_of_history(name: str) -> bool:
    return name.lstrip("-").split("__")[0] in {"history", "details"}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Return what reads a history, by module."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "migrations"]
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    return {name: each for name, source in sources.items() if (each := reads(source))}


def test_only_modules_that_display_read_a_history(found: dict[str, list[str]]) -> None:
    expected = {"change.details", *DETAILS_FOR_WORDS.values()}
    others = {name: set(each) - expected for name, each in found.items() if name not in DISPLAY}
    assert {name: each for name, each in others.items() if each} == {}, "give what it decides by a column"
    assert {name for name in others if "change.details" in found[name]} == set(DETAILS_FOR_WORDS)
    for name, words in DETAILS_FOR_WORDS.items():
        source = (PACKAGE / name).read_text()
        assert source.count("change.details") == source.count(words) == 1


def test_each_module_that_may_read_a_history_does(found: dict[str, list[str]]) -> None:
    assert DISPLAY.keys() - found.keys() == set()
