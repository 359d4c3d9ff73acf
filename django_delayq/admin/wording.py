"""How moments, spans and states are written on the admin's pages; `static/django_delayq/admin.js` does it alike."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext as _

from django_delayq import clock
from django_delayq.models import Timeout
from django_delayq.scheduling.story import precise

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

SIGNS = {"pending": "◷", "firing": "▶", "fired": "✓", "skipped": "↷", "cancelled": "✕", "dead": "!"}
"""A sign of its own for each state: nobody has to tell colours apart."""


def span_words() -> dict[str, str]:
    """The words that spans are made of, for Python and, in this order, for the script."""
    return {
        "later": _("in {span}"),
        "late": _("{span} late"),
        "now": _("now"),
        "days": _("{n} d"),
        "hours": _("{n} h"),
        "minutes": _("{n} min"),
        "seconds": _("{n} s"),
    }


def span(seconds: int) -> str:
    """A length of time in its two largest units; seconds are left out from ten minutes on."""
    words = span_words()
    days, rest = divmod(abs(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    counts = [("days", days), ("hours", hours), ("minutes", minutes)]
    if abs(seconds) < 600:
        counts.append(("seconds", rest))
    first = next((place for place, (_unit, count) in enumerate(counts) if count), len(counts) - 1)
    shown = counts[first : first + 2]
    return " ".join(words[unit].format(n=count) for unit, count in shown if count or len(shown) == 1) or words["now"]


def until(moment: datetime, now: datetime) -> str:
    """`in 12 min`, `3 s late` or `now`."""
    left = (moment - now).total_seconds()
    words = span_words()
    if left > 0:
        return words["later"].format(span=span(math.ceil(left)))
    seconds = math.floor(-left)
    return words["late"].format(span=span(seconds)) if seconds else words["now"]


def local(moment: datetime) -> str:
    """Local time with the seconds that decide."""
    shown = timezone.localtime(moment) if timezone.is_aware(moment) else moment
    return f"{shown:%Y-%m-%d %H:%M:%S}"


def time_tag(moment: datetime | None) -> SafeString | str:
    """A moment as a `<time>` element that names its zone to whoever asks; a dash for none."""
    if moment is None:
        return "-"
    aware = moment if timezone.is_aware(moment) else timezone.make_aware(moment)
    zone = timezone.localtime(aware).tzname()
    return format_html(
        '<time datetime="{}" dir="ltr" title="{} {}">{}</time>',
        aware.astimezone(UTC).isoformat(),
        local(moment),
        zone,
        local(moment),
    )


def countdown(moment: datetime) -> SafeString:
    """`in 12 min`, which the script keeps right by the server's clock. Brings along all that the script needs."""
    now = clock.now()
    return format_html(
        '<bdi class="delayq-left" data-delayq-due="{}" data-delayq-now="{}" data-delayq-words="{}">{}</bdi>',
        clock.to_ms(moment),
        clock.to_ms(now),
        "|".join(span_words().values()),
        until(moment, now),
    )


def pending_until(due_at: datetime, run_at: datetime, attempts: int) -> SafeString:
    """`in 12 min`; of what was put off, `next attempt in 12 min`.

    It was tried and is to be tried again, or its handler snoozes, which counts no attempt: neither is late.
    """
    if run_at > due_at and (attempts or due_at <= clock.now()):
        return format_html("{} {}", _("next attempt"), countdown(run_at))
    return countdown(due_at)


def deadline(row: Timeout) -> SafeString:
    """When the row is due, how long that is from now, and what else there is to say about it."""
    written = time_tag(row.due_at)
    if row.state == Timeout.State.PENDING:
        left = pending_until(row.due_at, row.run_at, row.attempts)
        return format_html('{}<br><span class="delayq-more">{}</span>', written, left)
    if not row.is_settled:
        return format_html('{}<br><span class="delayq-more">{}</span>', written, countdown(row.due_at))
    late = row.lateness()
    if late is None:
        return format_html("{}", written)
    words = _("fired {seconds} s after it").format(seconds=precise(late))
    return format_html('{}<br><bdi class="delayq-more">{}</bdi>', written, words)


def policy_tag(label: str) -> SafeString:
    """The policy's name, and below it the rest of its label."""
    of, _dot, name = label.rpartition(".")
    return format_html('<bdi title="{}">{}</bdi><br><bdi class="delayq-more">{}</bdi>', label, name, of)


def clamped(text: str) -> SafeString:
    """A reason in a list: some lines of it, and all of it on hovering and on the row's own page."""
    return format_html('<bdi class="delayq-more delayq-clamped" title="{}">{}</bdi>', text, text)


def badge(state: str) -> SafeString:
    """The state as a sign, a colour and a word."""
    known = state in Timeout.State.values
    label = Timeout.State(state).label if known else state
    return format_html(
        '<span class="delayq-badge delayq-{}"><span aria-hidden="true">{}</span> {}</span>',
        state if known else "unknown",
        SIGNS.get(state, "?"),
        label,
    )
