"""Measure the package from its sources: code lines, imports, numeric constants, and long lists of parameters.

    python tests/architecture/measures.py                                    # this checkout
    python tests/architecture/measures.py ../other/django_delayq

Nothing is imported, so the package of any checkout can be measured. `test_budgets.py` has the ceilings.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

MAX_PARAMETERS = 5
ROOT_ROOM, LUA_ROOM = "root", "lua"
EDGES = ("admin", "contrib", "management", "monitoring", "operations", "templatetags")
"""The rooms that present the core to operators. All others, and Lua, are the core."""
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
NOT_TUNING = re.compile(r"_CODES$|^VERSION$")
"""Names of constants that tune nothing: codes of the errors of a server, and the version of a message."""
OTHER_OWNERS = {"self", "cls", "change", "run", "call", "control", "copy", "meter", "sync", "record"}
"""Names of variables that have other objects than rows of the ledger."""
AT_HOME = re.compile(r"/(rounds|ledger)/")
Graph = Mapping[str, AbstractSet[str]]


@dataclass
class Imports:
    """Modules of the package that one module imports: when it is loaded, for types only, and within functions."""

    loading: set[str] = field(default_factory=set)
    typing: set[str] = field(default_factory=set)
    calling: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Constant:
    """A numeric constant, and whether a docstring or a comment explains its value."""

    where: str
    name: str
    value: str
    is_explained: bool


class Module:
    """One file of the package."""

    def __init__(self, path: Path, package: Path) -> None:
        self.path = path
        inside = path.relative_to(package.parent).with_suffix("").parts
        self.is_package = inside[-1] == "__init__"
        self.name = ".".join(inside[:-1] if self.is_package else inside)
        self.room = inside[1] if len(inside) > 2 else ROOT_ROOM
        self.source = path.read_text(encoding="utf-8")
        self.lines = self.source.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def code_lines(self) -> int:
        """Return the number of lines as cloc counts: without blank lines, comments and docstrings."""
        strings = {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and _is_text(node.value)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        code = (token for token in tokens if token.type not in NOT_CODE)
        return len({line for token in code for line in range(token.start[0], token.end[0] + 1)} - strings)

    def imports(self, known: AbstractSet[str]) -> Imports:
        """Return which of the `known` modules it imports."""
        found = Imports()
        self._add_imports(self.tree.body, found, found.loading, known)
        for names in (found.loading, found.typing, found.calling):
            names.discard(self.name)
        return found

    def _add_imports(self, nodes: list[ast.stmt], found: Imports, into: set[str], known: AbstractSet[str]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                into |= {name for name in self._imported(node, known) if name in known}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._add_imports(node.body, found, found.calling, known)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                self._add_imports(node.body, found, found.typing, known)
                self._add_imports(node.orelse, found, into, known)
            else:
                for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                    self._add_imports(getattr(node, part, []), found, into, known)

    def _imported(self, node: ast.Import | ast.ImportFrom, known: AbstractSet[str]) -> Iterator[str]:
        """Yield what an import names: a module, or the module that a name comes from."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        parents = self.name.split(".")[: None if self.is_package else -1]
        base = [*parents[: len(parents) - node.level + 1]] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            submodule = f"{module}.{alias.name}"
            yield submodule if submodule in known else module

    def constants(self) -> Iterator[Constant]:
        """Yield the numeric constants of the module and of its classes, of which each may tune behaviour.

        Such a constant is a name in capitals, also after an underscore, that is bound to a number, to a timedelta, or
        to a tuple or frozenset of them. An expression counts if all of it is that: `24 * 60 * 60`, `2 * _MINUTE`.
        Enumerations, flags, strings, dictionaries and error codes (`NOT_TUNING`) do not count, nor do the units
        that one line binds together (`_MINUTE, _HOUR = ...`).
        """
        yield from self._constants_of(self.tree.body, "", set())

    def _constants_of(self, body: list[ast.stmt], prefix: str, known: set[str]) -> Iterator[Constant]:
        for number, node in enumerate(body):
            if isinstance(node, ast.ClassDef):
                yield from self._constants_of(node.body, f"{prefix}{node.name}.", set(known))
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Tuple):
                known |= {name.id for name in target.elts if isinstance(name, ast.Name)}
            value: ast.expr | None = getattr(node, "value", None)
            if value is None or not (isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id)):
                continue
            if not _is_number(value, known):
                continue
            known.add(target.id)
            if not NOT_TUNING.search(target.id):
                following = body[number + 1] if number + 1 < len(body) else None
                yield Constant(
                    f"{self.path}:{node.lineno}",
                    prefix + target.id,
                    ast.unparse(value),
                    self._has_comment(node) or (isinstance(following, ast.Expr) and _is_text(following.value)),
                )

    def _has_comment(self, node: ast.stmt) -> bool:
        """Return whether a comment is on the lines of the statement, or directly above it."""
        own = self.lines[node.lineno - 1 : node.end_lineno]
        above = self.lines[node.lineno - 2] if node.lineno > 1 else ""
        return any("#" in line for line in own) or above.lstrip().startswith("#")

    def long_parameter_lists(self) -> Iterator[str]:
        """Yield the functions with more than five parameters, without `self`, `cls`, `*args` and `**kwargs`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                if count > MAX_PARAMETERS:
                    yield f"{self.path}:{node.lineno} {node.name}: {count}"

    def columns(self) -> set[str]:
        """Return the names of the fields of the model `Timeout`, if this module has it."""
        models = [node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == "Timeout"]
        fields = [each for model in models for each in model.body if isinstance(each, ast.Assign | ast.AnnAssign)]
        targets = [each.target if isinstance(each, ast.AnnAssign) else each.targets[0] for each in fields]
        return {target.id for target in targets if isinstance(target, ast.Name)}

    def setters(self, columns: AbstractSet[str]) -> Iterator[str]:
        """Yield the functions that set one of these attributes of a local variable, or several by `vars`."""
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes = list(ast.walk(function))
                is_one = any(
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and node.attr in columns
                    and isinstance(node.value, ast.Name)
                    and node.value.id not in OTHER_OWNERS
                    for node in nodes
                )
                if columns and (is_one or any(map(_updates_vars, nodes))):
                    yield f"{self.path}:{function.lineno} {function.name}"


def _updates_vars(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(re.match(r"vars\((row|new|fired)\)\.update\(", ast.unparse(node)))


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_number(value: ast.expr, known: AbstractSet[str]) -> bool:
    """Return whether an expression is a number, a timedelta, or a collection of them. `known` names are numbers."""
    match value:
        case ast.Constant(value=number):
            return isinstance(number, int | float) and not isinstance(number, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand, known)
        case ast.BinOp(left=left, right=right):
            return _is_number(left, known) and _is_number(right, known)
        case ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.List(elts=parts):
            return bool(parts) and all(_is_number(part, known) for part in parts)
        case ast.Call(func=ast.Name(id="timedelta" | "frozenset" | "tuple"), args=args, keywords=keywords):
            parts = [*args, *(keyword.value for keyword in keywords)]
            return bool(parts) and all(_is_number(part, known) for part in parts)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in known
        case _:
            return False


class Package:
    """All modules of a package, measured together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        modules = [Module(path, folder) for path in sorted(folder.rglob("*.py"))]
        self.modules = {module.name: module for module in modules}
        self._sources = [module for module in modules if module.room != "migrations"]

    def code_lines(self) -> dict[str, int]:
        """Return the code lines of each room, without migrations; those of Lua files are a room of their own."""
        lines: dict[str, int] = defaultdict(int)
        for module in self._sources:
            lines[module.room] += module.code_lines()
        for path in self.folder.rglob("*.lua"):
            stripped = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
            lines[LUA_ROOM] += sum(bool(line) and not line.startswith("--") for line in stripped)
        return dict(lines)

    @cached_property
    def _imports(self) -> dict[str, Imports]:
        return {name: module.imports(self.modules.keys()) for name, module in self.modules.items()}

    @cached_property
    def loading(self) -> Graph:
        """Which modules each module loads when it is loaded."""
        return {name: imports.loading for name, imports in self._imports.items()}

    @cached_property
    def reading(self) -> Graph:
        """Which modules a reader of each module needs: `loading`, and the imports for types only."""
        return {name: imports.loading | imports.typing for name, imports in self._imports.items()}

    @cached_property
    def deferred(self) -> Graph:
        """Which modules the functions of each module import when they are called."""
        return {name: imports.calling for name, imports in self._imports.items()}

    def constants(self) -> list[Constant]:
        return [constant for module in self._sources for constant in module.constants()]

    def long_parameter_lists(self) -> list[str]:
        return [function for module in self._sources for function in module.long_parameter_lists()]

    def setters(self) -> list[str]:
        """Return the functions that set columns of a Timeout."""
        columns = set[str]().union(*(module.columns() for module in self._sources))
        return [function for module in self._sources for function in module.setters(columns)]


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that reach each other."""
    return sorted(component for component in _components(graph) if len(component) > 1)


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of modules in which each imports the next one. A circle counts with all its modules."""
    best: dict[str, list[str]] = {}
    for component in _components(graph):
        below = {name for member in component for name in graph[member]} - set(component)
        rest = max((best[name] for name in sorted(below)), key=len, default=[])
        best |= {member: [*component, *rest] for member in component}
    return max((best[name] for name in sorted(best)), key=len, default=[])


def _components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, each after those that it reaches (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            found.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def measure(package: Package) -> dict[str, int]:
    """Return the measures that have a budget."""
    lines, constants = package.code_lines(), package.constants()
    edges = sum(lines.get(room, 0) for room in EDGES)
    return {
        "code lines of the core": sum(lines.values()) - edges,
        "code lines of the edges": edges,
        "modules": len(package.modules),
        "longest chain of imports": len(longest_chain(package.loading)),
        "circles of imports": len(circles(package.reading)),
        "imports in functions": sum(map(len, package.deferred.values())),
        "numeric constants": len(constants),
        "numeric constants without a reason": sum(not constant.is_explained for constant in constants),
        "functions with more than 5 parameters": len(package.long_parameter_lists()),
        "functions that set columns of a Timeout": len(package.setters()),
        "of these outside of rounds and ledger": len([each for each in package.setters() if not AT_HOME.search(each)]),
    }


def _print(package: Package) -> None:
    def show(title: str, lines: Iterable[str]) -> None:
        print(f"\n{title}", *lines, sep="\n  ")  # noqa: T201

    show("Measures", (f"{number:6,} {what}" for what, number in measure(package).items()))
    show("Code lines of each room", (f"{count:6,} {room}" for room, count in sorted(package.code_lines().items())))
    show("Circles, imports for types included", (" ".join(circle) for circle in circles(package.reading)))
    show("Longest chain", longest_chain(package.loading))
    deferred = {name: sorted(others) for name, others in package.deferred.items() if others}
    show("Imports in functions", (f"{name}: {' '.join(others)}" for name, others in deferred.items()))
    show("Functions with more than 5 parameters", package.long_parameter_lists())
    show("Functions that set columns of a Timeout", package.setters())
    for title, is_explained in (("with", True), ("without", False)):
        chosen = [constant for constant in package.constants() if constant.is_explained is is_explained]
        show(f"Numeric constants {title} a reason", (f"{each.where} {each.name} = {each.value}" for each in chosen))


if __name__ == "__main__":
    _print(Package(Path(sys.argv[1] if len(sys.argv) > 1 else "django_delayq")))
