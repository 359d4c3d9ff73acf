"""Commands end with no UnicodeEncodeError, whatever the encoding of their output has."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import Timeout
from tests.integration.commands.test_verbs import REMIND
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

KEY, REASON = "Bücher 中 😀", "übergroß 訂單 😀"


@pytest.fixture
def row(order: Order) -> Timeout:
    operations.pause(REMIND, by="admin:zoë", reason=REASON)
    return dq.schedule_timeout(order, "remind", minutes=5, key=KEY, reason=REASON, payload={"note": REASON})


def said(encoding: str, *arguments: str) -> str:
    """Return the output of a command to streams with this encoding, which accept nothing else."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
    call_command(*arguments, stdout=streams[0], stderr=streams[1])
    for stream in streams:
        stream.flush()
    binary: Any = streams[0].buffer
    text: str = binary.getvalue().decode(encoding)
    return text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize(
    "command",
    [
        ("delayq_list",),
        ("delayq_explain", "--id", "{id}"),
        ("delayq_status",),
        ("delayq_policies",),
        ("delayq_resume", REMIND, "--dry-run"),
        ("delayq_cancel", "--id", "{id}", "--reason", REASON),
    ],
    ids=lambda command: command[0],
)
def test_a_letter_that_the_output_does_not_have_is_escaped(
    row: Timeout, encoding: str, command: tuple[str, ...]
) -> None:
    text = said(encoding, *(part.format(id=row.pk) for part in command))
    assert text
    if encoding == "utf-8":
        assert "\\u" not in text
    elif command[0] in {"delayq_list", "delayq_explain", "delayq_status", "delayq_resume"}:
        assert "\\u8a02" in text
        assert ("\\xfc" in text) is (encoding == "ascii")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_remains_json(row: Timeout, encoding: str) -> None:
    (found,) = json.loads(said(encoding, "delayq_list", "--json"))
    assert (found["key"], found["reason"], found["payload"]) == (KEY, REASON, {"note": REASON})
    assert json.loads(said(encoding, "delayq_explain", "--id", str(row.pk), "--json"))
    assert json.loads(said(encoding, "delayq_status", "--json"))


def test_an_error_is_printed_too(row: Timeout, monkeypatch: pytest.MonkeyPatch) -> None:
    from django_delayq.management.commands.delayq_cancel import Command

    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    with pytest.raises(SystemExit):
        Command(stderr=stream).run_from_argv(["manage.py", "delayq_cancel", "--model", "中.文"])
    stream.flush()
    binary: Any = stream.buffer
    assert b"\\u4e2d" in binary.getvalue()


@pytest.mark.parametrize("text", ["caf\udce9", "a\0b", "\ud800"])
@pytest.mark.parametrize(
    "command",
    [
        ("delayq_list", "--key"),
        ("delayq_list", "--search"),
        ("delayq_list", "--queue"),
        ("delayq_cancel", "--model", "testapp.order", "--object"),
        ("delayq_pause",),
        ("delayq_retire",),
        ("delayq_explain", "testapp.order"),
        ("delayq_worker", "--burst", "--queue"),
        ("delayq_prune", "--policy"),
    ],
    ids=lambda command: "".join(command),
)
def test_an_option_that_is_not_text_is_refused(row: Timeout, command: tuple[str, ...], text: str) -> None:
    with pytest.raises(CommandError, match="is not text in the encoding of this shell") as refused:
        said("utf-8", *command, text)
    assert refused.value.returncode == 2
    row.refresh_from_db()
    assert row.state == "pending"


def test_a_reason_that_is_not_text_is_stored_without_what_is_not(row: Timeout) -> None:
    said("ascii", "delayq_cancel", "--id", str(row.pk), "--reason", "caf\udce9")
    row.refresh_from_db()
    assert row.reason == "caf?"


def test_the_first_screen_of_a_worker_is_printed_too(
    row: Timeout, settings: Any, declare: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    declare(Order, name="remind_again", queue="почта")
    assert "\\u043f" in said("ascii", "delayq_worker", "--burst")


def test_the_output_of_a_program_is_its_own_stream(do: Callable[..., Any], row: Timeout) -> None:
    assert KEY in do("delayq_list").out
