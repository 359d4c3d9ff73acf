"""Check that each database can store a payload, and returns it as it was given."""

from __future__ import annotations

import json
from typing import Any

from django_delayq.exceptions import InvalidPayload

MAX_PAYLOAD_BYTES = 1_000_000
"""Each firing reads and each change writes the whole row, and MySQL accepts no statement of many megabytes."""
MAX_PAYLOAD_DEPTH = 31
"""The number of lists and dicts in each other that MariaDB can parse; the other databases can parse more."""


def check_payload(payload: Any) -> Any:
    """Return `payload` as databases return it (tuples as lists); None stays None.

    PostgreSQL returns floats from 1e16 on as integers, -0.0 as 0.0, and the keys of a dict in another order.

    Raises:
        InvalidPayload: not JSON, a dict key that is not a string, NaN or infinity, a NUL or half a surrogate pair
            (which PostgreSQL refuses, together with the caller's transaction), more than 31 lists and dicts in each
            other (which MariaDB refuses), or more than 1 MB.
    """
    if payload is None:
        return None
    _check_values(payload)
    try:
        text = json.dumps(payload, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPayload(f"The payload is not plain JSON: {error}") from error
    if size > MAX_PAYLOAD_BYTES:
        raise InvalidPayload(
            f"The payload has {size} bytes; at most {MAX_PAYLOAD_BYTES}. Keep big things in rows of your own."
        )
    return json.loads(text)


def _check_values(value: Any, depth: int = 1) -> None:
    """Refuse NUL, and keys that JSON would silently turn into strings: 1 would come back as "1"."""
    if isinstance(value, str) and "\0" in value:
        raise InvalidPayload("The payload holds a NUL character, which PostgreSQL cannot keep.")
    if not isinstance(value, dict | list | tuple):
        return
    if depth > MAX_PAYLOAD_DEPTH:
        raise InvalidPayload(f"The payload is nested more than {MAX_PAYLOAD_DEPTH} deep, which MariaDB cannot keep.")
    for inner in value:
        if isinstance(value, dict):
            if not isinstance(inner, str):
                raise InvalidPayload(f"Keys of the payload must be strings, not {inner!r}.")
            _check_values(value[inner], depth + 1)
        _check_values(inner, depth + 1)
