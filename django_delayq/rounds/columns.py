"""The columns of a row by groups: each belongs to one, and an event keeps, resets or sets the columns of a group.

`docs/events.md` shows which event does what. A new column is listed here once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django_delayq.models import Timeout
from django_delayq.times.clock import latest_start

DEFAULTS: dict[str, Any] = {field.attname: field.get_default() for field in Timeout._meta.concrete_fields}


def _defaults(*names: str) -> dict[str, Any]:
    return {name: DEFAULTS[name] for name in names}


IDENTITY = ("id", "policy", "content_type_id", "object_id", "key", "slot")
GIVEN = ("queue", "payload", "reason", "share", "trace")
DEADLINE: tuple[str, ...] = ("due_at", "terms", "computed_due_at", "asked_due_at", "restarted_at", "hold_ended_at")
DEADLINE += ("is_requested", "is_due_by_request")
MOVES = ("first_due_at", "extensions")
"""Replacing a row keeps these: else a caller that may extend a cart three times could keep it indefinitely."""
RUNNING_CLOCK = {"state": Timeout.State.PENDING.value, **_defaults("remaining", "held_at", "held_until")}
RUNNING_CLOCK |= _defaults("held_by_hand", "held_when", "keeps_deadline")
"""The columns of a pending row by which it differs from one that is held."""
ATTEMPTS = _defaults("attempts", "snoozes", "deaths", "first_failed_at", "last_failed_at")
"""The columns of the attempts of one step, with the values that the next one begins with."""
STEPS = ("step", "steps_over")
NEW_ROUND = {**RUNNING_CLOCK, **ATTEMPTS, **_defaults("stops", "hold_ended_at", "extensions", "steps_over")}
"""What another value of `since` resets in a waiting row, beside what a move does."""
LEASE = _defaults("claims", "claimed_until", "suspected_at")
"""What a worker has written of a row that it has, with the values of a row that no worker has."""
NEXT = ("run_at", "ready_at")
ROUND = ("since_at", "created_at", "idempotency_key")
END = ("state", "slot_taken", "cause", "settled_at", "final_attempt", "is_guarded")
AUDIT = ("history", "erased_at")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "identity": IDENTITY,
    "given": GIVEN,
    "deadline": DEADLINE,
    "moves": MOVES,
    "clock": (*(name for name in RUNNING_CLOCK if name != "state"), "stops"),
    "attempts": tuple(ATTEMPTS),
    "steps": STEPS,
    "lease": (*NEXT, *LEASE),
    "round": ROUND,
    "end": END,
    "audit": AUDIT,
}
REPLACED = ("policy", *GIVEN, *DEADLINE, *RUNNING_CLOCK, "stops", *ATTEMPTS, *STEPS, *LEASE, *NEXT, *ROUND, "history")
"""The columns of a waiting row that a new round overwrites: see `events.replace`."""
TIMES = ("due_at", "run_at", "first_due_at")
"""The columns that are equal in a new row."""


def settled(state: Timeout.State, cause: Any, now: Any) -> dict[str, Any]:
    """Return the columns of a row that settles as `state`, with `cause` at `now`; both may be expressions."""
    return {"state": state, "cause": cause, "settled_at": now, "slot_taken": None, **LEASE}


def waiting(run_at: datetime) -> dict[str, Any]:
    """Return the columns of a pending row whose next attempt is at `run_at`."""
    return {"state": Timeout.State.PENDING, "slot_taken": 1, "run_at": run_at, **LEASE}


def firing(until: datetime, attempts: int) -> dict[str, Any]:
    """Return the columns of a row whose handler runs outside a transaction, `until` its lease ends."""
    return {"state": Timeout.State.FIRING, "slot_taken": None, "run_at": until, "attempts": attempts}


def far() -> datetime:
    """Return the `run_at` of a row whose clock is stopped: the last supported datetime, so that no worker finds it."""
    return latest_start(timedelta.resolution)


def is_suspect(row: Any) -> bool:
    """Return whether a process may have died while `row`, an unsettled row or its columns, ran."""
    return row.state == Timeout.State.FIRING or row.suspected_at is not None or row.deaths > 0
