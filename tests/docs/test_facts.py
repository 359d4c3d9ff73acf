"""Tables, names, versions and files in README and docs are those of the code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from functools import reduce
from types import ModuleType

from django.apps import apps
from django.core.management import get_commands
from django.dispatch import Signal

import django_delayq
from benchmarks import report
from benchmarks.works import WORKS
from django_delayq import Retry, checks, conf
from django_delayq.arming import sync
from django_delayq.engine.records import MAX_DUE_MS
from django_delayq.ledger import relations, subjects
from django_delayq.models import Timeout
from django_delayq.operations.registry import OPERATIONS
from django_delayq.rounds import memory
from tests.docs.pages import ROOT, Page, code, pages, read

DOCS = ROOT / "docs"
PACKAGE = ROOT / "django_delayq"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def names_in_code() -> set[str]:
    """Return all identifiers in the code of all pages."""
    texts = [text for page in pages() for _, text in page.inline_code()]
    texts += [block.code for page in pages() for block in page.blocks]
    return set(IDENTIFIER.findall(" ".join(texts)))


CHECK = re.compile(r"\b[EWI]\d{3}\b")
SOURCE_OF_CHECKS = inspect.getsource(checks) + inspect.getsource(relations)


def test_system_checks_that_pages_name_exist() -> None:
    ids = {f"django_delayq.{name}" for page in pages() for _, line in page.prose for name in CHECK.findall(line)}
    assert len(ids) > 20
    assert {name for name in ids if name not in SOURCE_OF_CHECKS} == set()


def test_states_and_causes_are_those_of_the_model_with_which_are_settled() -> None:
    page = read(DOCS / "states.md")
    states = {code(row[0])[0]: row[1] == "yes" for row in page.table("state")}
    assert states == {state.value: state.is_settled for state in Timeout.State}
    causes = {code(row[0])[0]: code(row[1]) for row in page.table("cause")}
    assert list(causes) == Timeout.Cause.values
    assert all(states[state] for settled in causes.values() for state in settled)


def test_every_column_for_users_is_documented_and_exists() -> None:
    documented = {name for row in read(DOCS / "states.md").table("column") for name in code(row[0])}
    fields = [field for field in Timeout._meta.fields if field.editable or field.name == "idempotency_key"]
    columns = {field.name for field in fields} - {"id"} | {"content_object"}
    assert documented == columns | {"errors", "last_error", "is_computed"}


def test_every_public_name_is_documented_and_in_the_reference() -> None:
    assert set(django_delayq.__all__) - names_in_code() == set()
    page = (DOCS / "api.md").read_text()
    listed = set(re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)$", page, re.MULTILINE))
    signals = {name for name in django_delayq.__all__ if isinstance(getattr(django_delayq, name), Signal)}
    modules = {name for name in django_delayq.__all__ if isinstance(getattr(django_delayq, name), ModuleType)}
    assert modules == {"clock"}
    assert ".. automodule:: django_delayq.signals" in page and ".. currentmodule:: django_delayq.times.clock" in page
    assert set(django_delayq.__all__) - listed - signals - modules == set()


LOG_ATTRIBUTES = {"timeout_id", "timeout_ids"}
OPTIONS_OF_DRIVERS = {f"{name}_timeout" for name in ("connect", "read", "write")}
METRICS = {code(row[0])[0] for row in read(DOCS / "reference.md").table("metric")}
EVENTS = {code(row[0])[0] for row in read(DOCS / "monitoring.md").table("event", "level")}  # see test_monitoring


def test_names_of_the_library_exist() -> None:
    named = ((f"{page.name}:{number}", text) for page in pages() for number, text in page.inline_code())
    assert [f"{place}: {name}" for place, text in named for name in unknown_names(text)] == []


def unknown_names(text: str) -> list[str]:
    """Return names that look like a part of this library and do not exist: a module, command, setting, migration ..."""
    modules = re.findall(r"(?<![\w/])django_delayq(?:\.\w+)+", text)
    commands = re.findall(r"(?<![\w./])delayq_\w+", text)
    public = re.findall(r"(?<![\w.\"'/])(a?[a-z]+_timeouts?|timeout_[a-z]+)\b(?!=)", text)
    migrations = re.findall(r"\b\d{4}_\w+", text)
    settings = re.findall(r"\bDELAYQ\[[\"'](\w+)", text)
    known = {*django_delayq.__all__, *LOG_ATTRIBUTES, *OPTIONS_OF_DRIVERS, *EVENTS, *permissions(), *OPERATIONS}
    return [
        *(name for name in modules if not _resolves(name)),
        *(name for name in commands if name not in {*get_commands(), *METRICS, *apps.app_configs}),
        *(name for name in public if name not in known),
        *(name for name in migrations if not (ROOT / "django_delayq" / "migrations" / f"{name}.py").exists()),
        *(name for name in settings if name.lower() not in {field.name for field in fields(conf.Settings)}),
    ]


def permissions() -> set[str]:
    """Return the code names of the permissions of the library's models."""
    metas = [model._meta for model in apps.get_app_config("django_delayq").get_models()]
    standard = {f"{action}_{meta.model_name}" for meta in metas for action in meta.default_permissions}
    return standard | {codename for meta in metas for codename, _ in meta.permissions}


def _resolves(dotted: str) -> bool:
    if re.fullmatch(r"django_delayq\.[EWI]\d{3}", dotted):
        return dotted in SOURCE_OF_CHECKS
    try:
        importlib.import_module(dotted)
    except ImportError:
        head, _, name = dotted.rpartition(".")
        return importlib.util.find_spec(head) is not None and hasattr(importlib.import_module(head), name)
    return True


def test_the_files_that_internals_names_exist() -> None:
    named = {text for _, text in read(DOCS / "internals.md").inline_code()}
    files = {text for text in named if re.fullmatch(r"[\w/]+(\.py|\.lua|/)", text)}
    assert len(files) > 20
    assert {name for name in files if not ((ROOT / "django_delayq" / name).exists() or (ROOT / name).exists())} == set()


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
    page = read(DOCS / "internals.md")
    assert list(steps(page)) == PATHS
    assert [name for name, path in steps(page).items() if not 3 < len(path) <= MAX_STEPS] == []
    named = [(file, name) for path in steps(page).values() for file, names in path for name in names or [""]]
    assert [step for step in named if not _exists(*step)] == []


def test_the_table_of_tests_has_every_folder() -> None:
    rows = read(ROOT / "CONTRIBUTING.md").table("folder", "what it tests")
    folders = {f"tests/{file.parent.name}" for file in (ROOT / "tests").glob("*/__init__.py")}
    assert {name for row in rows for name in code(row[0])} == folders


def test_versions_are_those_of_the_project() -> None:
    readme = (ROOT / "README.md").read_text()
    released = re.findall(r"^## \[([\d.]+)\] - \d", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    coming = re.findall(r"^## \[([\d.]+)\] - unreleased", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.findall(r"Version (\d+\.\d+\.\d+)", readme) == [*released, *coming][:1]
    pythons = _classified("Programming Language :: Python :: 3.")
    djangos = _classified("Framework :: Django :: ")
    assert f"Python 3.{pythons[0]} to 3.{pythons[-1]}, Django {djangos[0]} to {djangos[-1]}" in readme
    untested = f"Python 3.{int(pythons[-1]) + 1} is not tested yet"
    assert all(untested in _flat(read(page)) for page in (ROOT / "README.md", DOCS / "how-to" / "install.md"))


def test_the_pages_with_figures_are_those_of_the_results() -> None:
    """After a change of the text: `python -m benchmarks --report`."""
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    measured = [work for work in WORKS if work.key in results["works"]]
    assert (DOCS / "benchmarks.md").read_text() == "\n".join(report.page(results, measured)) + "\n"
    for page in report.WITH_FIGURES:
        text = (ROOT / page).read_text()
        assert report.BEGIN in text and report.with_figures(text, results) == text


def test_the_extras_are_those_of_the_project() -> None:
    documented = {name for row in read(DOCS / "how-to" / "install.md").table("extra") for name in code(row[0])}
    assert documented == PROJECT["project"]["optional-dependencies"].keys()


def test_numbers_that_the_pages_name_are_those_of_the_code() -> None:
    scheduling, states, handlers = (_flat(read(DOCS / f"{name}.md")) for name in ("scheduling", "states", "handlers"))
    assert f"up to {subjects.MAX_KEY} characters" in scheduling
    assert "the last forty" in states and memory.MAX_EVENTS == 40
    assert MAX_DUE_MS == 2**42 - 1 and "latest supported year is 2108" in scheduling
    assert "twice immediately, then after 2, 10 and 10 minutes, and 1, 2, 6 and 15 hours" in handlers
    assert f"at most {sync.LOCKED} in one transaction" in _flat(read(DOCS / "databases.md"))
    groups = tomllib.loads((ROOT / "tests" / "faults.toml").read_text())["group"]
    (faults,) = re.findall(r"some (\d+) small faults", (ROOT / "CONTRIBUTING.md").read_text())
    assert abs(sum(len(group["fault"]) for group in groups) - int(faults)) <= 10
    ladder = [0, 0, *(60 * minutes for minutes in (2, 10, 10, 60, 120, 360, 900))]
    assert list(Retry().delays) == ladder


def _classified(prefix: str) -> list[str]:
    found = [name.removeprefix(prefix) for name in PROJECT["project"]["classifiers"] if name.startswith(prefix)]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def _flat(page: Page) -> str:
    return " ".join(" ".join(line for _, line in page.prose).split())


def test_a_web_request_waits_for_redis_as_long_as_the_guarantees_say() -> None:
    """The tests' own process waits longer, so another one is asked."""
    words = "from django_delayq.redis_clients import breaker, clients; print(breaker.LIMIT_SECONDS, clients.PRODUCER)"
    said = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == "0.25 Timeouts(seconds=0.25, health_check_interval=0, is_limit=True)\n"
    assert "for a quarter of a second" in (DOCS / "guarantees.md").read_text()
