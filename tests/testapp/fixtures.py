"""Fixtures that declare policies for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_delayq import TimeoutPolicy, timeout_policy
from django_delayq.arming import receivers
from django_delayq.policies import registry


@pytest.fixture
def declare() -> Iterator[Callable[..., TimeoutPolicy[Any]]]:
    """`declare(Order, name="x", ...)` declares a policy that is forgotten when the test ends.

    `handler=` is what it runs; by default nothing.
    """
    declared: list[TimeoutPolicy[Any]] = []

    def do(model: Any, handler: Callable[..., Any] = lambda obj, timeout: None, **options: Any) -> TimeoutPolicy[Any]:
        policy: TimeoutPolicy[Any] = timeout_policy(model, **options)(handler)
        declared.append(policy)
        receivers.connect()
        return policy

    yield do
    for policy in declared:
        registry.remove(policy)
