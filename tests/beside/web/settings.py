"""The settings of the tests, with a transaction around each request."""

from __future__ import annotations

from tests.settings import *  # noqa: F403 - settings are names
from tests.settings import DATABASES as USUAL

DATABASES = {"default": {**USUAL["default"], "ATOMIC_REQUESTS": True}}
ROOT_URLCONF = "tests.beside.web.pages"
