"""Convert the comments of an example into checks.

    late = cancel_timeout(order, "cancel_unpaid")  # -> False
    schedule_timeout(order, "remind", minutes=-5)  # raises InvalidDelay

The value is compared with the expression after the arrow. Every such line must be reached, because an example that is
not run proves nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_VALUE = re.compile(r"# -> (?P<expected>.+?)\s*\Z")
_RAISES = re.compile(r"# raises (?P<name>\w+)")


class Wrong(AssertionError):
    """An example does not do what the page shows."""


class Expectations:
    """The checks of one page; `names` belongs in the namespace of its code."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.open: set[int] = set()

    def compile(self, code: str, first_line: int) -> Any:
        """Compile `code` with its checks; the line numbers are those of the page."""
        padded = "\n" * (first_line - 1) + code
        tree = ast.parse(padded, self.page)
        transformer = _Transformer(padded.splitlines())
        tree = ast.fix_missing_locations(transformer.visit(tree))
        self.open |= transformer.found
        return compile(tree, self.page, "exec")

    def names(self) -> dict[str, Any]:
        """Return the functions that the compiled code calls."""
        return {"_expect": self._expect, "_expect_raise": self._expect_raise}

    def check_all_met(self) -> None:
        """Raise `Wrong` for expectations that were never reached."""
        if self.open:
            raise Wrong(f"{self.page}: never reached: line {', '.join(map(str, sorted(self.open)))}")

    def _expect(self, line: int, value: Any, expected: Any) -> None:
        self.open.discard(line)
        if value != expected or type(value) is not type(expected):
            raise Wrong(f"{self.page}:{line}: expected {expected!r}, got {value!r}")

    @contextmanager
    def _expect_raise(self, line: int, name: str) -> Iterator[None]:
        self.open.discard(line)
        try:
            yield
        except Exception as error:
            if name not in {kind.__name__ for kind in type(error).__mro__}:
                raise
        else:
            raise Wrong(f"{self.page}:{line}: expected {name}, and nothing was raised")


class _Transformer(ast.NodeTransformer):
    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.found: set[int] = set()

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.stmt) or hasattr(node, "body"):
            return self.generic_visit(node)
        line = node.end_lineno or node.lineno
        if match := _RAISES.search(self.lines[line - 1]):
            self.found.add(line)
            call = _call("_expect_raise", line, ast.Constant(match["name"]))
            return _at(node, ast.With(items=[ast.withitem(context_expr=call)], body=[node]))
        if match := _VALUE.search(self.lines[line - 1]):
            self.found.add(line)
            expected = ast.parse(match["expected"], mode="eval").body
            if isinstance(node, ast.Expr):
                return _at(node, ast.Expr(_call("_expect", line, node.value, expected)))
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = ast.Name(node.targets[0].id, ast.Load())
                return [node, _at(node, ast.Expr(_call("_expect", line, value, expected)))]
            raise Wrong(f"line {line}: only an expression or a plain assignment has a value to compare")
        return node


def _call(function: str, line: int, *arguments: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(function, ast.Load()), args=[ast.Constant(line), *arguments], keywords=[])


def _at(node: ast.stmt, new: ast.stmt) -> ast.stmt:
    ast.copy_location(new, node)
    for child in ast.walk(new):
        for name in ("lineno", "end_lineno"):
            if hasattr(child, name) or isinstance(child, ast.expr | ast.stmt):
                setattr(child, name, getattr(node, name))
    return new
