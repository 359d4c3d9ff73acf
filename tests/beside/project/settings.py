"""The settings of the tests, with other apps and another model of users. `tests/beside/test_apps.py` runs them."""

from __future__ import annotations

from tests.settings import *  # noqa: F403 - settings are names
from tests.settings import INSTALLED_APPS as USUAL

INSTALLED_APPS = [*USUAL, "simple_history", "import_export", "reversion", "safedelete", "tests.beside.project"]
AUTH_USER_MODEL = "project.Person"
ROOT_URLCONF = "tests.beside.project.urls"
