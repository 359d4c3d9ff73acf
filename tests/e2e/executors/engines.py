"""Three task queues behind one face: how a test starts their workers, and loses their messages."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection

from tests.engine.redis_process import RedisProcess

TABLE = "django_tasks_database_dbtaskresult"


@dataclass(frozen=True)
class Engine:
    """A task queue whose messages wait in the list `key` of a Redis server."""

    broker: RedisProcess
    executor: str = "django_delayq.contrib.celery.CeleryExecutor"
    key: str = "celery"
    command: tuple[str, ...] = (
        "celery", "-A", "tests.e2e.executors.celery_app", "worker", "-c", "2", "-l", "WARNING",
        "--without-gossip", "--without-mingle", "--without-heartbeat",
    )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return {
            "DJANGO_SETTINGS_MODULE": "tests.e2e.executors.settings",
            "DELAYQ_TEST_EXECUTOR": self.executor,
            "DELAYQ_TEST_BROKER": f"redis://127.0.0.1:{self.broker.port}/0",
        }

    def waiting(self) -> int:
        """Return how many messages no process has received."""
        with self.broker.client() as client:
            return int(client.llen(self.key))

    def lose(self) -> None:
        """Delete the messages that no process has received."""
        with self.broker.client() as client:
            client.delete(self.key)


class TasksEngine(Engine):
    """The database backend of django-tasks."""

    def waiting(self) -> int:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT COUNT(*) FROM {TABLE} WHERE status = 'READY'")
            return int(cursor.fetchone()[0])

    def lose(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"DELETE FROM {TABLE} WHERE status = 'READY'")


def make(name: str, broker: RedisProcess) -> Engine:
    if name == "celery":
        return Engine(broker)
    if name == "rq":
        command = ("rq.cli", "worker", "-S", "json", "-c", "tests.e2e.executors.rq_config", "delayq")
        return Engine(broker, "tests.e2e.executors.own_queue.Executor", "rq:queue:delayq", command)
    polling = ("django", "db_worker", "--interval", "0.05", "--no-startup-delay")
    return TasksEngine(broker, "django_delayq.contrib.django_tasks.TaskExecutor", "", polling)
