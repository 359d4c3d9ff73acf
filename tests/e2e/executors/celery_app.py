"""The Celery app of the tests, as the `celery.py` of a project."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("tests", broker=os.environ.get("DELAYQ_TEST_BROKER"), include=["django_delayq.contrib.celery"])
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
