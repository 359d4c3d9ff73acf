"""Settings of processes whose timeouts are fired by Celery, RQ or the workers of django-tasks.

`DELAYQ_TEST_EXECUTOR` names the executor, and `DELAYQ_TEST_BROKER` the Redis server of its messages.
"""

from __future__ import annotations

import os

from tests.e2e.executors.celery_app import app as celery_app  # noqa: F401 - loaded, as by a project's package
from tests.settings import *  # noqa: F403
from tests.settings import DELAYQ, INSTALLED_APPS

DELAYQ["EXECUTOR"] = os.environ.get("DELAYQ_TEST_EXECUTOR")
INSTALLED_APPS += ["django_tasks_db"]
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": []}}
