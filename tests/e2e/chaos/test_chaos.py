"""About a minute of chaos: nothing lost, doubled, early or after its cancel. `make chaos MINUTES=30` for longer."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import pytest

from django_delayq.firing.handler import CHECKPOINTS
from tests.e2e.chaos import faults
from tests.e2e.chaos.run import run
from tools.servers import PostgresServer, RedisServer

pytestmark = pytest.mark.dialect

SECONDS = 30.0
LEAST_TIMEOUTS = 40
"""A fiftieth of what two busy cores do in that time: so much happens beside any load."""


@pytest.fixture
def servers_of_its_own() -> None:
    """Run in one stage of the suite only, because it always starts its own PostgreSQL."""
    if os.environ.get("DELAYQ_TEST_DB") != "postgresql":
        pytest.skip("the chaos runs in the stage of PostgreSQL")
    missing = PostgresServer.missing() or RedisServer.missing()
    if missing and os.environ.get("CI") == "true":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


@pytest.mark.slow
@pytest.mark.usefixtures("servers_of_its_own")
def test_under_all_faults_every_accepted_timeout_settles_exactly_once(capsys: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(10**9)
    with capsys.disabled():
        sys.stdout.write(f"\nseed {seed}\n")
    # Not pytest's own folder, which it keeps to itself: the database has another account.
    with tempfile.TemporaryDirectory(prefix="delayq-chaos-") as folder:
        result = run(Path(folder), seed, SECONDS)
    with capsys.disabled():
        sys.stdout.write(f"{result}\n")
    assert [str(violation) for violation in result.violations] == []
    for server in ("worker", "redis", "postgres"):
        kinds = [name for name in result.faults if name.startswith(server)]
        assert len(kinds) > 1, f"of the faults of {server} only these have happened: {kinds}"
    assert sum(result.cuts.values()) > 5, "hardly any connection was cut"
    assert result.by_celery, "Celery has fired nothing"
    assert result.ends["refused"] > 0, "no worker of another installation has tried to start"
    assert len(result.evidence.ledger) > LEAST_TIMEOUTS, "too little has happened to prove anything"
    assert len(result.evidence.effects) > LEAST_TIMEOUTS / 2, "too little has fired to prove anything"


def test_the_steps_at_which_workers_die_are_those_of_a_firing() -> None:
    """But those of what its policies do not do: to fail, and to ask first."""
    assert set(faults.STEPS) == set(CHECKPOINTS) - {"asked", "undone", "recorded"}
