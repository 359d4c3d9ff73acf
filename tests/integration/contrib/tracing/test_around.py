"""What `AROUND` names is entered around each call of a handler, and cannot disturb it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.contrib.tracing.conftest import Around
from tests.integration.firing.conftest import MODES, due, fire, state
from tests.integration.firing.handlers import Declare, Log, raising, write
from tests.integration.firing.rows import FIRED, logged, tried, written
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)
INSIDE: ContextVar[tuple[str, ...]] = ContextVar("inside", default=())
noted: list[str] = []


@contextmanager
def entering(name: str) -> Iterator[None]:
    token = INSIDE.set((*INSIDE.get(), name))
    try:
        yield
    finally:
        INSIDE.reset(token)


@contextmanager
def outer(policy: Any, timeouts: Sequence[Timeout]) -> Iterator[None]:
    noted.append(f"{policy.name} {len(timeouts)}")
    try:
        with entering("outer"):
            yield
    except Exception as error:
        noted.append(type(error).__name__)
        raise


def inner(policy: Any, timeouts: Sequence[Timeout]) -> Any:
    return entering("inner")


@pytest.fixture(autouse=True)
def _forget() -> None:
    noted.clear()


@pytest.mark.parametrize("mode", [*MODES, "async"])
def test_each_call_of_a_handler_is_surrounded(declare: Declare, around: Around, mode: str) -> None:
    seen = []

    def handler(target: Any, timeouts: Any) -> None:
        seen.append(INSIDE.get())

    async def later(target: Any, timeouts: Any) -> None:
        handler(target, timeouts)

    around(f"{__name__}.outer", functools.partial(inner))
    policy = declare(Order, later if mode == "async" else handler, name="surrounded", **MODES.get(mode, {}))
    rows = [due(Order.objects.create(), policy) for _ in range(3)]
    assert set(fire(*rows).fired) == {row.pk for row in rows}
    assert seen == [("outer", "inner")] * (1 if mode == "batch" else 3)
    assert noted == (["surrounded 3"] if mode == "batch" else ["surrounded 1"] * 3)
    assert INSIDE.get() == ()


@contextmanager
def swallow(policy: Any, timeouts: Sequence[Timeout]) -> Iterator[None]:
    with suppress(Exception):
        yield


EXPECTED = {ValueError: ("pending", ""), dq.Skip: ("skipped", "handler"), dq.GiveUp: ("dead", "handler")}


@pytest.mark.parametrize("error", EXPECTED)
@pytest.mark.parametrize("mode", ["alone", "outside"])
def test_what_a_handler_raises_passes(declare: Declare, around: Around, error: type[Exception], mode: str) -> None:
    around(outer, swallow)
    policy = declare(Order, raising(error("no")), name="raises", retry=dq.Retry([60]), **MODES[mode])
    row = due(Order.objects.create(), policy)
    fire(row)
    assert state(row) == EXPECTED[error]
    assert [(each["error"], each["message"]) for each in row.errors] == [("ValueError", "no")] * (error is ValueError)
    assert noted == ["raises 1", error.__name__]


class Broken:
    """A function of `AROUND` that raises at one place, also what no `except Exception` catches."""

    def __init__(self, error: type[BaseException], place: str) -> None:
        self.error, self.place = error, place

    def __call__(self, policy: Any, timeouts: Sequence[Timeout]) -> Broken:
        return self.at("made")

    def __enter__(self) -> None:
        self.at("entered")

    def __exit__(self, *args: object) -> None:
        self.at("left")

    def at(self, place: str) -> Broken:
        if place == self.place:
            raise self.error
        return self


BROKEN: dict[str, list[Any]] = {
    "no manager": [lambda policy, timeouts: None],
    "a wrong path": [f"{__name__}.no_such_function"],
    "an error": [Broken(RuntimeError, place) for place in ("made", "entered", "left")],
    "an exit": [Broken(SystemExit, place) for place in ("made", "entered", "left")],
}


@pytest.mark.parametrize(
    ("broken", "mode"),
    [*((each, "alone") for each in BROKEN), *(("an error", each) for each in MODES if each != "alone")],
)
def test_an_error_of_a_function_is_logged_and_nothing_else(
    declare: Declare, around: Around, caplog: Log, broken: str, mode: str
) -> None:
    """The limit lets the handlers run in another thread than the main one, as in a worker."""
    around(*BROKEN[broken], outer)
    limits = dq.Limits(run=timedelta(minutes=1))
    policy = declare(Order, write, name="fires", limits=limits, retry=dq.Retry.never(), **MODES[mode])
    rows = [due(Order.objects.create(), policy) for _ in range(3)]
    caplog.clear()
    assert set(fire(*rows).fired) == {row.pk for row in rows}
    assert [tried(row) for row in rows] == [(FIRED, 1)] * 3
    assert written() == [row.object_id for row in rows]
    assert bool(noted) == (broken != "a wrong path"), "the others are entered"
    [record] = logged(caplog, "around_failed")
    assert record.levelname == "ERROR"
    assert "the handler of testapp.order.fires is called nevertheless" in record.getMessage()
