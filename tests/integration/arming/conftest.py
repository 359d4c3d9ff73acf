"""Kinds of policies that the tests of arming share."""

from __future__ import annotations

from typing import Any

SINCE: dict[str, Any] = {"column": "created_at", "function": lambda order: order.created_at}
"""The value of an order from which a policy counts: as the database reads it, and as Python does."""
