"""The tests' settings with SQLite as Django has it: transactions that begin as readers, no WAL, 5 seconds."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

DATABASES["default"]["OPTIONS"] = {}
