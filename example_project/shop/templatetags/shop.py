"""Template filters of the shop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django import template
from django.utils import timezone
from django.utils.html import format_html

if TYPE_CHECKING:
    from datetime import datetime, timedelta

register = template.Library()
UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 0.001))


@register.simple_tag
def moment(value: datetime | None) -> str:
    """Render a datetime as a `<time>` element, which a script converts to the time zone of the reader."""
    if value is None:
        return ""
    local = timezone.localtime(value)
    return format_html('<time data-moment datetime="{}">{}</time>', value.isoformat(), f"{local:%d %b %H:%M:%S %Z}")


@register.filter
def span(duration: timedelta) -> str:
    """Return a duration in its largest unit of which it has at least two, such as `30 s` or `90 min`."""
    seconds = max(duration.total_seconds(), 0.0)
    unit, length = next((each for each in UNITS if seconds >= 2 * each[1]), UNITS[-1])
    return f"{seconds / length:.0f} {unit}"


@register.filter
def policy_name(label: str) -> str:
    """Return `cancel_unpaid` for `shop.order.cancel_unpaid`."""
    return label.rpartition(".")[2]
