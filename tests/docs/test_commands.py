"""Every command in README and docs exists, with its options."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand, CommandError

from tests.docs.pages import ROOT, code, pages, read

OTHER_PROGRAMS = {
    *("cd", "celery", "docker", "git", "gunicorn", "heroku", "journalctl", "kubectl", "mkdir", "redis-cli", "rq"),
    *("set", "source", "systemctl"),
}
OTHER_MODULES = {"venv"}
OTHER_PACKAGES = {"django-tasks-db"}
OTHER_COMMANDS = {"collectstatic", "db_worker"}
"""Of others, and not checked here. `tests/e2e/executors` and `test_how_to` run them."""
NAMES_ONLY = "docs/reference.md"
"""This page lists the commands without their arguments, from the code."""


@cache
def metrics() -> frozenset[str]:
    """Return the names of metrics, which look like commands; `test_monitoring` checks that they exist."""
    return frozenset(code(row[0])[0] for row in read(ROOT / "docs" / "reference.md").table("metric"))


def commands() -> Iterator[tuple[str, str]]:
    """Yield the place of each command, and its line."""
    for page in pages():
        for block in page.blocks:
            for number, line in block.commands():
                yield f"{page.name}:{number}", line
            for match in re.finditer(r"^ExecStart=(.*)$", block.code, re.MULTILINE):
                yield f"{page.name}:{block.line}", match[1]
        for number, text in page.inline_code() if page.name != NAMES_ONLY else ():
            if text in metrics():
                continue
            if re.match(r"(\$ |make |pip install |(python )?manage\.py |django-admin |delayq_\w+(?![.\w]))", text):
                manage = "manage.py " if text.startswith("delayq_") else ""
                yield f"{page.name}:{number}", manage + text.removeprefix("$ ")


def test_each_command_exists_with_its_options() -> None:
    complaints = {f"{place}: {line}": complaint_about(line) for place, line in commands()}
    assert len(complaints) > 100
    assert {line: complaint for line, complaint in complaints.items() if complaint} == {}


def test_the_options_of_the_worker_are_all_documented() -> None:
    documented = {code(row[0])[0].split()[0] for row in read(ROOT / "docs" / "worker.md").table("option")}
    assert documented == own_options("delayq_worker")


def complaint_about(line: str) -> str | None:
    """Return what is wrong with a command line, or None."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=|sudo$", words[0]):
        words.pop(0)
    if re.search(r"python[\d.]*$", words[0]):
        words.pop(0)
        if words[0] == "-c":
            return None
        if words[0] == "-m":
            return None if words[1] in OTHER_MODULES else f"unknown module {words[1]}"
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if program == "make":
        unknown = {word for word in arguments if "=" not in word} - make_targets()
        return f"no target {unknown}" if unknown else None
    if program in {"manage.py", "django-admin"}:
        return complaint_about_management(arguments)
    if program == "pip":
        requirements = [word for word in arguments[1:] if not word.startswith("-")]
        return next(filter(None, map(complaint_about_requirement, requirements)), None)
    return None if program in OTHER_PROGRAMS else f"unknown program {program}"


def complaint_about_management(arguments: list[str]) -> str | None:
    name, rest = arguments[0], arguments[1:]
    if name in OTHER_COMMANDS:
        return None
    if name not in get_commands():
        return f"there is no such command: {name}"
    try:
        command_of(name).create_parser("manage.py", name).parse_args(rest)
    except CommandError as error:
        return str(error)
    return None


def complaint_about_requirement(requirement: str) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirement = requirement.removesuffix(f" @ git+{project['urls']['Homepage']}")
    requirement = requirement.replace("dist/*.whl", project["name"])
    match = re.fullmatch(r"(\./)?(?P<name>\.|[\w-]+)(\[(?P<extras>[\w,]+)\])?", requirement)
    if requirement in OTHER_PACKAGES:
        return None
    if match is None or match["name"] not in {".", project["name"]}:
        return f"{requirement} is not this project"
    unknown = set((match["extras"] or "").split(",")) - {"", *project["optional-dependencies"]}
    return f"there is no extra {unknown}" if unknown else None


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def command_of(name: str) -> BaseCommand:
    app: Any = get_commands()[name]
    return app if isinstance(app, BaseCommand) else load_command_class(app, name)


def own_options(name: str) -> set[str]:
    """Return the options that the command adds to those of every command."""

    def options(parser: argparse.ArgumentParser) -> set[str]:
        return {action.option_strings[-1] for action in parser._actions if action.option_strings}

    common = options(BaseCommand().create_parser("manage.py", name))
    return options(command_of(name).create_parser("manage.py", name)) - common
