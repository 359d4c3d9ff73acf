"""What the tests of recovery share with those of workers."""

from tests.integration.worker.conftest import as_in_a_new_process, own_redis, start_worker, with_redis

__all__ = ["as_in_a_new_process", "own_redis", "start_worker", "with_redis"]
