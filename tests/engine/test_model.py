"""Random runs of every command beside the model. HYPOTHESIS_PROFILE=nightly runs them for hours."""

from __future__ import annotations

import os
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.model import machine

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
PROFILES = {
    "ci": settings(max_examples=200, stateful_step_count=40, **COMMON),
    "nightly": settings(max_examples=20_000, stateful_step_count=60, **COMMON),
}


@pytest.mark.timeout(0 if PROFILE == "nightly" else None)
def test_any_sequence_of_commands_does_what_the_model_does(client: redis.Redis) -> None:
    run_state_machine_as_test(machine(client), settings=PROFILES[PROFILE])
