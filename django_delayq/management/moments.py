"""Moments and lengths of time as people type them: `2026-03-01T18:00`, `now`, `2h`, `30m ago`, `1d12h`."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from django_delayq import clock

UNITS: Final = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds"}
_LENGTH = re.compile(r"(?:\d+(?:\.\d+)?[wdhms])+\Z")
_PART = re.compile(r"(\d+(?:\.\d+)?)([wdhms])")


def length(text: str) -> timedelta:
    """`90m`, `1h30m`, `2d`. Raises what argparse turns into a message."""
    if not _LENGTH.match(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: 45m, 1h30m, 2d, 1w")
    try:
        return sum((timedelta(**{UNITS[unit]: float(number)}) for number, unit in _PART.findall(text)), timedelta(0))
    except OverflowError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than time goes") from error


def moment(text: str) -> datetime:
    """`now`, `2h` (from now), `30m ago`, or a date and time, in the time zone of the project unless it names one."""
    words = text.strip().lower()
    if words == "now":
        return clock.now()
    head, ago = (words[:-3].strip(), True) if words.endswith("ago") else (words, False)
    try:
        if _LENGTH.match(head):
            return clock.now() - length(head) if ago else clock.now() + length(head)
        found = parse_datetime(text.strip())
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no moment: {error}") from error
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no moment: 2026-03-01T18:00, now, 2h, or '30m ago'")
    if settings.USE_TZ:
        return timezone.make_aware(found) if timezone.is_naive(found) else found
    return timezone.make_naive(found) if timezone.is_aware(found) else found
