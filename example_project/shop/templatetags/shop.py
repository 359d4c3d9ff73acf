"""Template filters of the shop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django import template
from django.utils import timezone
from django.utils.html import format_html

if TYPE_CHECKING:
    from datetime import datetime

register = template.Library()


@register.simple_tag
def moment(value: datetime | None) -> str:
    """Render a datetime as a `<time>` element, which a script converts to the time zone of the reader."""
    if value is None:
        return ""
    local = timezone.localtime(value)
    return format_html('<time data-moment datetime="{}">{}</time>', value.isoformat(), f"{local:%d %b %H:%M:%S %Z}")


@register.filter
def policy_name(label: str) -> str:
    """Return `cancel_unpaid` for `shop.order.cancel_unpaid`."""
    return label.rpartition(".")[2]
