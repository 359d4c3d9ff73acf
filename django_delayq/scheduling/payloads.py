"""Payloads are plain JSON that comes back from every supported database as it went in."""

from __future__ import annotations

import json
from typing import Any

from django_delayq.exceptions import InvalidPayload

MAX_BYTES = 1_000_000


def check_payload(payload: Any) -> Any:
    """`payload` as it will be read back (tuples as lists); None stays None.

    Raises:
        InvalidPayload: not JSON, a dict key that is no text, NaN or infinity, a NUL or half a surrogate pair
            (which PostgreSQL refuses, together with the caller's transaction), or more than 1 MB.
    """
    if payload is None:
        return None
    _check(payload)
    try:
        text = json.dumps(payload, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPayload(f"The payload is no plain JSON: {error}") from error
    if size > MAX_BYTES:
        raise InvalidPayload(f"The payload has {size} bytes; at most {MAX_BYTES}. Keep big things in rows of your own.")
    return json.loads(text)


def _check(value: Any, depth: int = 0) -> None:
    """Refuse NUL, and keys that JSON would silently turn into texts: 1 would come back as "1"."""
    if depth > 100:
        raise InvalidPayload("The payload is nested more than 100 deep.")
    if isinstance(value, str) and "\0" in value:
        raise InvalidPayload("The payload holds a NUL character, which PostgreSQL cannot keep.")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InvalidPayload(f"Keys of the payload must be texts, not {key!r}.")
            _check(key, depth + 1)
            _check(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, depth + 1)
