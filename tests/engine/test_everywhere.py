"""Many steps and many shards on every kind of Redis. Whatever takes `virtual` runs there too."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from django_delayq.engine.engine import Engine
from django_delayq.engine.scripts import Client
from tests.engine.model import machine
from tests.engine.test_engine import walk_the_basic_path
from tests.engine.test_model import COMMON

FEW = settings(max_examples=6, stateful_step_count=25, **COMMON)


@pytest.mark.parametrize("shards", [1, 8])
def test_the_basic_path_runs_everywhere(anywhere: Client, shards: int) -> None:
    engine = Engine(anywhere, shards=shards)
    walk_the_basic_path(engine)
    engine.close()


def test_the_model_holds_everywhere(anywhere: Client) -> None:
    run_state_machine_as_test(machine(anywhere), settings=FEW)
