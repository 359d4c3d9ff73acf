"""One timeout told on its page: what happened as a timeline, what it carries, and what went wrong."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from django_delayq.admin.wording import countdown, time_tag
from django_delayq.models import Timeout
from django_delayq.scheduling.story import NAMES, explain_timeout, precise, told_by, told_reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_delayq.scheduling.story import StoryEvent


def story(row: Timeout) -> SafeString:
    """Every event of this round, oldest first, and one sentence on how things stand."""
    told = explain_timeout(row)
    lines = format_html_join("", "<li>{}</li>", ((_line(event),) for event in told))
    return format_html(
        '<ol class="delayq-story">{}</ol><p class="delayq-outlook"><bdi>{}</bdi></p>',
        lines,
        told.outlook if not row.is_settled else _("Nothing more will happen by itself."),
    )


def _line(event: StoryEvent) -> SafeString:
    name = NAMES.get(event.what, event.what)
    line = format_html('{} <span class="delayq-what">{}</span>', time_tag(event.at), name)
    for part in _parts(event):
        line = format_html("{}, <bdi>{}</bdi>", line, part)
    why = told_reason(event.reason)
    return format_html('{}<q class="delayq-quote"><bdi>{}</bdi></q>', line, why) if why else line


def _parts(event: StoryEvent) -> Iterator[SafeString | str]:
    """What else an event says; a part that is not as it should be is left out, not fatal."""
    if moment := _moment(event.details.get("to")):
        yield format_html(_("to {moment}"), moment=time_tag(moment))
    if "error" in event.details:
        yield f"{event.details['error']}: {event.details.get('message', '')}"
    if isinstance(event.details.get("late"), float):
        yield _("{seconds} s after the deadline").format(seconds=precise(event.details["late"]))
    if event.by:
        yield told_by(event.by)


def _moment(value: Any) -> datetime | None:
    if isinstance(value, datetime) or value is None:
        return value
    try:
        return parse_datetime(str(value))
    except ValueError:
        return None


def payload(row: Timeout) -> SafeString | str:
    """The payload, laid out for reading."""
    if row.payload is None:
        return "-"
    return format_html(
        '<pre class="delayq-raw" dir="ltr" tabindex="0">{}</pre>', json.dumps(row.payload, indent=2, ensure_ascii=False)
    )


def failures(row: Timeout) -> SafeString | str:
    """Each attempt that failed, newest first, with its traceback."""
    told = [
        format_html(
            '<details class="delayq-failure"{}><summary>{} <strong>{}</strong> <bdi>{}</bdi></summary>'
            '<pre class="delayq-raw" dir="ltr" tabindex="0">{}</pre></details>',
            "" if place else " open",
            time_tag(_moment(error.get("at"))),
            error.get("error", ""),
            error.get("message", ""),
            error.get("traceback", ""),
        )
        for place, error in enumerate(reversed(row.errors))
    ]
    return format_html_join("", "{}", ((text,) for text in told)) or "-"


def next_attempt(row: Timeout) -> SafeString | str:
    """When it is tried next, as time and as countdown."""
    if row.state != Timeout.State.PENDING:
        return "-"
    return format_html("{} ({})", time_tag(row.run_at), countdown(row.run_at))
