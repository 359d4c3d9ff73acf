"""Who did it: a short text that is kept with everything an operator changes."""

from __future__ import annotations

from typing import Final

from django_delayq.ledger.history import clean

LONGEST: Final = 150


def checked_actor(by: str) -> str:
    """`by` as it is kept, such as `admin:alice`, `rest:bob`, `cli:root`, at most 150 characters.

    Raises:
        ValueError: it is no text, or empty: what nobody did cannot be audited.
    """
    if not isinstance(by, str) or not by.strip():
        raise ValueError(f"by= says who does it, such as 'admin:alice', and may not be {by!r}.")
    return clean(by.strip())[:LONGEST]
