"""Payloads are JSON and nothing else: what cannot come back as it was is refused before anything is written."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from typing import Any

import pytest
from django.db import transaction

from django_delayq import InvalidPayload, schedule_timeout
from django_delayq.models import Timeout
from django_delayq.scheduling.payloads import MAX_PAYLOAD_BYTES, MAX_PAYLOAD_DEPTH
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


class Colour(enum.Enum):
    RED = "red"


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def _nested(depth: int, inner: Any = None) -> list[Any]:
    """Return lists in each other, `depth` of them; the innermost one is empty, or contains `inner`."""
    nested: list[Any] = [] if inner is None else [inner]
    for _ in range(depth - 1):
        nested = [nested]
    return nested


REFUSED = {
    "an object": object(), "a class": Order, "a function": _loop, "bytes": b"x", "a set": {1}, "a model": Order(),
    "a datetime": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "a day": datetime.date(2026, 1, 1),
    "a decimal": decimal.Decimal("1.1"), "a uuid": uuid.uuid4(), "an enum": Colour.RED, "complex": 1j,
    "NaN": float("nan"), "infinity": float("inf"), "minus infinity": [{"a": -float("inf")}],
    "a key that is a number": {1: "a"}, "a key that is None": {None: 1}, "NUL": "a\0b", "NUL in a key": {"\0": 1},
    "half a character": "\ud800", "too long": "x" * MAX_PAYLOAD_BYTES, "too many digits": 10**5000, "a loop": _loop(),
    "too deep": _nested(5000), "one list too deep": _nested(MAX_PAYLOAD_DEPTH + 1),
    "one dict too deep": _nested(MAX_PAYLOAD_DEPTH, {}),
}  # fmt: skip
TAKEN = [
    {}, [], "", 0, False, 1.5, -0.1, 2**70, -(2**63), {"a": [1, {"b": None}]}, "ä 漢 😀 \u2028", {"": {"$ref": 1}},
    _nested(MAX_PAYLOAD_DEPTH), _nested(MAX_PAYLOAD_DEPTH, 1), _nested(MAX_PAYLOAD_DEPTH - 1, {"a": 1}),
    {"__class__": "os.system", "py/object": "os.system", "__reduce__": ["rm"]}, "'; DROP TABLE x; --", "\x01\x1f",
]  # fmt: skip


def test_what_is_no_json_is_refused_and_the_transaction_goes_on() -> None:
    order = Order.objects.create()
    for name, payload in REFUSED.items():
        with transaction.atomic():
            with pytest.raises(InvalidPayload):
                schedule_timeout(order, "remind", hours=1, payload=payload)
            assert not Timeout.objects.exists(), name
            schedule_timeout(order, "remind", hours=1)
            transaction.set_rollback(True)


def test_json_comes_back_as_it_was() -> None:
    for payload in TAKEN:
        row = schedule_timeout(Order.objects.create(), "remind", hours=1, payload=payload)
        row.refresh_from_db()
        assert row.payload == payload and type(row.payload) is type(payload)
