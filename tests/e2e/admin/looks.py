"""The shop's settings in another language (`DELAYQ_TEST_LANGUAGE`), or with a theme (`DELAYQ_TEST_THEME`)."""

from __future__ import annotations

import os

from config.settings import *  # noqa: F403
from config.settings import INSTALLED_APPS

LANGUAGE_CODE = os.environ.get("DELAYQ_TEST_LANGUAGE", "en")
INSTALLED_APPS = [*os.environ.get("DELAYQ_TEST_THEME", "").split(), *INSTALLED_APPS]
