"""The settings of the tests where psycopg 3 is not installed, so that Django uses psycopg2."""

from __future__ import annotations

import sys
from typing import Any

modules: dict[str, Any] = sys.modules
modules["psycopg"] = None  # importing it raises ImportError

from tests.settings import *  # noqa: E402, F403 - settings are names
