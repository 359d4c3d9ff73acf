"""What each event does to each column of a timeout, played with the public functions: `columns.txt` is the decision.

`python tools/states.py` writes it, and the table of `docs/events.md`: read the difference as a change of behaviour.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_delayq import clock
from django_delayq.models import Timeout
from django_delayq.rounds.columns import DEFAULTS, GROUPS
from tests.integration.rounds.stage import COLUMNS, NEXT, NOW, PENDING, STARTS, Declare, set_stage, values_of
from tests.integration.rounds.table import Verdicts, blocks, lines, merged, verdicts
from tests.integration.rounds.ways import WAYS, Way

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("controls_are_read_again"),
]
FILE = Path(__file__).with_name("columns.txt")
EVENTS = list(dict.fromkeys(way.of for way in WAYS))


@pytest.fixture(scope="module")
def decided() -> Iterator[dict[str, list[str]]]:
    """The lines of each event in the file; with `DELAYQ_TEST_WRITE` they are what this run has found."""
    found = blocks(FILE.read_text().splitlines())
    yield found
    if os.environ.get("DELAYQ_TEST_WRITE"):
        FILE.write_text("".join(f"{event}\n" + "".join(f"{line}\n" for line in found[event]) for event in EVENTS))


def play(way: Way, name: str, declare: Declare, settings: Any) -> Verdicts:
    with clock.set_to(NOW):
        stage = set_stage(declare, settings, way.options, way.start, name)
        way.act(stage)
        row = stage.newest() if way.is_new or way.start == "nothing" else Timeout.objects.get(pk=stage.row.pk)
    assert not way.is_new or row.pk != stage.row.pk
    return verdicts(stage.before, values_of(row))


@pytest.mark.parametrize("event", EVENTS)
def test_all_ways_of_an_event_do_to_each_column_what_is_decided(
    event: str, declare: Declare, settings: Any, decided: dict[str, list[str]]
) -> None:
    ways = [way for way in WAYS if way.of == event]
    found = list(lines(merged([play(way, f"way{number}", declare, settings) for number, way in enumerate(ways)])))
    if os.environ.get("DELAYQ_TEST_WRITE"):
        decided[event] = found
    assert found == decided[event]


def test_each_column_is_in_one_group_and_each_event_in_the_file() -> None:
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(COLUMNS)
    assert list(blocks(FILE.read_text().splitlines())) == EVENTS


def test_each_column_is_filled_by_some_start_that_is_used() -> None:
    """Otherwise "kept" and "reset" would be the same, and a new column would be compared with nothing."""
    assert {way.start for way in WAYS} - {"nothing"} == set(STARTS)
    values = [PENDING, NEXT, *STARTS.values()]
    filled = {name for each in values for name, value in each.items() if value != DEFAULTS[name]}
    by_scheduling = {"id", "policy", "content_type_id", "object_id", "slot", "since_at", "terms"}
    assert {*COLUMNS} - filled - by_scheduling == {"key", "is_guarded"}
