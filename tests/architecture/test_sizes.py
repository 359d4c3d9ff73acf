"""Files, functions and the README have a maximum length."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE_LINES = 500
FUNCTION_LINES = 40  # without its docstring, which may be long for a public function
LUA_LINES = 60
README_WORDS = 1000
FOLDERS = ("django_delayq", "example_project", "benchmarks", "tools", "tests")


def modules(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "migrations" not in path.parts and ".venv" not in path.parts
    ]


def functions(module: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            yield f"{module}:{node.lineno} {node.name}", lines


def test_no_module_is_longer_than_500_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules(*FOLDERS)}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > MODULE_LINES} == {}


def test_no_function_is_longer_than_40_lines() -> None:
    lengths = dict(pair for path in modules(*FOLDERS) for pair in functions(path))
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


def test_no_lua_command_is_longer_than_60_lines() -> None:
    scripts = sorted((ROOT / "django_delayq").rglob("*.lua"))
    if not scripts:
        pytest.fail("the engine's commands are Lua files")
    lengths = {path.name: len(path.read_text().splitlines()) for path in scripts}
    assert {name: lines for name, lines in lengths.items() if lines > LUA_LINES} == {}


def test_the_readme_has_at_most_1000_words() -> None:
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)  # as a reader sees it
    assert 500 < len(text.split()) <= README_WORDS
