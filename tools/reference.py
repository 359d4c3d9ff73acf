"""Write `docs/reference.md` from the code: options, settings, operations, commands, checks, events, signals, metrics.

    .venv/bin/python tools/reference.py            write the page
    .venv/bin/python tools/reference.py check      exit with 1 if it is not what the code has

Its sentences are docstrings, declarations and helps in the package: correct them there. Only the links to pages with
more are here.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "reference.md"
LEVELS: Final = {"E": "error", "W": "warning", "I": "info"}
TYPES: Final = {"Callable": "function", "Length": "`timedelta`, span", "Calendar": "calendar", "Iterable": "strings"}
"""How the table of options calls types that have no short name."""
LINKS: Final = {
    "options": {
        "after": "how-to/terms-as-data.md#spans",
        "aliases": "rounds.md#renaming",
        "atomic": "handlers.md#effects-outside-the-database",
        "batch": "batches.md#batches",
        "batch_by": "batches.md#one-call-for-each-owner",
        "brake": "guard-rails.md#a-brake",
        "grace": "how-to/steps.md",
        "hold_when": "how-to/stop-the-clock.md",
        "late": "guard-rails.md#too-late",
        "limits": "guard-rails.md",
        "owner": "how-to/select.md#finding-timeouts",
        "queue": "worker.md#several-workers-several-queues",
        "retry": "handlers.md#retries",
        "search": "how-to/select.md#finding-timeouts",
        "shadow": "guard-rails.md#shadow-mode",
        "silenced_checks": "#checks",
        "since": "how-to/dates.md",
        "together": "batches.md#several-in-one-transaction",
        "when": "watching.md#watched-rows",
        "within": "how-to/quiet-hours.md",
    },
    "settings": {
        "AROUND": "how-to/tracing.md",
        "EXECUTOR": "executors.md",
        "HANDLER_LIMIT": "guard-rails.md#a-handler-that-takes-too-long",
        "INSTALLATION": "guard-rails.md#a-restored-copy",
        "LEASE": "settings.md#leases",
        "PREFIX": "databases.md#read-replicas-and-several-databases",
        "PRODUCTION": "how-to/staging-time.md",
        "REDIS": "settings.md#redis",
        "RETENTION": "worker.md#sync-and-prune",
        "RETRY": "handlers.md#retries",
        "SCRUB": "security.md#what-errors-contain",
    },
    "operations": {
        "brake": "guard-rails.md#a-brake",
        "delay": "operating.md#changing-a-delay",
        "erase": "how-to/personal-data.md",
        "hold": "operating.md#stopping-a-policy",
        "hold_timeout": "how-to/stop-the-clock.md",
        "late": "guard-rails.md#too-late",
        "pause": "operating.md#stopping-a-policy",
        "pause_timeout": "how-to/stop-the-clock.md#only-pause-it",
        "refire": "guard-rails.md#repeat-what-happened",
        "replan": "operating.md#computing-deadlines-again",
        "shadow": "guard-rails.md#shadow-mode",
    },
    "commands": {
        "delayq_adopt": "guard-rails.md#a-restored-copy",
        "delayq_clock": "how-to/staging-time.md",
        "delayq_doctor": "operating.md#the-doctor",
        "delayq_explain": "operating.md#why-did-it-fire-or-not",
        "delayq_export": "how-to/personal-data.md",
        "delayq_prune": "worker.md#sync-and-prune",
        "delayq_report": "how-to/reports.md",
        "delayq_retire": "how-to/retire.md",
        "delayq_status": "operating.md#status",
        "delayq_sync": "worker.md#sync-and-prune",
        "delayq_whatif": "how-to/reports.md",
        "delayq_worker": "worker.md",
    },
    "checks": {
        "E010": "beside.md#primary-keys",
        "E022": "beside.md#other-apps",
        "E023": "beside.md#apps-that-cache-queries",
        "E024": "how-to/tenants.md#schemas",
        "E025": "rounds.md#renaming",
        "I002": "watching.md#bulk-writes",
        "I003": "databases.md#silent-connections",
        "I004": "declaring.md#automatic-or-by-hand",
        "W001": "watching.md#conditions-that-cannot-be-watched",
        "W004": "databases.md#sqlite",
        "W006": "databases.md#time-zones",
        "W007": "declaring.md#mistakes",
        "W013": "declaring.md#automatic-or-by-hand",
        "W015": "watching.md#soft-deletion",
        "W016": "how-to/select.md#finding-timeouts",
        "W017": "declaring.md#automatic-or-by-hand",
        "W020": "databases.md#connections",
        "W030": "guard-rails.md#a-restored-copy",
    },
}
INTRODUCTION: Final = """\
# Reference

<!-- Written by `make reference` from the code. Correct its sentences there: docstrings, `help`, declarations. -->

Every [option](#options), [setting](#settings), [operation](#operations), [command](#commands), [check](#checks),
[event](#events), [signal](#signals) and [metric](#metrics). A name with a link leads to the page with more. For
functions and classes, see the [API](api.md).
"""
OPTIONS: Final = """\
Of the decorator `timeout_policy`, which [declares a policy](declaring.md):
"""
SETTINGS: Final = """\
The keys of the dict `DELAYQ`, all of them optional: [where to put them](settings.md).
"""
OPERATED: Final = """\
What operators do, in [Python](operating.md#one-timeout-or-many) with the functions of `django_delayq.operations`, by
command, in the [admin](admin.md) and by [REST](rest.md#for-operators). The permissions of the first table belong to the
model `Timeout`, those of the second to `PolicyControl`; commands check none.

Without `--state` a command selects pending timeouts and those whose clock is stopped; `delayq_retry` selects dead ones,
`delayq_refire` fired ones, and `delayq_erase` those in any state.
"""
COMMANDS: Final = """\
Of `manage.py`. `--help` of each lists its options, with examples. Those of [operations](#operations) accept `--dry-run`
and `--reason`; `delayq_pause`, `delayq_hold` and `delayq_resume` also `--all`. The other commands:
"""
CHECKS: Final = """\
`manage.py check` reports them, with `django_delayq.` before the id. Two groups are not part of each run:

* only with `--deploy`: {deploy}
* only with `--database default`, and before `migrate`: {database}

`SILENCED_SYSTEM_CHECKS` silences a check for all policies. The option `silenced_checks` of a policy silences these for
it: {silenced}.

The message of a check names the setting, policy or file. In the last column `…` stands for it.
"""
EVENTS: Final = """\
The history of a timeout has them as `what`; the admin and `explain_timeout` show the labels, translated. The events of
the log are on the page [monitoring](monitoring.md#logs).
"""
SIGNALS: Final = """\
Of `django_delayq.signals`. [States](states.md#signals) has an example.
"""
METRICS: Final = """\
For [Prometheus](monitoring.md#prometheus).
"""


def main(arguments: list[str]) -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "example_project")]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    import django

    django.setup()
    text = page()
    if arguments == ["check"]:
        is_current = PAGE.read_text(encoding="utf-8") == text
        print(f"reference: {PAGE.name} is {'what the code has' if is_current else 'outdated: run `make reference`'}")
        return 0 if is_current else 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"reference: {len(text.splitlines())} lines")
    return 0


def page() -> str:
    """Return the page, in English. Raises LookupError if a sentence is missing in the code, or a link has no row."""
    from django.utils import translation

    with translation.override("en"):
        sections = [INTRODUCTION, *options(), *settings(), *operations(), *commands(), *checks(), *events()]
        sections += [*signals(), *metrics()]
    return "\n".join(sections)


def options() -> Iterator[str]:
    from django_delayq.policy import declaring
    from django_delayq.policy.policies import TimeoutPolicy

    texts = entries(declaring.timeout_policy.__doc__, "Args")
    # Of types that are imported for type checkers only, the sources have the names.
    types = annotated_names(TimeoutPolicy) | annotated_names(declaring._Options)
    defaults = {name: each.default for name, each in inspect.signature(TimeoutPolicy).parameters.items()}
    del texts["**options"], defaults["handler"]
    if texts.keys() != defaults.keys():
        raise LookupError(f"timeout_policy documents other options than it has: {texts.keys() ^ defaults.keys()}")
    rows = []
    for name, text in texts.items():
        default = defaults[name] if name not in {"model", "name"} else None
        rows.append((name, type_name(types[name]), shown(default), first_sentence(text)))
    yield "## Options\n"
    yield OPTIONS
    yield table("options", ("option", "type", "default", "meaning"), rows)


def settings() -> Iterator[str]:
    from django_delayq import conf

    texts = entries(conf.Settings.__doc__, "Attributes")
    rows = [
        (key, shown(field.default, none="`None`"), values_of(key), texts.pop(field.name))
        for key, field in conf.KEYS.items()
    ]
    if texts:
        raise LookupError(f"There are no such settings: {', '.join(texts)}")
    yield "## Settings\n"
    yield SETTINGS
    yield table("settings", ("setting", "default", "values", "meaning"), rows)


def values_of(key: str) -> str:
    """Return the values that a setting may have, as the error about a wrong one names them."""
    from django_delayq import conf

    try:
        conf._checked(key, object())
    except conf.ConfigError as error:
        return re.sub(r".* must be (.+?),? not [<o].*", r"\1", str(error))
    raise LookupError(f"{key} accepts anything")


def operations() -> Iterator[str]:
    from django_delayq.contrib.rest_framework import views
    from django_delayq.operations.registry import POLICY_OPERATIONS, TIMEOUT_OPERATIONS

    of_command = {command.name: name for name, command in own_commands().items() if getattr(command, "name", "")}
    yield "## Operations\n"
    yield OPERATED
    header = ("operation", "Python", "command", "button", "permission", "effect")
    for title, path, view, listed in (
        ("timeouts", "timeouts/{id}/", views.TimeoutViewSet, TIMEOUT_OPERATIONS),
        ("policies", "policies/{label}/", views.PolicyViewSet, POLICY_OPERATIONS),
    ):
        extra: list[Any] = view.get_extra_actions()
        lacking = listed.keys() - {each.url_path for each in extra}
        rows = []
        for name, each in listed.items():
            given = [parameter.option for parameter in each.parameters if parameter.option.startswith("--")]
            command = f"`{' '.join([of_command[name], *given])}`"
            effect = first_sentence(inspect.getdoc(each.call) or "")
            rows.append((name, f"`{each.call.__name__}`", command, each.button_for(), f"`{each.permission}`", effect))
        absent = f" (not {code(sorted(lacking))})" if lacking else ""
        yield f"Of {title}. In REST: `POST {path}`, followed by the name{absent}.\n"
        yield table("operations", header, rows, partial=True)
    check_links("operations", TIMEOUT_OPERATIONS | POLICY_OPERATIONS)


def own_commands() -> dict[str, Any]:
    from django.core.management import get_commands, load_command_class

    own = sorted(name for name, app in get_commands().items() if app == "django_delayq")
    return {name: load_command_class("django_delayq", name) for name in own}


def commands() -> Iterator[str]:
    from django_delayq.management.operating import ReportCommand
    from django_delayq.operations.registry import OPERATIONS

    others = {name: each for name, each in own_commands().items() if getattr(each, "name", "") not in OPERATIONS}
    yield "## Commands\n"
    yield COMMANDS
    for title, is_reading in (("Show:", True), ("Run and maintain:", False)):
        found = {name: each for name, each in others.items() if isinstance(each, ReportCommand) is is_reading}
        yield f"{title}\n"
        rows = [(name, paragraphs(command.help)[0]) for name, command in found.items()]
        yield table("commands", ("command", "what it does"), rows, partial=True)
    check_links("commands", others)


def checks() -> Iterator[str]:
    from django.core.checks.registry import registry

    from django_delayq import checks
    from django_delayq.ledger import relations
    from django_delayq.policy import declaring

    texts, hints = dict[str, str](), dict[str, str]()
    for module in (checks, relations):
        for function in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(function, ast.FunctionDef):
                found = entries(ast.get_docstring(function) or "", "Reports")
                texts |= found
                hints |= hints_in(function, found)
        if missing := set(re.findall(r'"django_delayq\.([A-Z]\d+)"', inspect.getsource(module))) - texts.keys():
            raise LookupError(f"No docstring states, in its section Reports, the problem of: {', '.join(missing)}")
    ids: dict[str, list[str]] = {"deploy": [], "database": [], "silenced": [*declaring.SILENCED_BY_POLICY]}
    for check in (*registry.deployment_checks, *registry.registered_checks):
        if check.__module__ == checks.__name__:
            kind = "deploy" if check in registry.deployment_checks else "database" if "database" in check.tags else ""
            ids.get(kind, []).extend(entries(check.__doc__, "Reports"))
    words = {kind: ", ".join(sorted(found, key=_severity)) for kind, found in ids.items()}
    yield "## Checks\n"
    yield CHECKS.format(**words)
    rows = [(each, LEVELS[each[0]], texts[each], hints.get(each, "")) for each in sorted(texts, key=_severity)]
    yield table("checks", ("id", "level", "problem", "what to do"), rows)


def _severity(check: str) -> tuple[int, str]:
    return list(LEVELS).index(check[0]), check


def hints_in(function: ast.FunctionDef, reported: Iterable[str]) -> dict[str, str]:
    """Return the hints of the checks that a function creates, by their ids, with `…` for what is computed."""
    hints, others = dict[str, str](), ""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"Error", "Warning", "Info"}:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            hint = given.get("hint")
            parts = hint.values if isinstance(hint, ast.JoinedStr) else [hint]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts if part)
            text = re.sub(r"…( …)+", "…", text).removesuffix("…")
            if isinstance(given["id"], ast.Constant):
                name = str(given["id"].value).removeprefix("django_delayq.")
                hints[name] = max(hints.get(name, ""), text, key=len)
            else:
                others = text
    return dict.fromkeys(reported, others) | hints


def events() -> Iterator[str]:
    from django_delayq.scheduling.story import EVENT_LABELS

    yield "## Events\n"
    yield EVENTS
    yield table("events", ("event", "label"), [(name, str(label)) for name, label in EVENT_LABELS.items()])


def signals() -> Iterator[str]:
    from django_delayq import signals

    rows = [
        (name, lowered(text))
        for name, text in documented_names(signals).items()
        if hasattr(getattr(signals, name), "send")
    ]
    yield "## Signals\n"
    yield SIGNALS
    yield table("signals", ("signal", "sent when"), rows)


def documented_names(module: ModuleType) -> dict[str, str]:
    """Return the strings below the assignments of a module, by the names that are assigned."""
    found, name = dict[str, str](), ""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
        name = getattr(node.targets[0], "id", "") if isinstance(node, ast.Assign) else ""
    return found


def metrics() -> Iterator[str]:
    from django_delayq.contrib import prometheus as found

    kept = [*found.COUNTERS.values(), found.WITHHELD, found.IN_TIME, found.RESTORED, found.LAG]
    rows = []
    for metric in kept:
        (described,) = metric.describe()
        name = f"{described.name}_total" if described.type == "counter" else described.name
        rows.append((name, described.type, code(metric._labelnames), lowered(described.documentation)))
    rows += [(f"delayq_{name}", "gauge", code(labels), lowered(text)) for name, (text, labels) in found.GAUGES.items()]
    yield "## Metrics\n"
    yield METRICS
    yield table("metrics", ("metric", "type", "labels", "meaning"), rows)


def table(section: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, partial: bool = False) -> str:
    """Return a table, whose first cells are names with the links of `section`."""
    links, rows = LINKS.get(section, {}), list(rows)
    if not partial:
        check_links(section, {row[0] for row in rows})
    lines = [header, ("---",) * len(header)]
    for name, *cells in rows:
        first = f"[`{name}`]({links[name]})" if name in links else f"`{name}`"
        lines.append((first, *(cell.strip().removesuffix(".").replace("|", "\\|") for cell in cells)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |") + "\n"


def check_links(section: str, names: Iterable[str]) -> None:
    if unknown := LINKS.get(section, {}).keys() - set(names):
        raise LookupError(f"{section} has links, but no rows, for: {', '.join(sorted(unknown))}")


def entries(docstring: str | None, section: str) -> dict[str, str]:
    """Return the entries `name: text` of a section of a docstring, such as `Args`; none if there is no such section."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    if f"{section}:" not in lines:
        return {}
    found, names = dict[str, str](), list[str]()
    for line in lines[lines.index(f"{section}:") + 1 :]:
        if line and not line.startswith("    "):
            break
        if match := re.match(r"    ([*\w]+(?:, [*\w]+)*): (.+)", line):
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        elif line:
            found |= dict.fromkeys(names, f"{found[names[0]]} {line.strip()}")
    return found


def annotated_names(of: type[Any]) -> dict[str, ast.expr]:
    (declared,) = (node for node in ast.parse(inspect.getsource(of)).body if isinstance(node, ast.ClassDef))
    assigned = [node for node in declared.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: node.annotation for node in assigned if isinstance(node.target, ast.Name)}


def type_name(annotation: ast.expr) -> str:
    """Return a type as the table of options shows it: without None, and without what is in brackets."""
    if isinstance(annotation, ast.BinOp):
        names = (type_name(annotation.left), type_name(annotation.right))
        return ", ".join(name for name in names if name)
    if isinstance(annotation, ast.Subscript):
        is_class = getattr(annotation.value, "id", "") == "type"
        return "model, `str`" if is_class else type_name(annotation.value)
    if isinstance(annotation, ast.Constant):
        return ""
    name = getattr(annotation, "id", "")
    return TYPES.get(name) or f"`{name}`"


def shown(value: Any, none: str = "") -> str:
    """Return a default; `none` for None, an empty tuple or a missing one."""
    from django_delayq import Retry

    if isinstance(value, timedelta):
        units = {"days": value.days, "hours": value.seconds // 3600, "seconds": value.seconds % 3600}
        return f"`timedelta({', '.join(f'{name}={number}' for name, number in units.items() if number)})`"
    if value == Retry():
        return "`Retry()`"
    if isinstance(value, bool | int | str) or (value == () and none):
        return f"`{value!r}`".replace("'", '"')
    return none


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraphs(text)[0])[0]


def paragraphs(text: str) -> list[str]:
    return [" ".join(each.split()) for each in inspect.cleandoc(text).split("\n\n")]


def lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
