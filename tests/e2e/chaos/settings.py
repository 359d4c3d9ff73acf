"""The tests' settings, with the chaos's own policies and short durations."""

from __future__ import annotations

from datetime import timedelta

from django_delayq import Retry
from tests import settings as common
from tests.settings import *  # noqa: F403 - a settings module is the names it holds

INSTALLED_APPS = [*common.INSTALLED_APPS, "tests.e2e.chaos"]
# Innocents may be charged while workers die around them, but none of them may run out of attempts.
DELAYQ = {**common.DELAYQ, "HORIZON": timedelta(seconds=5), "RETRY": Retry([0.1] * 60)}
