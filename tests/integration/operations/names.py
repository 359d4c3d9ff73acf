"""Names that the tests of operations use."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django_delayq import TimeoutPolicy

REMIND, LINGER, UNPAID = (f"testapp.order.{name}" for name in ("remind", "linger", "cancel_unpaid"))
FORGOTTEN = "testapp.order.forgotten"
"""A policy that is not declared."""
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
Declare = Callable[..., TimeoutPolicy[Any]]
PagesOf = Callable[[int], None]
