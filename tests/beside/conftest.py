"""The tests in `apps` need the settings of `project`: `test_apps.py` runs them in a process of their own."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("DJANGO_SETTINGS_MODULE") == "tests.beside.project.settings" else ["apps"]
