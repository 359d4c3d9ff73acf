"""Rows of the ledger of which each column has a value of its own, so that "kept" and "reset" differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Model, Q

from django_delayq import Retry, TimeoutPolicy, schedule_timeout
from django_delayq.firing import plan, run
from django_delayq.models import Timeout
from django_delayq.rounds.columns import LEASE, far
from django_delayq.rounds.memory import iso
from tests.testapp.market import Purchase
from tests.testapp.models import Order

Declare = Callable[..., TimeoutPolicy[Any]]
NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
"""The clock is stopped here."""
BY = "admin:alice"
MINUTE = timedelta(minutes=1)
State, Cause = Timeout.State, Timeout.Cause
COLUMNS = [each.attname for each in Timeout._meta.concrete_fields]


def at(minutes: float) -> datetime:
    return NOW + minutes * MINUTE


SINCE = at(-290)
MOMENTS = {
    "created_at": -300,
    "first_due_at": 61,
    "due_at": 62,
    "run_at": 63,
    "computed_due_at": 64,
    "asked_due_at": 65,
    "ready_at": -20,
    "claimed_until": -10,
    "restarted_at": -190,
    "hold_ended_at": -180,
    "suspected_at": -120,
    "first_failed_at": -100,
    "last_failed_at": -90,
}
PENDING: dict[str, Any] = {
    **{name: at(minutes) for name, minutes in MOMENTS.items()},
    "queue": "filled",
    "payload": {"filled": True},
    "reason": "filled",
    "share": "filled",
    "steps_over": "gone",
    "extensions": 2,
    "attempts": 3,
    "claims": 4,
    "snoozes": 2,
    "deaths": 1,
    "is_requested": True,
    "is_due_by_request": True,
    "trace": f"00-{'f' * 32}-{'f' * 16}-01",
    "history": [{"at": iso(at(-299)), "what": "filled"}],
    "idempotency_key": "f" * 32,
    "stops": [[iso(at(-280)), iso(at(-270))]],
}
"""Of a pending row whose deadline is ahead. `since_at`, `terms` and `step` are those of its policy."""
DUE: dict[str, Any] = {"due_at": at(-33), "run_at": at(-32), "first_due_at": at(-34), "asked_due_at": at(-35)}
NEXT: dict[str, Any] = {"step": "first", "run_at": at(23), "is_requested": False, "is_due_by_request": False}
"""A step is next, which is not so if an operator wants the timeout fired."""
ALONE: dict[str, Any] = {"suspected_at": None}
"""It runs alone in its process, because one has died of it before."""
FIRST: dict[str, Any] = {"attempts": 0, "is_requested": False}
HELD: dict[str, Any] = {"state": State.HELD, "run_at": far(), "remaining": 66 * MINUTE, "held_at": at(-40)}
HELD |= {"held_until": at(500), "held_by_hand": True, "held_when": True, "is_due_by_request": False, **LEASE}
FIRING: dict[str, Any] = {**DUE, "state": State.FIRING, "slot_taken": None, "run_at": at(-1)}
SETTLED: dict[str, Any] = {**DUE, **LEASE, "settled_at": at(-5), "slot_taken": None, "final_attempt": True}
STARTS: dict[str, dict[str, Any]] = {
    "pending": {},
    "held": HELD,
    "paused": {**HELD, "keeps_deadline": True, "held_when": False},
    "not requested": {"is_requested": False, "is_due_by_request": False},
    "held by its condition": {**HELD, "held_until": None, "held_by_hand": False, "held_when": False},
    "held until now": {**HELD, "held_until": at(-1), "held_when": False},
    "due": {**DUE, **ALONE, "deaths": 0},
    "due, first attempt": {**DUE, **ALONE, **FIRST, "deaths": 0},
    "due, alone": {**DUE, **ALONE},
    "due, its process has died": DUE,
    "due, its process has died twice": {**DUE, "deaths": 2},
    "step due": {"due_at": at(20), "run_at": at(-15), **ALONE, "deaths": 0},
    "step due, alone": {"due_at": at(20), "run_at": at(-15), **ALONE},
    "step due, first attempt": {"due_at": at(20), "run_at": at(-20), **ALONE, **FIRST, "deaths": 0},
    "steps due": {"due_at": at(5), "run_at": at(-35), **ALONE, "deaths": 0},
    "firing": FIRING,
    "firing, cancelled": {**FIRING, "final_attempt": True},
    "dead": {**SETTLED, "state": State.DEAD, "cause": Cause.RETRIES},
    "fired": {**SETTLED, "state": State.FIRED, "cause": Cause.DUE},
    "erased": {**SETTLED, "state": State.FIRED, "cause": Cause.DUE, "erased_at": at(-4)},
}
"""What rows of each start have instead."""

BARE: dict[str, Any] = {"model": Order, "retry": Retry([3600] * 20), "max_extensions": 9}
"""A policy that counts from nothing, which one statement serves where the database can."""
AUTO: dict[str, Any] = {**BARE, "after": 350 * MINUTE, "since": "created_at", "when": Q(status="unpaid")}
DATA: dict[str, Any] = {**AUTO, "model": Purchase, "after": "grace"}


@dataclass
class Stage:
    """A row, its policy and its object, before one of the ways changes it."""

    policy: TimeoutPolicy[Any]
    obj: Any
    row: Timeout
    settings: Any
    before: dict[str, Any] = field(default_factory=dict)

    def fill(self, values: dict[str, Any]) -> None:
        Timeout.objects.filter(pk=self.row.pk).update(**values)
        self.row.refresh_from_db()
        self.before = values_of(self.row)

    def set(self, **values: Any) -> None:
        """Change the object past Django, so that nothing is armed."""
        type(self.obj)._base_manager.filter(pk=self.obj.pk).update(**values)
        self.obj.refresh_from_db()

    def save(self, **values: Any) -> None:
        vars(self.obj).update(values)
        self.obj.save()

    def newest(self) -> Timeout:
        """Return the newest row of the object and policy."""
        found: Timeout = Timeout.objects.filter(policy=self.policy.label, object_id=str(self.obj.pk)).latest("pk")
        return found

    def fire(self) -> None:
        """Do what a worker does with the row."""
        works, _ = plan({self.row.pk: 1}, "default")
        for work in works:
            run(work, "default")


def values_of(row: Timeout) -> dict[str, Any]:
    return {name: getattr(row, name) for name in COLUMNS}


def set_stage(declare: Declare, settings: Any, options: dict[str, Any], start: str, name: str) -> Stage:
    """Return a stage with a row of the policy that `options` declare, as filled as its `start` allows."""
    given = dict(options)
    model, planned = given.pop("model"), given.pop("steps", {})
    policy = declare(model, name=name, **given)
    for step, offset in planned.items():
        policy.step(offset, name=step, atomic=policy.atomic)(policy.handler)
    own: dict[str, Any] = {"grace": 350 * MINUTE} if model is Purchase else {}
    if start == "nothing":
        return Stage(policy, _create(model, **own), Timeout(), settings)
    if policy.is_automatic:
        obj = _create(model, created_at=SINCE, **own)
        stage, values = Stage(policy, obj, obj.timeouts.get(policy=policy.label), settings), dict[str, Any]()
    else:
        obj = _create(model)
        stage = Stage(policy, obj, schedule_timeout(obj, policy, minutes=60), settings)
        values = {"since_at": SINCE, "terms": "filled"}
    stage.fill({**PENDING, **values, **(NEXT if planned else {}), **STARTS[start]})
    return stage


def _create(model: type[Model], **values: Any) -> Any:
    return model._base_manager.create(**values)
