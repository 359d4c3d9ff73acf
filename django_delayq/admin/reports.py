"""The report of a policy: how its rounds have ended, as a plot, a table, and CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

from django import forms
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_delayq.admin import render
from django_delayq.admin.actions import banners
from django_delayq.admin.changelist import address
from django_delayq.exceptions import DelayqError
from django_delayq.ledger.rollups import day_of
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.search import NOTHING, Count
from django_delayq.models import PolicyControl, Timeout
from django_delayq.monitoring.reports import (
    MAX_READ,
    Figures,
    InvalidReport,
    Report,
    csv_rows,
    may_count_by,
    policy_report,
)
from django_delayq.policy.policies import registry
from django_delayq.sql.now import database_now

CHART_WIDTH, CHART_HEIGHT = 480, 96
BAR_SHARE: Final = 0.8
"""The part of the width that a bar has: the rest separates it from the next one."""
LABELS_SHOWN: Final = 4
"""The axis of the chart has no room for more days."""
LABEL_WIDTH: Final = 66
"""A bar with less room to its right has no label: it would be cut off at the edge of the drawing."""
PERIODS: Final = ((7, _("7 days")), (30, _("30 days")), (90, _("90 days")), (365, _("12 months")))


class ReportForm(forms.Form):
    """What to count by, and how far back."""

    by = forms.ChoiceField(
        label=_("group by"), choices=(("day", _("day")), ("month", _("month")), ("field", _("field"))), required=False
    )
    field = forms.CharField(label=_("field of the object"), required=False, max_length=200)
    days = forms.TypedChoiceField(label=_("period"), choices=PERIODS, coerce=int)


def report_view(request: HttpRequest, label: str, site: AdminSite) -> HttpResponse:
    """Show the report of the policy `label`, which may be no longer declared; with `?format=csv` as a file."""
    if not request.user.has_perm("django_delayq.view_timeout"):
        raise PermissionDenied
    request.current_app = site.name
    form = ReportForm({"by": "day", "days": 30, **request.GET.dict()})
    error, report = "", None
    if form.is_valid():
        try:
            report = _report(request, label, form.cleaned_data)
        except InvalidReport as invalid:
            error = str(invalid)
    if report is not None and request.GET.get("format") == "csv":
        return _file(report)
    asked = request.GET.copy()
    asked["format"] = "csv"
    context = {
        **site.each_context(request),
        "title": gettext("Report of {policy}").format(policy=label),
        "opts": PolicyControl._meta,
        "list": address(site, "policycontrol_changelist"),
        "form": form,
        "error": error,
        "delayq_banners": banners(request, site, [label]),
        "file": f"?{asked.urlencode()}",
        **({} if report is None else _shown(report)),
    }
    return TemplateResponse(request, "admin/django_delayq/policycontrol/report.html", context)


def _report(request: HttpRequest, label: str, asked: dict[str, Any]) -> Report:
    """Return the report. Raises InvalidReport, Http404 without such a policy, and PermissionDenied for a field."""
    policy, by = registry.get(label), asked["by"] or "day"
    if by == "field":
        by = asked["field"].strip()
        if policy is None or not by:
            raise InvalidReport(gettext("Enter a field of the object, such as channel__region."))
        if not may_count_by(request.user, policy.concrete_model, by):
            raise PermissionDenied
    last = day_of(database_now(database_of(Timeout)))
    first = last - timedelta(days=asked["days"] - 1)
    try:
        return policy_report(label, by=by, first=first.replace(day=1) if by == "month" else first, limit=MAX_READ)
    except InvalidReport as error:
        raise InvalidReport(gettext("{model} has no such field.").format(model=label)) from error
    except DelayqError as error:
        raise Http404 from error


def _file(report: Report) -> HttpResponse:
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{report.policy}-{report.first}-{report.last}.csv"'
    response.write("\ufeff")  # without it, Excel reads UTF-8 as another encoding
    csv.writer(response).writerows(csv_rows(report))
    return response


def _shown(report: Report) -> dict[str, Any]:
    """Return what the template shows of a report."""
    lines = [_line(line) for line in report.lines]
    return {
        "report": report,
        "lines": lines,
        "total": _line(report.total),
        "chart": _chart(report) if report.by in {"day", "month"} else None,
        "counted_until": report.counted_until and render.time_tag(report.counted_until),
        "by_label": {"day": gettext("day"), "month": gettext("month")}.get(report.by, report.by),
    }


def _line(line: Figures) -> dict[str, Any]:
    return {
        **asdict(line),
        "share": "-" if line.share is None else render.percent(line.share * 100),
        "late_p50": render.lag(line.late_p50),
        "late_p99": render.lag(line.late_p99),
        "time_to_event": render.lag(line.time_to_event),
    }


def _chart(report: Report) -> dict[str, Any]:
    lines = {line.name: line for line in report.lines}
    days = (str(report.first + timedelta(days=number)) for number in range((report.last - report.first).days + 1))
    names = list(lines if report.by == "month" else days)
    shown = [lines.get(name, Figures(name)) for name in names]
    in_time, others = ([Count(line.in_time) for line in shown], [Count(line.rounds - line.in_time) for line in shown])
    return chart(names, {"in_time": (gettext("in time"), in_time), "other": (gettext("other rounds"), others)})


def chart(names: Sequence[str], kinds: Mapping[str, tuple[Any, Sequence[Count]]]) -> dict[str, Any]:
    """Return what the template draws: for each name a bar of parts, and its row in the table.

    `kinds`: the titles of the parts and their numbers for each name, the lowest part first.
    """
    totals = [sum(column, NOTHING) for column in zip(*(counts for _, counts in kinds.values()), strict=True)]
    highest, every = max(totals, default=NOTHING), math.ceil(len(names) / LABELS_SHOWN)
    step, bars = CHART_WIDTH / max(len(names), 1), []
    for number, name in enumerate(names):
        top, parts = float(CHART_HEIGHT), []
        for kind, (title, counts) in kinds.items():
            count = counts[number]
            height = max(1.0, count.value * CHART_HEIGHT / highest.value) if count.value else 0.0
            top -= height
            # Strings: the template would localize numbers.
            part = {"kind": kind, "title": title, "y": f"{top:.1f}", "height": f"{height:.1f}", "n": str(count)}
            parts.append(part)
        is_labelled = number % every == 0 and number * step + LABEL_WIDTH <= CHART_WIDTH
        place = {"x": f"{number * step:.1f}", "width": f"{step * BAR_SHARE:.1f}", "is_labelled": is_labelled}
        bars.append({"name": name, "parts": parts, **place})
    shown = [{"kind": kind, "title": title, "total": str(sum(n, NOTHING))} for kind, (title, n) in kinds.items()]
    return {"bars": bars, "kinds": shown, "highest": str(highest), "total": str(sum(totals, NOTHING))}
