"""Run a command on another day: the date of its processes, and of the servers of the tests, is moved by a library.

    DELAYQ_TEST_DAY=460d make test                  the suite in fifteen months
    DELAYQ_TEST_DAY=leap make test STAGES=sqlite    on the next 29 February
    make test-all DAY=back                          everything, in the hour in which Europe's clocks are set back

A test that contains a date passes on the day on which it was written, and fails weeks later, on every machine at once.
The servers move too: a database that is a month behind its clients is a fault, which has tests of its own, and not
another day. Durations stay as they are, because the monotonic clock is not moved.
"""

from __future__ import annotations

import calendar
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
DAY = "DELAYQ_TEST_DAY"
OFFSET = "DELAYQ_CLOCK_OFFSET"


class NotMoved(Exception):
    """The date of processes cannot be moved; the text has the reason."""


def _next(month: int, day: Callable[[int], int], time: str) -> Callable[[datetime], datetime]:
    """Return a function from now to the next `time` (UTC) on a day of `month`: `day` of a year, or 0 if it has none."""

    def moment(now: datetime) -> datetime:
        years = (year for year in range(now.year, now.year + 9) if day(year))
        moments = (datetime.fromisoformat(f"{date(year, month, day(year))}T{time}+00:00") for year in years)
        return next(moment for moment in moments if moment > now)

    return moment


def _last_sunday(month: int) -> Callable[[int], int]:
    return lambda year: max(week[calendar.SUNDAY] for week in calendar.monthcalendar(year, month))


# A run takes less than an hour, so that it has the hour in which Europe's clocks change, and the first one of the year.
DAYS: Mapping[str, Callable[[datetime], datetime]] = {
    "30d": lambda now: now + timedelta(days=30),
    "460d": lambda now: now + timedelta(days=460),
    "leap": _next(2, lambda year: 29 * calendar.isleap(year), "09:00"),
    "year": _next(12, lambda year: 31, "23:45"),
    "forward": _next(3, _last_sunday(3), "00:45"),
    "back": _next(10, _last_sunday(10), "00:45"),
}


def environment_of(day: str, folder: Path) -> dict[str, str]:
    """Return the variables that move a process to `day`, one of `DAYS`; none if it is empty or set already.

    The library is built in `folder`, for which a C compiler is needed. Linux with glibc only.

    Raises:
        NotMoved: There is no such day, or the library could not be built.
    """
    if not day or os.environ.get(OFFSET):
        return {}
    if day not in DAYS:
        raise NotMoved(f"{DAY} = {day!r} is not one of {', '.join(DAYS)}.")
    now = datetime.now(UTC)
    moment = DAYS[day](now)
    library = folder / "moved_clock.so"
    built = subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], capture_output=True, check=False
    )
    if built.returncode != 0:
        raise NotMoved(f"{SOURCE.name} could not be built: {built.stderr.decode(errors='replace')}")
    print(f"servers: this run begins on {moment:%A %Y-%m-%d %H:%M} UTC ({DAY}={day})", file=sys.stderr, flush=True)
    preloaded = " ".join(filter(None, [os.environ.get("LD_PRELOAD", ""), str(library)]))
    return {"LD_PRELOAD": preloaded, OFFSET: str(round((moment - now).total_seconds()))}
