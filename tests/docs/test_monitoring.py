"""What the monitoring page, the dashboard and the alerts name exists: metrics, labels, events."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from prometheus_client.core import Metric

from django_delayq.contrib import prometheus as metrics
from tests.docs.pages import ROOT, code, read

PAGE = ROOT / "docs" / "monitoring.md"
FOLDER = ROOT / "docs" / "monitoring"
PACKAGE = ROOT / "django_delayq"
NAME = re.compile(r"\bdelayq_[a-z_]+\b")
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def told() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric that the page names."""
    return {code(row[0])[0]: (row[1], set(code(row[2]))) for row in read(PAGE).table("metric", "type", "labels")}


def kept() -> Iterator[Metric]:
    for metric in (*metrics.COUNTERS.values(), metrics.LAG):
        yield from metric.collect()


def expressions() -> Iterator[str]:
    """Every PromQL expression of the dashboard and of the alerts."""
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


def test_the_page_names_every_metric_with_its_type_and_labels() -> None:
    found: dict[str, tuple[str, set[str]]] = {}
    for metric in kept():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        found[name] = (metric.type, {"policy"})
    found |= {gauge.name: ("gauge", set(labels)) for gauge, labels in metrics.gauge_families()}
    assert told() == found


def test_dashboard_and_alerts_ask_for_metrics_that_exist() -> None:
    known = set(told())
    for expression in expressions():
        for name in NAME.findall(re.sub(r"\{[^}]*\}", "", expression)):
            base = next((name.removesuffix(part) for part in HISTOGRAM_PARTS if name.endswith(part)), name)
            assert name in known or base in known, f"{name} in {expression}"


def test_every_metric_is_on_the_dashboard() -> None:
    text = " ".join(expressions())
    assert [name for name in told() if name not in text] == []


def test_dashboard_and_alerts_group_by_labels_that_exist() -> None:
    for expression in expressions():
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert {label.strip() for label in labels.split(",")} <= {"policy", "le"}, expression


def test_every_alert_says_what_to_do() -> None:
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() >= {"summary", "description"}
            assert rule["labels"]["severity"] in {"page", "ticket"}


def test_metrics_that_do_not_exist_are_found_out() -> None:
    assert NAME.findall("sum(rate(delayq_fierd_total[5m]))") == ["delayq_fierd_total"]
    assert "delayq_fierd_total" not in told()


def test_every_event_of_the_logs_is_told() -> None:
    assert {code(row[0])[0] for row in read(PAGE).table("event", "level")} == set(events())


def events() -> Iterator[str]:
    """Every event that some log call in the package names, and those given to `tell_once`."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "extra" and isinstance(node.value, ast.Dict):
                yield from _texts(dict(zip(map(_text, node.value.keys), node.value.values, strict=True)).get("event"))
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "tell_once":
                yield from _texts(node.args[0])


def _text(node: Any) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _texts(node: Any) -> list[str]:
    return [str(node.value)] if isinstance(node, ast.Constant) else []
