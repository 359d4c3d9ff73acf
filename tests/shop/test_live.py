"""The commands that live through orders in compressed time: with real workers, without, and interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.shop.conftest import Shop, on_sqlite
from tests.shop.synthetic import random_orders
from tests.support.waiting import wait_until
from tools import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_lived_through_two_real_workers_each_order_has_one_outcome(shop: Shop, tmp_path: Path) -> None:
    orders, reviews = random_orders(60).write(tmp_path)
    paths = ("--orders", str(orders), "--reviews", str(reviews))
    output = shop.manage("replay_orders", *paths, "--seconds", "0.3", "--pace", "20", "--check", "--json")
    assert "60 orders: each has one outcome" in output
    counts = json.loads(output.splitlines()[-1])
    assert set(counts["cancel_unpaid"]) <= {"cancelled", "fired", "skipped"}
    assert sum(counts["cancel_unpaid"].values()) == 60


@on_sqlite
def test_a_replay_that_is_told_to_stop_takes_its_workers_with_it(shop: Shop, tmp_path: Path) -> None:
    orders, reviews = random_orders(40).write(tmp_path)
    before = set(processes.descendants())
    replay = shop.start("replay_orders", "--orders", str(orders), "--reviews", str(reviews))
    wait_until(lambda: shop.log().count("The worker serves") == 2)
    workers = set(processes.descendants()) - before - {replay.pid}
    assert len(workers) == 2
    replay.send_signal(signal.SIGTERM)
    assert replay.wait(60) == 128 + signal.SIGTERM
    assert not [pid for pid in workers if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
