"""What each outcome of an attempt makes of its row: a table of all outcomes, and what holds for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest

from django_delayq import Fired, GiveUp, Limits, Retry, Skip, Snooze, TimeoutPolicy
from django_delayq.models import Timeout
from django_delayq.policy.steps import Planned
from django_delayq.rounds.after_attempt import AttemptFacts, Change, TransientFailure, WorkerDied, superseded, values_of
from tests.testapp.models import Order

State = Timeout.State
NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
OUTCOMES: dict[str, Any] = {
    "fired": Fired("done"),
    "skips": Skip("no"),
    "gives up": GiveUp("no"),
    "snoozes": Snooze(minutes=5),
    "fails": ValueError("no"),
    "died": WorkerDied(),
    "transient": TransientFailure("lost", MINUTE),
}
# Its third attempt was running, outside a transaction. "left": another attempt, snooze and death are allowed. In each
# cell: state and cause, attempts, when the next attempt is (in minutes from now; -3: when this one was to run; -1: the
# lease of the row ended then), events. What follows the step is planned in 4 minutes.
TABLE = """
outcome   left | handler                  | step                             | handler, cancelled       | step, cancelled
fired     yes  | fired due 3 -3           | pending 0 4 step                 | fired due 3 -3           | cancelled hand 0 -1 step
skips     yes  | skipped handler 3 -1     | pending 0 4 step_skipped         | skipped handler 3 -1     | cancelled hand 0 -1 step_skipped
gives up  yes  | dead handler 3 -1        | pending 0 4 step_dead            | cancelled hand 3 -1      | cancelled hand 0 -1 step_dead
snoozes   yes  | pending 2 5 snoozed      | pending 2 4 snoozed              | cancelled hand 2 -1 snoozed | cancelled hand 2 -1 snoozed
snoozes   no   | dead limit 3 -1          | pending 0 4 step_dead            | cancelled hand 3 -1      | cancelled hand 0 -1 step_dead
fails     yes  | pending 3 2 failed       | pending 3 2 failed               | cancelled hand 3 -1 failed | cancelled hand 3 -1 failed
fails     no   | dead retries 3 -1 failed | pending 0 4 failed step_dead     | cancelled hand 3 -1 failed | cancelled hand 0 -1 failed step_dead
died      yes  | pending 2 0 suspected    | pending 2 0 suspected            | cancelled hand 2 -1 suspected | cancelled hand 2 -1 suspected
died      no   | dead retries 2 -1 suspected | pending 0 4 suspected step_dead | cancelled hand 2 -1 suspected | cancelled hand 0 -1 suspected step_dead
transient yes  | pending 2 1              | pending 2 1                      | cancelled hand 2 -1      | cancelled hand 2 -1
"""  # noqa: E501


def policy(*, left: bool = True) -> Any:
    retry = Retry(delays=[2 * MINUTE] * 3) if left else Retry.never()
    limits = Limits(snoozes=9 if left else 1)
    return TimeoutPolicy(model=Order, handler=lambda *_: None, name="tried", retry=retry, limits=limits)


def row(*, left: bool = True, **given: Any) -> Timeout:
    """A row whose third attempt is running."""
    values = {"state": State.FIRING, "attempts": 3, "run_at": NOW - MINUTE, "snoozes": 1, "deaths": 0 if left else 2}
    return Timeout(**{"slot_taken": None, "suspected_at": NOW - MINUTE, **values, **given})


def facts(row: Timeout) -> AttemptFacts:
    then = Planned(NOW + 4 * MINUTE, "next") if row.step else None
    details = {"error": "ValueError", "message": "no"}
    return AttemptFacts(NOW + 5 * MINUTE, details, then, "first", NOW - 3 * MINUTE)


def change(row: Timeout, outcome: str, *, left: bool = True) -> Change:
    given = facts(row) if outcome == "snoozes" else facts(row)._replace(until=None)
    return values_of(policy(left=left), row, OUTCOMES[outcome], NOW, given)


def cells() -> Iterator[tuple[str, bool, str, bool, str]]:
    for line in TABLE.strip().splitlines()[1:]:
        head, *found = [cell.strip() for cell in line.split("|")]
        outcome, left = head.rsplit(maxsplit=1)
        for (is_cancelled, step), cell in zip(product((False, True), ("", "first")), found, strict=True):
            yield outcome.strip(), left == "yes", step, is_cancelled, cell


@pytest.mark.parametrize(("outcome", "left", "step", "is_cancelled", "cell"), [*cells()])
def test_an_outcome_decides_about_state_attempts_time_and_history(
    outcome: str, left: bool, step: str, is_cancelled: bool, cell: str
) -> None:
    found = change(row(left=left, step=step, final_attempt=is_cancelled), outcome, left=left)
    values = found.values
    parts = [values["state"], values.get("cause"), values["attempts"], (values["run_at"] - NOW) // MINUTE]
    parts += [event["what"] for event in found.said]
    assert " ".join(str(part) for part in parts if part is not None) == cell
    assert (values["slot_taken"] == 1) == (values["state"] == State.PENDING)
    assert (values.get("settled_at") is None) == (values["state"] == State.PENDING)


@pytest.mark.parametrize("outcome", [each for each in OUTCOMES if each not in ("fired", "died")])
@pytest.mark.parametrize("step", ["", "first"])
def test_what_was_undone_in_its_transaction_ends_as_outside_of_one(outcome: str, step: str) -> None:
    """The row is as before the attempt then: pending, and the attempt is not counted yet."""
    outside = change(row(step=step), outcome)
    inside = change(row(step=step, state=State.PENDING, slot_taken=1, attempts=2), outcome)
    assert inside.values.items() <= outside.values.items(), "only outside it had the end of the lease"
    assert inside._replace(values={}) == outside._replace(values={})


@pytest.mark.parametrize("step", ["", "first"])
@pytest.mark.parametrize("state", [State.PENDING, State.HELD])
def test_what_was_done_counts_although_its_row_has_expired_meanwhile(state: Timeout.State, step: str) -> None:
    found = change(row(step=step, state=state, slot_taken=1, attempts=2), "fired").values
    expected = change(row(step=step), "fired").values
    kept = set() if not step or state == State.PENDING else {"state", "slot_taken", "run_at", "claims", "claimed_until"}
    for name in expected.keys() - kept - {"suspected_at"}:
        assert found[name] == expected[name], name
    assert found.get("remaining") is None
    assert not kept & found.keys(), "the clock of what follows is stopped"


def test_what_its_transaction_has_marked_as_fired_gets_the_reason_only() -> None:
    assert change(row(state=State.FIRED), "fired").values == {"reason": "done"}


def test_a_death_beside_others_is_not_counted() -> None:
    found = change(row(suspected_at=None), "died")
    assert (found.values["deaths"], found.values["suspected_at"], found.error) == (0, NOW, None)


@pytest.mark.parametrize("outcome", ["snoozes", "fails", "died", "transient"])
def test_a_newer_round_replaces_what_would_be_tried_again(outcome: str) -> None:
    before = change(row(), outcome)
    after = superseded(row(), before, NOW)
    settled = {name: after.values[name] for name in ("state", "cause", "slot_taken", "run_at", "reason", "attempts")}
    ended = {"state": "skipped", "cause": "superseded", "slot_taken": None, "run_at": NOW - MINUTE, "reason": ""}
    assert settled == {**ended, "attempts": before.values["attempts"]}
    assert (after.said, after.error) == (before.said, before.error)


def test_without_its_policy_the_default_retries_apply() -> None:
    found = values_of(None, row(attempts=1), ValueError("no"), NOW, AttemptFacts()).values
    assert (found["state"], found["attempts"]) == (State.PENDING, 1)
