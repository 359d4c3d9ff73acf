"""`RQExecutor` with a queue on another Redis than that of the library, as a project would define it."""

from __future__ import annotations

import os

import redis
from rq import Queue

from django_delayq.contrib.rq import RQExecutor


class Executor(RQExecutor):
    def new_queue(self) -> Queue:
        connection = redis.Redis.from_url(os.environ["DELAYQ_TEST_BROKER"])
        return Queue(self.queue_name, connection=connection, serializer="json")
