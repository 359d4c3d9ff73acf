"""What `AROUND` names is entered around each call of a handler, and cannot disturb it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.firing.conftest import FIRED, MODES, PENDING, Declare, due, fire, logged, raising, state, tried
from tests.integration.firing.limits import LIMITS, RETRY, compute, overrun
from tests.integration.tracing.conftest import Around
from tests.testapp.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)
INSIDE: ContextVar[tuple[str, ...]] = ContextVar("inside", default=())
noted: list[str] = []


@contextmanager
def outer(policy: Any, timeouts: Sequence[Timeout]) -> Iterator[None]:
    token = INSIDE.set((*INSIDE.get(), "outer"))
    noted.append(f"{policy.name} {len(timeouts)}")
    try:
        yield
    except Exception as error:
        noted.append(type(error).__name__)
        raise
    else:
        noted.append("returned")
    finally:
        INSIDE.reset(token)


@contextmanager
def inner(policy: Any, timeouts: Sequence[Timeout]) -> Iterator[None]:
    token = INSIDE.set((*INSIDE.get(), "inner"))
    try:
        yield
    finally:
        INSIDE.reset(token)


@pytest.fixture(autouse=True)
def _forget() -> None:
    noted.clear()


@pytest.mark.parametrize("mode", MODES)
def test_each_call_of_a_handler_is_surrounded(declare: Declare, around: Around, mode: str) -> None:
    seen = []

    def handler(target: Any, timeouts: Any) -> None:
        seen.append(INSIDE.get())

    around(f"{__name__}.outer", inner)
    policy = declare(Order, handler, name="surrounded", **MODES[mode])
    rows = [due(Order.objects.create(), policy) for _ in range(3)]
    assert set(fire(*rows).fired) == {row.pk for row in rows}
    calls = 1 if mode == "batch" else 3
    assert seen == [("outer", "inner")] * calls
    assert noted == ["surrounded 3", "returned"] if mode == "batch" else ["surrounded 1", "returned"] * 3
    assert INSIDE.get() == ()


class Unhashable:
    __hash__: Any = None

    def __call__(self, policy: Any, timeouts: Sequence[Timeout]) -> Any:
        return outer(policy, timeouts)


def test_an_object_that_can_be_called_is_accepted(order: Order, declare: Declare, around: Around) -> None:
    around(Unhashable(), functools.partial(outer))
    fire(due(order, declare(Order, name="surrounded")))
    assert noted == ["surrounded 1", "surrounded 1", "returned", "returned"]


def test_an_async_handler_is_surrounded(order: Order, declare: Declare, around: Around) -> None:
    async def handler(obj: Order, timeout: Timeout) -> None:
        await Effect.objects.acreate(what=" ".join(INSIDE.get()), object_id=obj.pk)

    around(outer, inner)
    fire(due(order, declare(Order, handler, name="asynchronous")))
    assert Effect.objects.get().what == "outer inner"


@pytest.mark.parametrize("error", [ValueError, dq.Skip, dq.GiveUp])
@pytest.mark.parametrize("mode", ["alone", "outside"])
def test_what_a_handler_raises_passes(
    order: Order, declare: Declare, around: Around, error: type[Exception], mode: str
) -> None:
    around(outer, inner)
    row = due(order, declare(Order, raising(error("no")), name="raises", retry=dq.Retry([60]), **MODES[mode]))
    fire(row)
    expected = {ValueError: ("pending", ""), dq.Skip: ("skipped", "handler"), dq.GiveUp: ("dead", "handler")}
    assert state(row) == expected[error]
    assert [each["message"] for each in row.errors] == ["no"] * (error is ValueError)
    assert noted == ["raises 1", error.__name__]


@contextmanager
def swallow(policy: Any, timeouts: Sequence[Timeout]) -> Iterator[None]:
    try:
        yield
    except Exception:
        noted.append("swallowed")


@contextmanager
def translate(policy: Any, timeouts: Sequence[Timeout]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise LookupError("translated") from error


@pytest.mark.parametrize("function", [swallow, translate])
def test_an_error_of_a_handler_cannot_be_suppressed_or_replaced(
    order: Order, declare: Declare, around: Around, function: Any
) -> None:
    around(function)
    row = due(order, declare(Order, raising(ValueError("no")), name="raises", retry=dq.Retry([60])))
    fire(row)
    assert (state(row), row.errors[0]["error"]) == (PENDING, "ValueError")


def no_manager(policy: Any, timeouts: Sequence[Timeout]) -> Any:
    return None


def raises(policy: Any, timeouts: Sequence[Timeout]) -> Any:
    raise RuntimeError("not made")


@contextmanager
def raises_first(policy: Any, timeouts: Sequence[Timeout]) -> Iterator[None]:
    raise RuntimeError("not entered")
    yield


@contextmanager
def raises_last(policy: Any, timeouts: Sequence[Timeout]) -> Iterator[None]:
    yield
    raise RuntimeError("not left")


BROKEN = [no_manager, raises, raises_first, raises_last, f"{__name__}.no_such_function"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", BROKEN)
def test_an_error_of_a_function_is_logged_once_a_minute_and_prevents_no_firing(
    declare: Declare, around: Around, caplog: pytest.LogCaptureFixture, function: Any, mode: str
) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        seen.append(INSIDE.get())

    seen: list[Any] = []
    around(function, outer)
    policy = declare(Order, handler, name="fires", **MODES[mode])
    rows = [due(Order.objects.create(), policy) for _ in range(3)]
    caplog.clear()
    assert set(fire(*rows).fired) == {row.pk for row in rows}
    assert seen
    [record] = logged(caplog, "around_failed")
    assert record.levelname == "ERROR"
    assert "the handler of testapp.order.fires is called nevertheless" in record.getMessage()
    assert record.exc_info
    if callable(function):
        assert set(seen) == {("outer",)}, "the others are entered"


ENDS: list[type[BaseException]] = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
PLACES = ["made", "entered", "left"]


class Raising:
    """A function of `AROUND` that raises at one place what no `except Exception` catches."""

    def __init__(self, error: type[BaseException], place: str) -> None:
        self.error, self.place = error, place

    def __call__(self, policy: Any, timeouts: Sequence[Timeout]) -> Raising:
        return self.at("made")

    def __enter__(self) -> None:
        self.at("entered")

    def __exit__(self, *args: object) -> None:
        self.at("left")

    def at(self, place: str) -> Raising:
        if place == self.place:
            raise self.error
        return self


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", ENDS)
def test_what_would_end_the_thread_neither_prevents_nor_repeats_nor_undoes_a_handler(
    declare: Declare, around: Around, caplog: pytest.LogCaptureFixture, error: Any, mode: str
) -> None:
    """The limit lets the handlers run in another thread than the main one, as in a worker."""
    around(*(Raising(error, place) for place in PLACES), outer)
    limits = dq.Limits(run=timedelta(minutes=1))
    policy = declare(Order, note_calls, name="fires", limits=limits, retry=dq.Retry.never(), **MODES[mode])
    rows = [due(Order.objects.create(), policy) for _ in range(3)]
    assert set(fire(*rows).fired) == {row.pk for row in rows}
    assert [tried(row) for row in rows] == [(FIRED, 1)] * 3
    assert set(Effect.objects.values_list("what", "object_id")) == {("outer", row.object_id) for row in rows}
    assert Effect.objects.count() == 3
    [record] = logged(caplog, "around_failed")
    assert error.__name__ in str(record.exc_info)


def note_calls(target: Any, timeouts: Any) -> None:
    for row in timeouts if isinstance(timeouts, list) else [timeouts]:
        Effect.objects.create(what=" ".join(INSIDE.get()), object_id=row.object_id)


class Watched:
    """A context manager that notes that it was abandoned."""

    def __init__(self, policy: Any, timeouts: Sequence[Timeout]) -> None:
        self.ids = [row.pk for row in timeouts]

    def __enter__(self) -> None:
        INSIDE.set((*INSIDE.get(), "watched"))

    def __exit__(self, *args: object) -> None: ...

    def abandoned(self, error: BaseException) -> None:
        noted.append(f"{self.ids} {type(error).__name__}")
        raise RuntimeError("it fails, too")


@pytest.mark.parametrize("mode", ["alone", "outside"])
def test_a_call_that_takes_too_long_is_abandoned_for_what_surrounds_it(
    order: Order, declare: Declare, around: Around, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    around(Watched)
    policy = declare(Order, lambda obj, timeout: compute(), name="hangs", limits=LIMITS, retry=RETRY, **MODES[mode])
    row = due(order, policy)
    fire(row)
    assert overrun(row) == ("pending", 1, "TimeLimitExceeded")
    assert noted == [f"[{row.pk}] TimeLimitExceeded"]
    assert [vars(each).get("event") for each in caplog.records] == ["around_failed", "timeout_failed"]


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_runs_in_the_context_of_the_handler_that_has_registered_it(
    order: Order, declare: Declare, around: Around, mode: str
) -> None:
    def handler(target: Any, timeouts: Any) -> None:
        INSIDE.set((*INSIDE.get(), "handler"))
        with transaction.atomic():
            transaction.on_commit(lambda: seen.append(INSIDE.get()))

    seen: list[Any] = []
    around(inner)
    policy = declare(Order, handler, name="registers", **MODES[mode])
    row = due(order, policy)
    assert fire(row).fired == (row.pk,)
    assert seen == [("inner", "handler")]
    assert INSIDE.get() == ()


def test_callbacks_of_several_handlers_run_in_the_context_of_none(declare: Declare, around: Around) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        transaction.on_commit(lambda: seen.append(INSIDE.get()))

    seen: list[Any] = []
    around(inner)
    policy = declare(Order, handler, name="registers", together=5)
    rows = [due(Order.objects.create(), policy) for _ in range(2)]
    assert set(fire(*rows).fired) == {row.pk for row in rows}
    assert seen == [(), ()]


def test_a_failed_attempt_is_logged_in_the_context_of_its_handler(
    order: Order, declare: Declare, around: Around, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(obj: Order, timeout: Timeout) -> None:
        INSIDE.set((*INSIDE.get(), "handler"))
        raise ValueError("no")

    logged = []

    class Filter:
        def filter(self, record: Any) -> bool:
            logged.append(INSIDE.get())
            return True

    around(inner)
    row = due(order, declare(Order, handler, name="raises", retry=dq.Retry([60])))
    caplog.handler.addFilter(Filter())
    fire(row)
    assert logged == [("inner", "handler")]
    assert INSIDE.get() == ()
