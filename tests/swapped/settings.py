"""The settings of the tests with another model of users. A process has one such model, so this needs its own."""

from __future__ import annotations

from tests.settings import *  # noqa: F403 - settings are names
from tests.settings import INSTALLED_APPS as USUAL

INSTALLED_APPS = [*USUAL, "tests.swapped"]
AUTH_USER_MODEL = "swapped.Member"
