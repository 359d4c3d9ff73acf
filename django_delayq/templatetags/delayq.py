"""`{% deadline order "cancel_unpaid" as due %}` reads a deadline, `{% countdown due %}` shows it running down."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django import template
from django.db.models import Model
from django.utils import timezone
from django.utils.translation import get_language, gettext

from django_delayq import clock
from django_delayq.scheduling.queries import Countdown, countdown_of

if TYPE_CHECKING:
    from django_delayq.policies import TimeoutPolicy

register = template.Library()
AT_ZERO = ("", "reload")


@register.simple_tag
def deadline(target: Model | None, policy: str | TimeoutPolicy[Any] | None = None, key: str = "") -> Countdown:
    """How the newest round of `policy` for `target` stands: a `Countdown`, true while it is pending.

    One query; none if the object's `TimeoutRelation` was prefetched. Without an object nothing is pending.
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
    """An element that counts down to a pending deadline by the server's clock; nothing if none is pending.

    Args:
        target: what `deadline` gave, a moment, or an object together with `policy` and `key`.
        label: what the time is left for, as screen readers say it.
        done: what it shows afterwards; "time is up" by default.
        at_zero: `"reload"`: the page is loaded again once the deadline has passed. By default the element
            only fires the event `delayq:due`.
        sync: the address of a countdown endpoint, to look there again instead of trusting the page.
        announce: whether screen readers are told, a few times on the way and at the end.
    """
    if at_zero not in AT_ZERO:
        raise template.TemplateSyntaxError(f'countdown: at_zero is "reload" or "", not {at_zero!r}.')
    seen = _seen(target, policy, key)
    if seen.due_at is None or not seen:
        return {"due_at": None}
    return {
        "due_at": seen.due_at,
        "iso": _aware(seen.due_at).astimezone(UTC).isoformat(),
        # Texts: as numbers they would get thousands separators in some languages.
        "due_ms": str(_ms(seen.due_at)),
        "now_ms": str(_ms(seen.now)),
        "language": get_language(),
        "label": label,
        "left": gettext("{time} left"),
        "done": done or gettext("time is up"),
        "at_zero": at_zero,
        "sync": sync,
        "announce": announce,
    }


def _seen(target: Any, policy: str | TimeoutPolicy[Any] | None, key: str) -> Countdown:
    if isinstance(target, Countdown):
        return target
    if isinstance(target, datetime):
        return Countdown(target, "pending", clock.now())
    return deadline(target, policy, key)


def _aware(moment: datetime) -> datetime:
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment)


def _ms(moment: datetime) -> int:
    """Milliseconds since 1970, as scripts count."""
    return round(_aware(moment).timestamp() * 1000)
