"""The launcher of temporary servers: it names missing programs, fails in CI without them, and its servers can crash."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.servers import RedisServer, Server, ServerFailed

ROOT = Path(__file__).resolve().parents[2]
PRINT_LEFT_OUT = "import os; print(os.environ['DELAYQ_TEST_LEFT_OUT'])"


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DELAYQ_TEST_") and name != "CI"}
    command = [sys.executable, "tests/servers.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def answer(server: RedisServer) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(100)


def test_what_is_missing_is_named_and_left_out(tmp_path: Path) -> None:
    done = launch("run", "--only", "chromium", "--", sys.executable, "-c", PRINT_LEFT_OUT, PATH=str(tmp_path))
    assert done.returncode == 0
    assert done.stderr.startswith("servers: left out: chromium (no chromium or ")
    assert done.stdout.startswith("chromium (no chromium or ")


def test_nothing_may_be_missing_in_ci(tmp_path: Path) -> None:
    wanted = ("run", "--only", "chromium,chromedriver", "--", sys.executable, "-c", "print('ran')")
    done = launch(*wanted, PATH=str(tmp_path), CI="true")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("left out") == 3  # both by name, and the rule


def test_a_server_that_is_there_already_is_used_as_it_is_and_the_exit_code_is_the_commands_own() -> None:
    program = "import os; print(os.environ['DELAYQ_TEST_REDIS_URL']); raise SystemExit(7)"
    done = launch("run", "--only", "redis", "--", sys.executable, "-c", program, DELAYQ_TEST_REDIS_URL="redis://mine")
    assert (done.returncode, done.stdout) == (7, "redis://mine\n")


@pytest.mark.usefixtures("redis_url")
def test_a_server_that_crashed_comes_back_at_the_same_address(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        address = server.url
        assert answer(server) == b"+PONG\r\n"
        server.kill()
        with pytest.raises(ConnectionError):
            answer(server)
        server.start()
        assert server.url == address
        assert answer(server) == b"+PONG\r\n"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    class Broken(Server):
        name = "Broken"
        ready_line = "never printed"

        def command(self) -> list[str | Path]:
            return ["sh", "-c", "echo the disk is made of cheese; exit 1"]

    with pytest.raises(ServerFailed, match="Broken did not start.*\n.*the disk is made of cheese"):
        Broken(tmp_path / "broken").start()
