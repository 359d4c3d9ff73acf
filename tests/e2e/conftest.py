"""Fixtures of most tests with real workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from django_delayq.redis_clients import forget_engine
from tests.support.processes import start_logged, start_worker

__all__ = ["start_logged", "start_worker"]


@pytest.fixture(params=["redis", "ledger"])
def source(request: pytest.FixtureRequest, settings: Any) -> Iterator[dict[str, str]]:
    """Run the test twice; yield the variables of a worker with Redis, and of one without."""
    if request.param == "redis":
        request.getfixturevalue("redis_client")
        yield {}
    else:
        settings.DELAYQ = {**settings.DELAYQ, "REDIS": None}
        yield {"WITHOUT_REDIS": "1"}
    forget_engine()
