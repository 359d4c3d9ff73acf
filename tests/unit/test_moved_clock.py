"""The suite can run on another day: `tools/moved_clock.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tools import moved_clock

NOW = datetime(2026, 11, 28, 16, 30, tzinfo=UTC)
SHOW = """
import threading, time
from datetime import datetime, timezone
print(datetime.now(timezone.utc).isoformat())
began, condition = time.monotonic(), threading.Condition()
with condition:
    condition.wait(0.05)
lock = threading.Lock()
lock.acquire()
lock.acquire(timeout=0.05)
print(time.monotonic() - began)
"""


@pytest.mark.parametrize(
    ("day", "moment"),
    [
        ("30d", "2026-12-28T16:30"),
        ("460d", "2028-03-02T16:30"),
        ("leap", "2028-02-29T09:00"),
        ("year", "2026-12-31T23:45"),
        ("forward", "2027-03-28T00:45"),
        ("back", "2027-10-31T00:45"),
    ],
)
def test_each_day_is_the_next_one_of_its_kind(day: str, moment: str) -> None:
    found = moved_clock.DAYS[day](NOW)
    assert found == datetime.fromisoformat(f"{moment}+00:00")
    assert moved_clock.DAYS[day](found) > found, "a day that has just begun is followed by the next one"


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts have the date of the kernel, also if those of the suite do not."""
    for variable in ("LD_PRELOAD", moved_clock.OFFSET):
        monkeypatch.delenv(variable, raising=False)


def shown(**variables: str) -> tuple[datetime, float]:
    """Return the date of a process, and for how long it has waited for two times 0.05 seconds."""
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True)
    date, seconds = done.stdout.split()
    return datetime.fromisoformat(date), float(seconds)


@pytest.mark.usefixtures("today")
def test_an_unknown_day_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(moved_clock.NotMoved, match=r"'tomorrow' is not one of 30d, 460d, leap, year"):
        moved_clock.environment_of("tomorrow", tmp_path)


@pytest.mark.usefixtures("today")
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and gcc")
def test_a_process_has_another_date_and_the_same_durations(tmp_path: Path) -> None:
    date, _ = shown()
    moved, seconds = shown(**moved_clock.environment_of("460d", tmp_path))
    assert moved - date > timedelta(days=459)
    assert 0.09 < seconds < 60
