"""Run timeouts as tasks of Django: `DELAYQ = {"EXECUTOR": "django_delayq.contrib.django_tasks.TaskExecutor"}`.

Django 6.0 has tasks itself. For Django 5.2 the package django-tasks has them. `docs/executors.md` describes the setup.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django_delayq.contrib.remote import RemoteExecutor, fire

tasks: Any = import_module("django.tasks" if find_spec("django.tasks") else "django_tasks")


@tasks.task  # type: ignore[untyped-decorator]
def fire_timeouts(message: dict[str, Any]) -> None:
    """Fire the timeouts of a message."""
    fire(message)


class TaskExecutor(RemoteExecutor):
    """Enqueue works as tasks. A subclass may name another backend of the setting `TASKS`, or another queue."""

    backend = "default"
    queue_name = "default"

    def __init__(self, using: str, concurrency: int) -> None:
        self._task = fire_timeouts.using(backend=self.backend, queue_name=self.queue_name)
        super().__init__(using, concurrency)

    def send(self, message: dict[str, Any]) -> None:
        self._task.enqueue(message)
