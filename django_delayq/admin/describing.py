"""A policy in words: its condition, its delay, its handler, and what operators have put in force for it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import Q
from django.utils import formats
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_delayq.admin.wording import countdown, span, time_tag
from django_delayq.models import PolicyControl

if TYPE_CHECKING:
    from django_delayq.ledger.controls import PolicyState
    from django_delayq.policies import TimeoutPolicy

Stop = PolicyControl.Stop


def condition(policy: TimeoutPolicy[Any]) -> str:
    """`when`, as somebody would say it who reads Django's look-ups."""
    if policy.when is None:
        return _("none")
    return _told(policy.when) or _("always")


def _told(node: Any) -> str:
    if not isinstance(node, Q):
        if isinstance(node, tuple):
            value = getattr(node[1], "value", node[1])  # a member of an enumeration reads better as what it stands for
            return f"{node[0]} = {value!r}"
        return str(node)
    word = {"OR": _("or"), "XOR": _("either, or")}.get(node.connector, _("and"))
    parts = [
        f"({_told(child)})" if isinstance(child, Q) and len(child) > 1 else _told(child) for child in node.children
    ]
    joined = f" {word} ".join(part for part in parts if part)
    if not node.negated or not joined:
        return joined
    return _("not ({condition})").format(condition=joined)


def length(delay: timedelta) -> str:
    """A delay in its two largest units, and more of it where that is not all."""
    seconds = delay.total_seconds()
    shown = span(int(seconds))
    if _is_exactly(delay):
        return shown
    counted = int(seconds) if seconds.is_integer() else 2  # a fraction: no language counts it as one or as many
    rest = ngettext("{n} second", "{n} seconds", counted).format(
        n=formats.number_format(float(f"{seconds:.6f}")) if seconds % 1 else f"{seconds:.0f}"
    )
    return f"{shown} ({rest})"


def _is_exactly(delay: timedelta) -> bool:
    """Whether the two largest units say all of it."""
    seconds, part = divmod(delay, timedelta(seconds=1))
    if part or seconds == 0:
        return seconds == 0 and not part
    units = (86400, 3600, 60, 1)
    first = next(place for place, unit in enumerate(units) if seconds >= unit)
    smallest = units[min(first + 1, 3)]
    return seconds % smallest == 0 and (seconds < 600 or smallest >= 60 or seconds % 60 == 0)


def declared_delay(policy: TimeoutPolicy[Any]) -> str:
    """`after`, as it is declared."""
    if policy.after is None:
        return _("none: each scheduling names its own")
    if isinstance(policy.after, timedelta):
        return length(policy.after)
    return _("differs from object to object")


def delay_in_force(state: PolicyState) -> str:
    """The delay that holds now; where operators have changed it, the declared one beside it."""
    declared = declared_delay(state.policy)
    if state.after is None:
        return declared
    return _("{delay} (declared: {declared})").format(delay=length(state.after), declared=declared)


def handler(policy: TimeoutPolicy[Any]) -> str:
    """The handler's dotted path."""
    name = getattr(policy.handler, "__qualname__", type(policy.handler).__qualname__)
    return f"{getattr(policy.handler, '__module__', '?')}.{name}"


def counts_from(policy: TimeoutPolicy[Any]) -> str:
    """`since`, as it is declared."""
    if policy.since is None:
        return _("the moment of scheduling")
    return policy.since if isinstance(policy.since, str) else getattr(policy.since, "__qualname__", str(policy.since))


def stopped(state: PolicyState) -> str:
    """Why nothing of it fires now, since when and until when; empty: it fires."""
    if not state.is_stopped:
        return ""
    words = {
        Stop.PAUSED: _("Paused since {since}."),
        Stop.HELD: _("Held since {since}: deadlines move by the length of the hold when it is released."),
        Stop.RELEASING: _("Being released: its deadlines are moved, and then it goes on."),
    }[Stop(state.stop)]
    told = format_html(words, since=time_tag(state.stopped_at))
    if state.until is not None:
        told = format_html(
            _("{told} Goes on by itself {moment}, {left}."),
            told=told,
            moment=time_tag(state.until),
            left=countdown(state.until),
        )
    who = _("By {who}: {reason}").format(who=state.by, reason=state.reason)
    return format_html("{} {}", told, who)


def seconds(value: float | None) -> str:
    """A lag."""
    if value is None:
        return "-"
    return (
        _("{n} ms").format(n=f"{value * 1000:.0f}")
        if abs(value) < 1
        else _("{n} s").format(n=formats.number_format(round(value, 1), 1))
    )
