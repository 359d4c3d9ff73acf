"""The public ways to change a row of the ledger: what calls them, and from which row they start.

The ways of one event, from the same state, do the same to each column: whatever verb, statement or pass it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from django.db.models import Q

import django_delayq as dq
from django_delayq import Fired, GiveUp, Late, Limits, Retry, Skip, Snooze, WorkingHours, operations
from django_delayq.arming.holding import end_holds_by_hand
from django_delayq.firing.handler import set_checkpoint_hook
from django_delayq.firing.settling import settle_expired
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from tests.integration.rounds.stage import AUTO, BARE, BY, DATA, MINUTE, SINCE, Stage, at

Act = Callable[[Stage], object]
GIVEN: dict[str, Any] = {"payload": {"given": True}, "reason": "given"}
HOLDING: dict[str, Any] = {**AUTO, "hold_when": Q(note="hold")}
OUTSIDE: dict[str, Any] = {**AUTO, "atomic": False}
PLANNED: dict[str, Any] = {**AUTO, "steps": {"first": -40 * MINUTE, "second": -10 * MINUTE}}
"""The first step is next."""
PLANNED_OUTSIDE: dict[str, Any] = {**PLANNED, "atomic": False}
NO_RETRY: dict[str, Any] = {"retry": Retry.never()}
LATE: dict[str, Any] = {"late": Late(after=10 * MINUTE)}
CLOSED: dict[str, Any] = {"within": WorkingHours("UTC", {"mon-sun": "01:00-02:00"})}
AFTERWARDS = ", outside a transaction"
WAITING = ("pending", "held", "paused")


@dataclass(frozen=True)
class Way:
    """One way: `act` on a row of a policy with `options`, as filled as `start` allows.

    `is_new`: the newest row of its object is compared with the filled one, and not that one.
    """

    event: str
    act: Act
    options: dict[str, Any] = field(default_factory=lambda: AUTO)
    start: str = "pending"
    is_new: bool = False

    @property
    def of(self) -> str:
        """Return the event, and the state of the row if that matters."""
        return f"{self.event} [{self.start}]" if self.start in ("held", "paused") else self.event


def raising(error: BaseException) -> dict[str, Any]:
    def handler(*_: Any) -> None:
        raise error

    return {"handler": handler}


def returning(value: Any) -> dict[str, Any]:
    return {"handler": lambda *_: value}


def failing() -> dict[str, Any]:
    return raising(ValueError("fails"))


def operation(name: str, **options: Any) -> Act:
    return lambda stage: getattr(operations, name)(stage.row, by=BY, reason="given", **options)


def function(name: str, **options: Any) -> Act:
    return lambda stage: getattr(dq, name)(stage.obj, stage.policy, reason="given", **options)


def bulk(name: str, **options: Any) -> Act:
    rows = lambda stage: Timeout.objects.filter(pk=stage.row.pk)  # noqa: E731
    return lambda stage: getattr(dq, name)(rows(stage), reason="given", **options)


def save(**values: Any) -> Act:
    return lambda stage: stage.save(**values)


def sync(**values: Any) -> Act:
    def act(stage: Stage) -> None:
        stage.set(**values)
        dq.sync_timeouts(stage.obj)

    return act


def both(*acts: Act) -> Act:
    return lambda stage: [act(stage) for act in acts]


def scheduled(values: dict[str, Any], *, in_bulk: bool = False, **delay: Any) -> Act:
    """Schedule it for its object, which has these values now."""

    def act(stage: Stage) -> None:
        stage.set(created_at=at(-285), **values)
        if in_bulk:
            dq.schedule_timeouts([stage.obj], stage.policy, **GIVEN, **delay)
        else:
            dq.schedule_timeout(stage.obj, stage.policy, **GIVEN, **delay)

    return act


again, again_in_bulk = scheduled({}, hours=2), scheduled({}, in_bulk=True, hours=2)
GRACE = {"grace": 360 * MINUTE}
computed, computed_in_bulk = scheduled(GRACE), scheduled(GRACE, in_bulk=True)


def fire(stage: Stage) -> None:
    stage.fire()


def expire(_stage: Stage) -> None:
    settle_expired("default")


def die(stage: Stage) -> None:
    """Let the process of its firing be gone before the handler is called."""

    def look(step: str) -> None:
        if step == "noted":
            raise KeyboardInterrupt

    set_checkpoint_hook(look)
    with pytest.raises(KeyboardInterrupt):  # it is fired alone
        stage.fire()
    set_checkpoint_hook(None)


def is_paid(stage: Stage) -> None:
    with dq.before_deadline(stage.obj, stage.policy, reason="given"):
        stage.save(status="paid")


def is_guarded(stage: Stage) -> None:
    with dq.before_deadline(stage.obj, stage.policy, reason="given"):
        pass


def once(stage: Stage) -> None:
    """Schedule it for a deadline for which another row of the object has fired."""
    values = {name: getattr(stage.row, name) for name in ("policy", "content_type_id", "object_id", "slot")}
    fired = {"state": "fired", "cause": "due", "due_at": at(70), "run_at": at(70), "first_due_at": at(70)}
    Timeout.objects.create(**values, **fired, created_at=at(-400), settled_at=at(-5), slot_taken=None)
    dq.schedule_timeout(stage.obj, stage.policy, at=at(70), on_conflict="once", reason="given")


def confirmed(outcome: Any) -> Act:
    def act(stage: Stage) -> None:
        stage.policy.confirm(timeout=MINUTE)(lambda *_: outcome)
        stage.fire()

    return act


def stopped(stop: Callable[..., object]) -> Act:
    """Stop the policy for five minutes."""

    def act(stage: Stage) -> None:
        stop(stage.policy, by=BY)
        with dq.clock.set_to(at(5)):
            operations.resume(stage.policy, by=BY)

    return act


def changed(mode: Any) -> Act:
    return lambda stage: operations.change_delay(stage.policy, 400 * MINUTE, by=BY, mode=mode)


def replace_and_fail(obj: Any, timeout: Timeout) -> None:
    dq.schedule_timeout(obj, timeout.policy, hours=1)
    raise ValueError("fails")


def replace_and_snooze(obj: Any, timeout: Timeout) -> Any:
    dq.schedule_timeout(obj, timeout.policy, hours=1)
    return Snooze(hours=1)


def is_gone(stage: Stage) -> None:
    """Delete the object past Django."""
    type(stage.obj)._base_manager.filter(pk=stage.obj.pk)._raw_delete("default")
    stage.fire()


def retire(stage: Stage) -> None:
    registry.remove(stage.policy)
    operations.retire(stage.policy.label, by=BY, reason="given")


def adopt(pending: Any) -> Act:
    def act(stage: Stage) -> None:
        stage.settings.DELAYQ = {**stage.settings.DELAYQ, "INSTALLATION": stage.policy.name}
        operations.adopt(by=BY, reason="given", pending=pending)

    return act


def scheduling() -> Iterator[Way]:
    for act, options in ((again, BARE), (again, AUTO), (again_in_bulk, BARE), (again_in_bulk, AUTO)):
        yield Way("scheduled", act, options, "nothing")
        for start in WAITING:
            yield Way("scheduled again", act, options, start)
    for armed in (save(created_at=SINCE), sync(created_at=SINCE)):
        yield Way("armed", armed, AUTO, "nothing")
    for by_policy in (computed, computed_in_bulk):
        yield Way("scheduled again, by its policy", by_policy, DATA)
        yield Way("scheduled again, by its policy", by_policy, {**DATA, "steps": PLANNED["steps"]})
    for start in WAITING:
        yield Way("scheduled again", again, PLANNED, start)
        yield Way("fired for its deadline already", once, AUTO, start)
        yield Way("scheduled, but kept", function("schedule_timeout", on_conflict="keep", hours=2), AUTO, start)


def arming() -> Iterator[Way]:
    by_save_and_sync: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "a new `since`": (DATA, {"created_at": at(-280), "grace": 360 * MINUTE}),
        "its condition ends": (AUTO, {"status": "paid"}),
        "its data changes": (DATA, {"grace": 360 * MINUTE}),
    }
    for event, (options, values) in by_save_and_sync.items():
        for start in WAITING:
            yield Way(event, save(**values), options, start)
            yield Way(event, sync(**values), options, start)
    for start in WAITING:
        planned = {**DATA, "steps": PLANNED["steps"]}
        yield Way("a new `since`", save(created_at=at(-280), grace=360 * MINUTE), planned, start)
        yield Way("its object is deleted", lambda s: s.obj.delete(), AUTO, start)
    flaps = [both(act(status="paid"), act(status="unpaid")) for act in (save, sync)]
    for start in ("not requested", "held", "paused"):
        for act in flaps:
            yield Way("its condition comes back", act, AUTO, start, is_new=True)
        yield Way("its condition comes back", flaps[0], PLANNED, start, is_new=True)
    yield Way("its condition comes back after fire now", flaps[0], AUTO, "pending", is_new=True)
    yield Way("its data changes", both(lambda s: s.set(grace=360 * MINUTE), fire), DATA, "due")
    yield Way("its new `since` is too old", save(created_at=at(-60 * 24 * 60)))
    yield Way("`hold_when` begins", save(note="hold"), HOLDING)
    yield Way("`hold_when` begins", sync(note="hold"), HOLDING)
    yield Way("`hold_when` is noticed at its deadline", both(lambda s: s.set(note="hold"), fire), HOLDING, "due")
    yield Way("`hold_when` ends", save(note=""), HOLDING, "held by its condition")
    yield Way("`hold_when` ends", sync(note=""), HOLDING, "held by its condition")


MOVES: dict[str, list[Act]] = {
    "rescheduled": [function("reschedule_timeout", hours=1), bulk("reschedule_timeouts", hours=1)],
    "extended": [function("extend_timeout", hours=1), bulk("extend_timeouts", hours=1)],
    "moved by an operator": [operation("postpone", hours=1), operation("change_deadline", shift=7 * MINUTE)],
    "moved by an operator to a datetime": [operation("postpone", at=at(600)), operation("change_deadline", at=at(600))],
    "its declared delay changes": [changed("recompute")],
    "all are shifted": [changed("shift")],
}
CLOCKS: dict[str, list[Act]] = {
    "held by hand": [function("hold_timeout"), operation("hold_timeout")],
    "paused by hand": [function("hold_timeout", keep_deadline=True), operation("pause_timeout")],
    "its policy was held": [stopped(operations.hold)],
    "its policy was paused": [stopped(operations.pause)],
}
RESUMES = (function("resume_timeout"), operation("resume_timeout"))


def moves() -> Iterator[Way]:
    for start in WAITING:
        for options, (event, acts) in product((AUTO, PLANNED), MOVES.items()):
            yield from (Way(event, act, options, start) for act in acts)
        yield Way("computed again", both(lambda s: s.set(grace=360 * MINUTE), operation("replan")), DATA, start)
    yield Way("fire now", operation("fire_now"), AUTO, "not requested")
    yield Way("fire now", operation("fire_now"), BARE, "not requested")
    yield Way("fire now, before its steps", operation("fire_now"), PLANNED)
    yield Way("all are shifted after fire now", both(operation("fire_now"), changed("shift")), PLANNED)


def clocks() -> Iterator[Way]:
    for start, options, (event, acts) in product(WAITING, (AUTO, PLANNED), CLOCKS.items()):
        yield from (Way(event, act, options, start) for act in acts)
    for start, options, act in product(("held", "paused"), (AUTO, PLANNED), RESUMES):
        yield Way("resumed by hand", act, options, start)
    yield Way("its hold reaches its end", lambda s: end_holds_by_hand("default"), AUTO, "held until now")


def firing() -> Iterator[Way]:
    for options in (BARE, AUTO, OUTSIDE, {**AUTO, "batch": 20}, {**AUTO, "together": 20}):
        for start in ("due", "due, alone"):
            yield Way("fires", fire, options, start)
    yield Way("fires with a reason", fire, {**AUTO, **returning(Fired("given"))}, "due")
    yield Way("fires with a reason", fire, {**OUTSIDE, **returning(Fired("given"))}, "due")
    yield Way("fires after its process has died", fire, AUTO, "due, its process has died")
    yield from outcomes()
    yield Way("its process dies", die, AUTO, "due, its process has died")
    yield Way("its process dies outside a transaction", expire, OUTSIDE, "firing")
    yield Way("its process dies for the third time", fire, AUTO, "due, its process has died twice")
    yield Way("its process dies after a cancel", expire, OUTSIDE, "firing, cancelled")
    yield Way("fails, but was replaced", fire, {**OUTSIDE, "handler": replace_and_fail}, "due")
    yield Way("snoozes, but was replaced", fire, {**AUTO, "handler": replace_and_snooze}, "due")
    yield Way(f"snoozes, but was replaced{AFTERWARDS}", fire, {**OUTSIDE, "handler": replace_and_snooze}, "due")
    for options in (AUTO, OUTSIDE):
        yield Way("its condition had ended", both(lambda s: s.set(status="paid"), fire), options, "due")
        yield Way("its object is gone", is_gone, options, "due")
        yield Way("too late", fire, {**options, **LATE}, "due, first attempt")
        yield Way("in shadow mode", fire, {**options, "shadow": True}, "due")
        yield Way("outside opening hours", fire, {**options, **CLOSED}, "due, first attempt")
    yield Way("too late", fire, {**AUTO, "late": Late(after=10 * MINUTE, then="dead")}, "due, first attempt")


def outcomes() -> Iterator[Way]:
    """Yield what handlers decide. Where it ends a row that was `firing`, its `run_at` is when it ended."""
    found = {"skipped by its handler": Skip("given"), "given up": GiveUp("given")}
    for start in ("due", "due, alone"):
        for mode in (raising, returning):
            for event, outcome in found.items():
                yield Way(event, fire, {**AUTO, **mode(outcome)}, start)
                yield Way(event + AFTERWARDS, fire, {**OUTSIDE, **mode(outcome)}, start)
            for options in (AUTO, OUTSIDE):
                yield Way("snoozes", fire, {**options, **mode(Snooze(hours=1))}, start)
        for options in (AUTO, {**AUTO, "batch": 20}, OUTSIDE):
            yield Way("fails, and is retried", fire, {**options, **failing()}, start)
        yield Way("fails for the last time", fire, {**AUTO, **NO_RETRY, **failing()}, start)
        yield Way("fails for the last time", fire, {**AUTO, "batch": 20, **NO_RETRY, **failing()}, start)
        yield Way(f"fails for the last time{AFTERWARDS}", fire, {**OUTSIDE, **NO_RETRY, **failing()}, start)
    for event, outcome in {"snoozes": Snooze(hours=1), **found}.items():
        yield Way(event, confirmed(outcome), AUTO, "due")
    limited = {"limits": Limits(snoozes=1), **raising(Snooze(hours=1))}
    yield Way("snoozes too often", fire, {**AUTO, **limited}, "due")
    yield Way(f"snoozes too often{AFTERWARDS}", fire, {**OUTSIDE, **limited}, "due")


def steps() -> Iterator[Way]:
    for options in (PLANNED, PLANNED_OUTSIDE):
        for start in ("step due", "step due, alone"):
            yield Way("a step ends", fire, options, start)
            for mode in (raising, returning):
                yield Way("a step ends", fire, {**options, **mode(Skip("given"))}, start)
                yield Way("a step ends", fire, {**options, **mode(GiveUp("given"))}, start)
                yield Way("a step snoozes", fire, {**options, **mode(Snooze(minutes=1))}, start)
            yield Way("a step ends", fire, {**options, **NO_RETRY, **failing()}, start)
            retry = {"retry": Retry([60] * 20), **failing()}
            yield Way("a step fails, and is retried", fire, {**options, **retry}, start)
        yield Way("a step ends", fire, options, "steps due")
        yield Way("a step ends", fire, {**options, **LATE}, "step due, first attempt")


def ends() -> Iterator[Way]:
    for start in (*WAITING, "dead"):
        event = "cancelled by hand" if start != "dead" else "cancelled when it is dead"
        yield Way(event, function("cancel_timeout"), AUTO, start)
        yield Way(event, function("cancel_timeout"), BARE, start)
        yield Way(event, lambda s: dq.cancel_timeout(s.row, reason="given"), AUTO, start)
        yield Way(event if start == "dead" else "cancelled by an operator", operation("cancel"), AUTO, start)
    for start in WAITING:
        yield Way("cancelled by hand", bulk("cancel_timeouts"), AUTO, start)
        yield Way("cancelled by hand", is_guarded, AUTO, start)
        yield Way("cancelled by hand", is_guarded, BARE, start)
        yield Way("its condition ends in `before_deadline`", is_paid, AUTO, start)
        yield Way("retired", retire, BARE, start)
        yield Way("cancelled by an operator", adopt("cancel"), AUTO, start)
        yield Way("adopted", adopt("keep"), AUTO, start)
    yield Way("adopted", adopt("keep"), AUTO, "dead")
    for act in (function("cancel_timeout"), bulk("cancel_timeouts"), operation("cancel")):
        yield Way("cancelled while it fires", act, OUTSIDE, "firing")
    yield Way("retried by an operator", operation("retry"), AUTO, "dead")
    yield Way("fired again", operation("refire"), AUTO, "fired")
    yield Way("the new row of fired again", operation("refire"), AUTO, "fired", is_new=True)
    yield Way("erased", operation("erase"), AUTO, "fired")
    yield Way("erased", operation("erase"), AUTO, "erased")


WAYS: list[Way] = [*scheduling(), *arming(), *moves(), *clocks(), *firing(), *steps(), *ends()]
