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

DRAWING = """
import io
from types import SimpleNamespace
from rich.console import Console
from django_delayq import get_policies
from shop.replay.display import _rich_table
rows = [(policy.name, *["12345"] * 4, "1234.5 ms", "12345.6 ms") for policy in get_policies()]
console = Console(width=80, file=io.StringIO())
console.print(_rich_table(SimpleNamespace(headline=lambda: "40 orders", rows=lambda: rows)))
"""
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
def test_the_demo_ends_settled_and_consistent(shop: Shop) -> None:
    shop.start_worker()
    options = ("--orders", "12", "--seconds", "0.2", "--pace", "20", "--json-summary")
    summary = json.loads(shop.manage("play_demo", *options).splitlines()[-1])
    assert summary["settled"] is True
    assert summary["consistent"] is True
    assert summary["timeouts"]["notify_trial_expiry"] == {"fired": 12}
    assert summary["late_ms"]["count"] >= 12


@on_sqlite
def test_the_table_of_the_demo_has_whole_names_in_eighty_columns(shop: Shop) -> None:
    drawn = shop.ask("console.file.getvalue()", DRAWING)
    assert max(map(len, drawn.splitlines())) <= 80
    for name in ("remind_late_delivery", "notify_trial_expiry", "late, median", "1234.5 ms", "12345.6 ms"):
        assert name in drawn


@on_sqlite
def test_the_demo_without_a_worker_fails_and_says_what_is_missing(shop: Shop) -> None:
    error = shop.manage("play_demo", "--orders", "2", "--seconds", "0.05", "--patience", "0.5", fails=True)
    assert "Is a worker running?" in error


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
