"""The metrics, labels and events that the monitoring page, the dashboard and the alerts name exist."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

import yaml
from prometheus_client.core import Metric

from django_delayq.contrib import prometheus as metrics
from tests.docs.pages import ROOT, code, read

PAGE = ROOT / "docs" / "monitoring.md"
REFERENCE = ROOT / "docs" / "reference.md"
FOLDER = ROOT / "docs" / "monitoring"
PACKAGE = ROOT / "django_delayq"
NAME = re.compile(r"\bdelayq_[a-z_]+\b")
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return the type and the labels of each metric in the reference."""
    return {code(row[0])[0]: (row[1], set(code(row[2]))) for row in read(REFERENCE).table("metric", "type", "labels")}


def kept() -> Iterator[Metric]:
    for metric in (*metrics.COUNTERS.values(), metrics.WITHHELD, metrics.IN_TIME, metrics.LAG, metrics.RESTORED):
        yield from metric.collect()


def expressions() -> Iterator[str]:
    """Yield all PromQL expressions of the dashboard and of the alerts."""
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def test_the_reference_names_every_metric_with_its_type_and_labels() -> None:
    found: dict[str, tuple[str, set[str]]] = {}
    for metric in kept():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        others = {"delayq_withheld": {"policy", "cause"}, "delayq_restored_entries": set[str]()}
        found[name] = (metric.type, others.get(metric.name, {"policy"}))
    found |= {f"delayq_{name}": ("gauge", set(labels)) for name, (_, labels) in metrics.GAUGES.items()}
    assert documented() == found


def unknown(expression: str) -> list[str]:
    """Return the metrics and labels of an expression that do not exist."""
    known, labels = set(documented()), ",".join(re.findall(r"\b(?:by|on) \(([^)]*)\)", expression))
    names = NAME.findall(re.sub(r"\{[^}]*\}", "", expression))
    return [
        *(name for name in names if not {name, *(name.removesuffix(part) for part in HISTOGRAM_PARTS)} & known),
        *({label.strip() for label in labels.split(",")} - {"policy", "cause", "le", ""}),
    ]


def test_dashboard_and_alerts_ask_for_metrics_and_labels_that_exist() -> None:
    assert {expression: found for expression in expressions() if (found := unknown(expression))} == {}
    assert unknown("sum by (polcy) (rate(delayq_fierd_total[5m]))") == ["delayq_fierd_total", "polcy"]


def test_every_event_of_the_logs_is_documented() -> None:
    assert {code(row[0])[0] for row in read(PAGE).table("event", "level")} == set(events())


def events() -> Iterator[str]:
    """Yield the logged events: in `extra`, for a `StateLog`, and for functions with a parameter `event`."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    places = {"StateLog": [1, 2]}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args if argument.arg != "self"]
            if "event" in names:
                places[node.name] = [names.index("event")]
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "extra" and isinstance(node.value, ast.Dict):
            fields = zip(node.value.keys, node.value.values, strict=True)
            yield from _strings(*(value for key, value in fields if _strings(key) == ["event"]))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            yield from _strings(*(node.args[place] for place in places.get(name, ()) if place < len(node.args)))


def _strings(*nodes: ast.AST | None) -> list[str]:
    """Return the strings that the expressions may be."""
    return [
        node.value
        for expression in nodes
        for node in ast.walk(expression or ast.Pass())
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
