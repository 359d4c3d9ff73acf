"""Both protocols of Redis, read by both of redis-py's parsers, through the library's own client."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis._parsers import _HiredisParser, _RESP2Parser, _RESP3Parser

from django_delayq.engine.engine import Engine
from django_delayq.redis_clients.clients import WORKER, make_client
from tests.engine.redis_process import RedisProcess
from tests.engine.test_engine import walk_the_basic_path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("parser", ["hiredis", "python"])
def test_the_basic_path_runs_on_both_protocols_with_both_parsers(
    shared_server: RedisProcess, client: redis.Redis, protocol: int, parser: str
) -> None:
    if parser == "hiredis":
        pytest.importorskip("hiredis")
    made: Any = make_client(f"redis://127.0.0.1:{shared_server.port}/0?protocol={protocol}", WORKER)
    pure = {2: _RESP2Parser, 3: _RESP3Parser}[protocol]
    wanted = _HiredisParser if parser == "hiredis" else pure
    made.connection_pool.connection_kwargs["parser_class"] = wanted
    engine = Engine(made, shards=2)
    walk_the_basic_path(engine)
    connection = made.connection_pool.get_connection()
    assert type(connection._parser) is wanted
    assert int(connection.protocol) == protocol
    made.connection_pool.release(connection)
    engine.close()
