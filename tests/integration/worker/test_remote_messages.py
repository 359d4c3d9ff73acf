"""What `fire` does with messages that the worker has not sent, or that this process cannot fire."""

from __future__ import annotations

from typing import Any

import pytest

from django_delayq.contrib.remote import fire
from django_delayq.models import Timeout
from tests.support.workers import due_orders

pytestmark = pytest.mark.django_db(transaction=True)

WRONG: list[Any] = [
    None, [], "text", {}, {"policy": 1}, {"policy": "a" * 201}, {"ids": []}, {"ids": "12"}, {"ids": ["1"]},
    {"ids": [True]}, {"ids": [0]}, {"ids": [2**63]}, {"ids": list(range(1, 1002))}, {"suspect": 1}, {"suspect": None},
    {"using": "elsewhere"}, {"using": ["default"]},
]  # fmt: skip


@pytest.mark.parametrize("changes", WRONG, ids=lambda changes: str(changes)[:30])
def test_a_wrong_message_is_refused_with_the_reason(changes: Any) -> None:
    (row,) = due_orders("remind")
    genuine = {"version": 1, "policy": row.policy, "ids": [row.pk], "suspect": False, "using": "default"}
    message = {**genuine, **changes} if changes and isinstance(changes, dict) else changes
    with pytest.raises(ValueError, match="This is not a message of RemoteExecutor: "):
        fire(message)
    fire({**genuine, "new": "in a newer release"})
    assert Timeout.objects.get().state == "fired"


def test_a_message_about_an_undeclared_policy_is_logged(caplog: Any) -> None:
    (row,) = due_orders("remind")
    fire({"policy": "testapp.order.nonsense", "ids": [row.pk], "suspect": False, "using": "default"})
    assert "not declared in this process" in caplog.text
    assert Timeout.objects.get().state == "pending"
