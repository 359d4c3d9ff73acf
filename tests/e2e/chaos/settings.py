"""The tests' settings, with the chaos's own policies and short durations."""

from __future__ import annotations

import os
from datetime import timedelta

from django_delayq import Retry
from tests import settings as common
from tests.settings import *  # noqa: F403 - a settings module is the names it holds

INSTALLED_APPS = [*common.INSTALLED_APPS, "tests.e2e.chaos"]
# Attempts of other timeouts may be counted while workers are killed, but none may run out of attempts.
DELAYQ = {**common.DELAYQ, "HORIZON": timedelta(seconds=5), "RETRY": Retry([0.1] * 60)}
if executor := os.environ.get("DELAYQ_TEST_EXECUTOR"):
    from tests.e2e.executors.celery_app import app as celery_app  # noqa: F401 - loaded, as by a project's package

    DELAYQ["EXECUTOR"] = executor
