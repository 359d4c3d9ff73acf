"""Run timeouts in RQ's workers: `DELAYQ = {"EXECUTOR": "django_delayq.contrib.rq.RQExecutor"}`.

`docs/executors.md` describes the setup. RQ's workers must use its JSON serializer: `rq worker -S json delayq`.
"""

from __future__ import annotations

from typing import Any

from rq import Queue
from rq.serializers import JSONSerializer

from django_delayq.conf import ConfigError, get_settings
from django_delayq.contrib.remote import RemoteExecutor, fire
from django_delayq.redis_clients.clients import WORKER, make_client

FIRE = f"{fire.__module__}.{fire.__qualname__}"
FAILURE_SECONDS = 3600
"""RQ keeps a job that failed for so long; its timeouts fire all the same."""


class RQExecutor(RemoteExecutor):
    """Enqueue works in the queue `delayq` of the Redis of `DELAYQ["REDIS"]`.

    A subclass may name another queue, or override `new_queue`. The messages are JSON, because a forged pickle would
    run code.
    """

    queue_name = "delayq"

    def __init__(self, using: str, concurrency: int) -> None:
        self._queue = self.new_queue()
        super().__init__(using, concurrency)

    def new_queue(self) -> Queue:
        """Return the queue, which must use a JSON serializer."""
        source = get_settings().redis
        if source is None:
            raise ConfigError("RQExecutor needs DELAYQ['REDIS']. For another Redis, override new_queue().")
        client: Any = make_client(source, WORKER)
        return Queue(self.queue_name, connection=client, serializer=JSONSerializer)

    def send(self, message: dict[str, Any]) -> None:
        # Without a time limit of RQ's: the policy's own one, Limits(run=...), applies.
        self._queue.enqueue_call(
            FIRE, (message,), timeout=-1, result_ttl=0, failure_ttl=FAILURE_SECONDS, description="django_delayq"
        )
