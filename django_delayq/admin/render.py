"""Render datetimes, durations, states, stories and policies for the admin's pages.

`static/django_delayq/admin.js` renders countdowns in the same way.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django.utils import formats, timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import get_language_bidi, ngettext
from django.utils.translation import gettext as _

from django_delayq.ledger import advances
from django_delayq.ledger.controls import PolicyState
from django_delayq.ledger.error_texts import is_user_code
from django_delayq.models import PolicyControl, Timeout
from django_delayq.policy.options import Limits
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.policy.reads import condition_text
from django_delayq.rounds.memory import moment
from django_delayq.scheduling import story as stories
from django_delayq.times import clock
from django_delayq.times.lengths import UNIT_LABELS, duration_label, length_label
from django_delayq.times.paths import field_at

Stop = PolicyControl.Stop


def duration_parts() -> list[str]:
    """Return the parts of durations, in the order in which the script expects them."""
    return [_("in {span}"), _("{span} late"), _("now"), *map(str, UNIT_LABELS.values())]


def until(at: datetime, now: datetime) -> str:
    """Render the time from `now` until `at`: `in 12 min`, `3 s late` or `now`."""
    left, (later, late, now_label, *_units) = (at - now).total_seconds(), duration_parts()
    seconds = math.ceil(left) if left > 0 else math.floor(-left)
    span = duration_label(seconds - seconds % 60 if seconds >= 600 else seconds)  # as the script does
    return (later if left > 0 else late).format(span=span) if seconds else now_label


def time_tag(at: datetime | None) -> SafeString | str:
    """Render a datetime in local time, to the second, as a `<time>` element; None as a dash."""
    if at is None:
        return "-"
    local = timezone.localtime(clock.aware(at))
    shown, iso = f"{local:%Y-%m-%d %H:%M:%S}", local.astimezone(UTC).isoformat()
    return format_html('<time datetime="{}" dir="ltr" title="{} {}">{}</time>', iso, shown, local.tzname(), shown)


def countdown(at: datetime) -> SafeString:
    """Render `in 12 min` with all that the script needs to update it by the server's clock."""
    now = clock.now()
    return format_html(
        '<bdi class="delayq-left" data-delayq-due="{}" data-delayq-now="{}" data-delayq-words="{}">{}</bdi>',
        clock.to_ms(at),
        clock.to_ms(now),
        "|".join(duration_parts()),
        until(at, now),
    )


def pending_until(due_at: datetime, run_at: datetime, attempts: int) -> SafeString:
    """Render `in 12 min`, or `next attempt in 12 min` if the timeout was deferred.

    A failed timeout waits for its retry, and a handler may snooze, which counts no attempt. Neither is late.
    """
    if run_at > due_at and (attempts or due_at <= clock.now()):
        return format_html("{} {}", _("next attempt"), countdown(run_at))
    return countdown(due_at)


def deadline(row: Timeout) -> SafeString:
    """Render the deadline, the time left, the next step, and for a fired row how late it was."""
    more = ""
    if row.state == Timeout.State.PENDING:
        more = pending_until(row.due_at, row.run_at, row.attempts)
        if row.step:
            more = format_html("{}<br>{}: {}", countdown(row.due_at), row.step, countdown(row.run_at))
    elif not row.is_settled and not row.has_stopped_clock:
        more = countdown(row.due_at)
    elif row.state == Timeout.State.FIRED and row.settled_at is not None:
        late = (row.settled_at - advances.passed_at(row)).total_seconds()  # negative if an operator fired it early
        words = _("fired {duration} after it") if late >= 0 else _("fired {duration} before it")
        more = words.format(duration=duration_label(abs(late)))
    lines = ((line,) for line in (more, "" if row.is_settled else used(row)) if line)
    below = format_html_join("", '<br><bdi class="delayq-more">{}</bdi>', lines)
    return format_html("{}{}", time_tag(row.due_at), below)


def used(row: Timeout) -> str:
    """Render how much of its time a row has used, and has left, unless the countdown beside it shows that.

    Nothing for one that is overdue: its lateness beside it is enough.
    """
    progress = vars(row)["delayq_progress"] if "delayq_progress" in vars(row) else row.progress()
    if progress is None or progress.is_open_time or not progress.running:
        return str(progress or "")
    return "" if progress.share > 1 else _("{percent} used").format(percent=percent(100 * progress.share))


def next_attempt(row: Timeout) -> SafeString | str:
    """Render when a pending row is attempted next, as time and as countdown."""
    if row.state != Timeout.State.PENDING:
        return "-"
    shown = format_html("{} ({})", time_tag(row.run_at), countdown(row.run_at))
    return format_html("{}: {}", row.step, shown) if row.step else shown


def titled(kind: str, object_id: str, name: str = "") -> str:
    """Return how pages name an object of the model `kind`: `order A-2026-0050`; without a name `order 19`."""
    if not name:
        return f"{kind} {object_id}"
    return name if kind.casefold() in name.casefold() else f"{kind} {name}"


def policy_tag(label: str) -> SafeString:
    """Render the policy's name, and below it the rest of its label."""
    of, _dot, name = label.rpartition(".")
    return format_html('<bdi title="{}">{}</bdi><br><bdi class="delayq-more">{}</bdi>', label, name, of)


def reason(stored: str) -> SafeString | str:
    """Render the first lines of a reason; the tooltip has all of it."""
    text = stories.reason_label(stored)
    return format_html('<bdi class="delayq-more delayq-clamped" title="{}">{}</bdi>', text, text) if text else "-"


def last_error_and_reason(row: Timeout) -> SafeString:
    """Render the last error of a failing row, which `changelist.named` has read, and the reason; empty: no text."""
    texts = filter(None, (getattr(row, "delayq_error", ""), row.reason))
    return format_html_join("", "{}", ((reason(text),) for text in texts))


def badge(row: Timeout) -> SafeString:
    """Render the state as a word, with the colour and the sign that `admin.css` has for it."""
    state = "failing" if row.is_failing else row.state
    return format_html('<span class="delayq-badge delayq-{}">{}</span>', state, state_label(row))


def state_label(row: Timeout) -> str:
    """Return the word of the badge."""
    if row.is_paused:
        return _("paused")
    return _("failing") if row.is_failing else str(Timeout.State(row.state).label)


def attempts(row: Timeout) -> SafeString:
    """Render the number of attempts; on a phone, where the column has no heading, with the word, or nothing for 0."""
    if not row.attempts:
        return format_html('<span class="delayq-none">{}</span>', "0")
    word = ngettext("attempt", "attempts", row.attempts)
    return format_html('<bdi>{} <span class="delayq-unheaded">{}</span></bdi>', str(row.attempts), word)


def story(row: Timeout, values: str = "") -> SafeString:
    """Render every event of this round, oldest first, and one sentence about the present.

    `values` are those of the object that the condition reads, if the round ended because it did not hold any more.
    """
    events = stories.explain_timeout(row)
    now = format_html("<br>{} <code>{}</code>", _("The object has now:"), values) if values else ""
    if events.deadline:
        now = format_html("{}<br>{}", now, events.deadline)
    return format_html(
        '<ol class="delayq-story">{}</ol><p class="delayq-outlook" dir="auto">{}{}</p>',
        format_html_join("", '<li><div dir="auto">{}</div></li>', ((_event(event),) for event in events)),
        _("This timeout is settled.") if row.is_settled else isolated(events.outlook),
        now,
    )


def isolated(text: str) -> str:
    """Return `text` with marks around its datetimes, which would be reversed after letters that run right to left."""
    return re.sub(r"\d{4}-\d\d-\d\d [\d:.]*\d", "\u2066\\g<0>\u2069", text) if get_language_bidi() else text


def _event(event: stories.StoryEvent) -> SafeString:
    # &#32;: the theme grappelli strips spaces between tags.
    line = format_html('{}&#32;<span class="delayq-what">{}</span>', time_tag(event.at), event.name)
    line += format_html_join("", ", <bdi>{}</bdi>", ((part,) for part in event.parts(format_html, time_tag)))
    reason = stories.reason_label(event.reason)
    return format_html('{}<q class="delayq-quote"><bdi>{}</bdi></q>', line, reason) if reason else line


def payload(row: Timeout) -> SafeString | str:
    """Render the payload as indented JSON."""
    if row.payload is None:
        return "-"
    text = json.dumps(row.payload, indent=2, ensure_ascii=False)
    return format_html('<pre class="delayq-raw" dir="ltr" tabindex="0">{}</pre>', text)


def failures(row: Timeout) -> SafeString | str:
    """Render each failed attempt with its traceback, newest first."""
    details = (
        '<details class="delayq-failure"{}><summary>{}&#32;<strong>{}</strong>&#32;<bdi>{}</bdi></summary>'
        '<div class="delayq-raw delayq-trace" dir="ltr" tabindex="0"><pre>{}</pre></div></details>'
    )
    values = (
        (time_tag(moment(error["at"])), error.get("error", ""), error.get("message", ""), trace(error))
        for error in reversed(row.errors)
    )
    return format_html_join("", details, ((" open" if not n else "", *each) for n, each in enumerate(values))) or "-"


def trace(error: dict[str, Any]) -> str:
    """Return the traceback of a failed attempt from the first frame of the project on; all of it if there is none."""
    text = str(error.get("traceback", ""))
    head, *frames = re.split(r'^(?=  File ")', text, flags=re.MULTILINE)
    for number, frame in enumerate(frames):
        if is_user_code(frame.split('"')[1]):
            return "".join([head, *frames[number:]])
        if re.search(r"^\S", frame, flags=re.MULTILINE):  # the message of the first exception in a chain
            break
    return text


def in_force(state: PolicyState) -> dict[str, Any]:
    """Render what is declared and in force for a policy, by the names that the templates use."""
    policy, after = state.policy, state.policy.after
    if after is None:
        declared = _("none: each call sets its own")
    else:
        declared = _("depends on the object") if policy.fixed_length is None else length_label(policy.fixed_length)
    changed = _("{delay} (declared: {declared})")  # by an operator
    present = declared if state.length is None else length_label(state.length)
    since = _("the time of scheduling") if policy.since is None else policy.since
    return {
        "model_label": policy.model._meta.label,
        "delay": declared if state.after is None else changed.format(delay=present, declared=declared),
        "counts_from": since if isinstance(since, str) else getattr(since, "__qualname__", str(since)),
        "condition": _("none") if policy.when is None else condition_text(policy.when),
        "guards": guard_rails(state),
        "stopped": stop(state),
    }


def followed_columns(policies: Iterable[TimeoutPolicy[Any]]) -> list[str]:
    """Render for each policy whose deadlines follow a column that people edit, that an edit replaces a moved deadline.

    The column itself is not moved. A column with the time of creation or of the last save is not edited.
    """
    words = _(
        "Deadlines of {policy} follow the field “{field}” of the object, which does not move with them. "
        "The next edit of that field sets the deadline again, and what you do here is lost."
    )
    found = []
    for policy in dict.fromkeys(policies):
        if isinstance(policy.since, str) and policy.fixed_length is not None:
            field = field_at(policy.model, policy.since)
            if getattr(field, "editable", False):
                found.append(words.format(policy=policy.label, field=policy.since))
    return found


def stop(state: PolicyState) -> str:
    """Render why the policy fires nothing now, since when and until when; empty if it is not stopped."""
    if not state.is_stopped:
        return ""
    reasons = {
        Stop.PAUSED: _("Paused since {since}."),
        Stop.HELD: _("On hold since {since}. Resuming it moves the deadlines by the duration of the hold."),
        Stop.RELEASING: _("Being released: its deadlines are being moved."),
    }
    parts: list[str] = [format_html(reasons[Stop(state.stop)], since=time_tag(state.stopped_at))]
    if state.until is not None:
        again = _("Resumes automatically at {time}, {left}.")
        parts.append(format_html(again, time=time_tag(state.until), left=countdown(state.until)))
    parts.append(
        _("By {who}: {reason}").format(who=stories.operator_label(state.by), reason=stories.reason_label(state.reason))
    )
    return format_html_join(" ", "{}", ((part,) for part in parts))


def guard_rails(state: PolicyState) -> list[tuple[str, str]]:
    """Render the guard rails in force, and those that operators have switched off: the name, and what it does."""
    late, brake = state.late, state.brake
    texts = dict.fromkeys(("late", "brake", "shadow"), "")
    if late is not None:
        words = {
            "skip": _("skipped if it would fire more than {delay} late"),
            "dead": _("dead if it would fire more than {delay} late"),
            "fire": _("fires also if it is more than {delay} late"),
        }
        texts["late"] = words[late.then].format(delay=length_label(late.after))
    if brake is not None:
        text = ngettext(
            "pauses after more than {n} firing in {delay}", "pauses after more than {n} firings in {delay}", brake.most
        )
        texts["brake"] = text.format(n=brake.most, delay=length_label(brake.per))
    if state.shadow:
        text = _("{share} of the objects are skipped, and nothing fires for them")
        texts["shadow"] = text.format(share=percent(state.shadow))
    names = {"late": _("Late"), "brake": _("Brake"), "shadow": _("Shadow mode")}
    found = []
    for guard, text in texts.items():
        if actor := state.set_by(guard):
            found.append((names[guard], _("{value} (set by {who})").format(value=text or _("off"), who=actor)))
        elif text:
            found.append((names[guard], _("{value} (declared)").format(value=text)))
    return found + _limits(state.policy.limits or Limits())


def _limits(limits: Limits) -> list[tuple[str, str]]:
    """Render the limits of a policy, which only its declaration sets."""
    found = []
    if limits.run is not None:
        found.append((_("Longest call"), length_label(limits.run)))
    if limits.rate is not None:
        words = ngettext("{n} attempt in {delay}", "{n} attempts in {delay}", limits.rate.count)
        rate = words.format(n=limits.rate.count, delay=length_label(limits.rate.per))
        if limits.rate.by is not None:
            rate = _("{rate}, for each value of {column}").format(rate=rate, column=limits.rate.by)
        found.append((_("Highest rate"), rate))
    if limits.snoozes is not None:
        found.append((_("Most snoozes"), str(limits.snoozes)))
    if limits.total is not None:
        found.append((_("Furthest move"), length_label(limits.total)))
    return found


def percent(number: float) -> str:
    """Render a percentage: whole, or to a tenth."""
    return _("{n}%").format(n=formats.number_format(round(number, 1)))  # which would cut decimals off


def lag(seconds: float | None) -> str:
    """Render a lag in milliseconds or seconds."""
    if seconds is None:
        return "-"
    if abs(seconds) < 1:
        return _("{n} ms").format(n=f"{seconds * 1000:.0f}")
    return duration_label(round(seconds, 1))
