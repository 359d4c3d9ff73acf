"""Template tags: `{% deadline order "cancel_unpaid" as due %}` reads a deadline, `{% countdown due %}` shows it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django import template
from django.db.models import Model
from django.utils.translation import get_language, gettext

from django_delayq.contrib.countdown import Countdown, countdown_of
from django_delayq.models import PolicyControl
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.times import clock
from django_delayq.times.lengths import duration_label

register = template.Library()


@register.simple_tag
def deadline(target: Model | None, policy: str | TimeoutPolicy[Any] | None = None, key: str = "") -> Countdown:
    """Return the state of the newest round of `policy` for `target`: a `Countdown`, true while it is pending or held.

    It makes one query, or none if the object's `TimeoutRelation` was prefetched. Without an object nothing is pending.
    """
    if not isinstance(target, Model):
        return Countdown(None, "", clock.now())
    return countdown_of(target, policy, key)


@register.inclusion_tag("django_delayq/countdown.html")
def countdown(
    target: Countdown | datetime | Model | None,
    policy: str | TimeoutPolicy[Any] | None = None,
    key: str = "",
    *,
    label: str = "",
    done: str = "",
    at_zero: str = "",
    sync: str = "",
    announce: bool = True,
) -> dict[str, Any]:
    """Render an element that counts down to a pending deadline by the server's clock; nothing if none is pending.

    While the clock of the timeout is stopped, it shows how much time is left.

    Args:
        target: the result of `deadline`, a datetime, or an object together with `policy` and `key`.
        policy: the policy of an object.
        key: the key of the timeout.
        label: what the time is left for; screen readers announce it.
        done: the text after the deadline; "time is up" by default.
        at_zero: `"reload"` reloads the page after the deadline. By default the element only fires the event
            `delayq:due`.
        sync: the address of a countdown endpoint, which the element asks for changes.
        announce: whether screen readers announce the time left, a few times on the way and at the end.
    """
    if at_zero not in {"", "reload"}:
        raise template.TemplateSyntaxError(f'countdown: at_zero is "reload" or "", not {at_zero!r}.')
    if isinstance(target, datetime):
        target = Countdown(target, "pending", clock.now())
    shown = target if isinstance(target, Countdown) else deadline(target, policy, key)
    if shown.due_at is None or not shown:
        return {"due_at": None}
    return {
        "due_at": shown.due_at,
        "iso": clock.aware(shown.due_at).astimezone(UTC).isoformat(),
        # Strings: some languages would add thousands separators to numbers.
        "due_ms": str(clock.to_ms(shown.due_at)),
        "now_ms": str(clock.to_ms(shown.now)),
        "language": get_language(),
        "label": label,
        "left": gettext("{time} left"),
        "stopped": gettext("stopped, {time} left"),
        "rest_ms": str(1000 * (shown.seconds_left or 0)) if shown.is_stopped else "",
        "rest": duration_label(shown.seconds_left or 0) if shown.is_stopped else "",
        "done": done or gettext("time is up"),
        "at_zero": at_zero,
        "sync": sync,
        "announce": announce,
    }


@register.simple_tag(takes_context=True)
def delayq_overview(context: Any) -> dict[str, Any]:
    """Return what the first page of this app in the admin shows to the visitor; nothing if the site has no policies."""
    site = context["request"].resolver_match.func.admin_site
    overview = getattr(site._registry.get(PolicyControl), "overview", None)
    return overview(context["request"]) if overview else {}
