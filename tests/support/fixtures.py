"""Fixtures for tests of all rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from django_delayq import TimeoutPolicy, timeout_policy
from django_delayq.policy.policies import registry
from tests.support.waiting import Steady

if TYPE_CHECKING:
    from pytest_django import Settings

    from tests.testapp.models import Order


@pytest.fixture
def declare() -> Iterator[Callable[..., TimeoutPolicy[Any]]]:
    """`declare(Order, name="x", ...)` declares a policy that is forgotten when the test ends.

    `handler=` is what it runs; by default nothing.
    """
    declared: list[TimeoutPolicy[Any]] = []

    def do(model: Any, handler: Callable[..., Any] = lambda obj, timeout: None, **options: Any) -> TimeoutPolicy[Any]:
        policy: TimeoutPolicy[Any] = timeout_policy(model, **options)(handler)
        declared.append(policy)
        return policy

    yield do
    for policy in declared:
        registry.remove(policy)


@pytest.fixture
def order() -> Order:
    """An unpaid order for which no timeout is armed, because it has no `created_at`."""
    from tests.testapp.models import Order  # not before the apps are loaded: this module is a plugin

    return Order.objects.create(status="unpaid")


@pytest.fixture
def own_kinds() -> Iterator[None]:
    """For tests that create content types: Django keeps the rolled back ones by ids that later ones get again."""
    from django.contrib.contenttypes.models import ContentType

    ContentType.objects.clear_cache()
    yield
    ContentType.objects.clear_cache()


@pytest.fixture
def steady() -> Steady:
    """A monotonic clock that only the test moves."""
    return Steady()


@pytest.fixture
def without_redis(settings: Settings) -> None:
    """`DELAYQ["REDIS"]` is None: workers poll the ledger."""
    settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}


@pytest.fixture
def controls_are_read_again() -> Iterator[None]:
    """Let neither the test nor the next one see stops, guard rails or an engine that this process knows from before."""
    from django_delayq.ledger.controls import stop_cache  # not before the apps are loaded: a plugin
    from django_delayq.redis_clients import forget_engine

    stop_cache.forget()
    yield
    stop_cache.forget()
    forget_engine()


@pytest.fixture(params=["redis", "ledger"])
def source(request: pytest.FixtureRequest, settings: Settings) -> Iterator[str]:
    """Run the test twice: with Redis, and without."""
    from django_delayq.redis_clients import forget_engine  # not before the settings are loaded: a plugin

    if request.param == "redis":
        request.getfixturevalue("redis_client")
    else:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
    yield request.param
    forget_engine()
