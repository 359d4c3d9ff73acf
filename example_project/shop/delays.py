"""The delays of the shop: `SHOP_DELAYS` divided by `SHOP_SPEED`, or the delays of a replay."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from django.conf import settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import timedelta

_replaced: ContextVar[Mapping[str, timedelta]] = ContextVar("replaced")


def shop_delay(name: str) -> timedelta:
    """Return the delay `name`. It is read each time, so that a change needs no new declaration of the policy."""
    replaced = _replaced.get({})
    if name in replaced:
        return replaced[name]
    delay: timedelta = settings.SHOP_DELAYS[name]
    return delay / settings.SHOP_SPEED


@contextmanager
def delays_set_to(delays: Mapping[str, timedelta]) -> Iterator[None]:
    """Use these delays, undivided, inside the block and in this thread."""
    token = _replaced.set(delays)
    try:
        yield
    finally:
        _replaced.reset(token)
