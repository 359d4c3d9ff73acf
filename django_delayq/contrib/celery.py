"""Run timeouts in Celery's workers: `DELAYQ = {"EXECUTOR": "django_delayq.contrib.celery.CeleryExecutor"}`.

`docs/executors.md` describes the setup. Celery's result backend is not used.
"""

from __future__ import annotations

from typing import Any

from celery import current_app, shared_task

from django_delayq.contrib.remote import RemoteExecutor, fire

# Acknowledged before it runs: a message whose process died is sent again by the worker after a lease, as a suspect.
# Celery itself would deliver it again without that mark, and so kill one process after another.
fire_timeouts = shared_task(name="django_delayq.fire", acks_late=False, ignore_result=True, serializer="json")(fire)


class CeleryExecutor(RemoteExecutor):
    """Send works as the task `django_delayq.fire`, to the queue that `task_routes` gives it.

    The project's Celery app must be loaded in the worker, as `from .celery import app` in the project's package does.
    """

    connect_seconds = 2.0
    """How long to wait for a connection to the broker, and, if that is Redis, for its answers."""

    def __init__(self, using: str, concurrency: int) -> None:
        # Without a limit, kombu waits indefinitely for a broker that is down.
        limits = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
        app = current_app._get_current_object()
        options = {"socket_timeout": self.connect_seconds, **app.conf.broker_transport_options, **limits}
        self._connection = app.connection_for_write(connect_timeout=self.connect_seconds, transport_options=options)
        super().__init__(using, concurrency)

    def send(self, message: dict[str, Any]) -> None:
        try:
            fire_timeouts.apply_async((message,), connection=self._connection, retry=False)
        except Exception:
            self._connection = self._connection.clone()  # not closed: a broker that does not answer would block that
            raise
