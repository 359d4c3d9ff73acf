"""The oracle can fail: one sound outcome, then the same doctored in one way at a time, and each is found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.e2e.chaos.evidence import Effect, Evidence, Note, Operation, Row
from tests.e2e.chaos.oracle import judge

NOON, HALF_AN_HOUR = datetime(2026, 1, 1, 12, tzinfo=UTC), timedelta(minutes=30)
UNOWNED = {"policy": "gather", "key": "", "orders": [], "answer": 0, "deadline": NOON.isoformat()}


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def claim(verb: str, order: int, policy: str, **what: Any) -> dict[str, Any]:
    return {"verb": verb, "order": order, "policy": policy, "key": "", **what}


def given(verb: str, order: int, due: float, policy: str = "remind", **other: float) -> dict[str, Any]:
    """Claim a deadline by hand; `answer` and `heard` are the same, if no other is given."""
    moments = {"deadline": due, "answer": due, "heard": due} | other
    return claim(verb, order, policy, **{name: at(seconds).isoformat() for name, seconds in moments.items()})


def columns(row: Row) -> dict[str, Any]:
    due = {"due_at": row.due_at.isoformat(), "run_at": row.due_at.isoformat()}
    return {"id": row.id, "policy": row.policy, "state": row.state, "idempotency_key": "key", "reason": "", **due}


class Outcome:
    """Evidence made by hand. Its verbs add what a sound product would leave behind, one transaction each."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._number = 0

    def note(self, kind: str, before: Any, after: Any, moment: datetime = NOON) -> None:
        self._number += 1
        xid = str(len(self.evidence.committed))
        self.evidence.notes.append(Note(self._number, moment, moment, xid, kind, before, after))

    def change(self, kind: str, id: int, **values: Any) -> None:
        """Change all notes of the kind about the timeout."""
        name = "timeout_id" if kind == "effect" else "id"
        for index, note in enumerate(self.evidence.notes):
            if note.kind == kind and note.after and note.after.get(name) == id:
                self.evidence.notes[index] = replace(note, **values)

    def operate(self, *claims: dict[str, Any], **times: Any) -> None:
        """Add the operation whose changes were just recorded."""
        self._number += 1
        id = f"{self._number:032x}"
        self.evidence.operations.append(Operation(id, "operation", "done", claims, **times))
        self.evidence.committed[id] = (self._number, str(len(self.evidence.committed)))

    def fail(self, step: str, words: str = "", *claims: dict[str, Any]) -> str:
        """Add an operation that was not committed; return its id."""
        self.evidence.operations.append(Operation("f" * 32, "operation", step, claims, words))
        return "f" * 32

    def write(self, id: int, policy: str, order: int, due_at: datetime, state: str) -> None:
        """Record a change of the row `id`."""
        former = self.evidence.ledger.get(id)
        row = Row(id, f"testapp.order.{policy}", str(order), "", state, "x", due_at, state not in ("pending", "firing"))
        self.evidence.ledger[id] = row
        self.note("timeout", former and columns(former), columns(row), max(due_at, NOON))

    def place(self, order: int, due: float) -> None:
        self.evidence.orders[order] = "unpaid"
        since = (at(due) - HALF_AN_HOUR).isoformat()
        self.note("order", None, {"id": order, "note": "", "created_at": since})
        self.write(order, "cancel_unpaid", order, at(due), "pending")
        self.operate(claim("place", order, "cancel_unpaid", since=since, was=None))

    def remind(self, id: int, order: int, due: float, verb: str = "schedule", **times: Any) -> None:
        self.write(id, "remind", order, at(due), "pending")
        self.operate(given(verb, order, due), **times)

    def cancel(self, id: int, order: int, policy: str = "remind") -> None:
        self.write(id, policy, order, self.evidence.ledger[id].due_at, "cancelled")
        self.operate(claim("cancel", order, policy, answer=True))

    def pay(self, order: int) -> None:
        self.evidence.orders[order] = "paid"
        self.write(order, "cancel_unpaid", order, self.evidence.ledger[order].due_at, "cancelled")
        self.operate(claim("pay", order, "cancel_unpaid", answer="paid"))

    def stop(self, verb: str, seconds: float, *, took: float = 0.1, **what: Any) -> None:
        """Add an operation on `remind` that ended after so many seconds."""
        self.operate(claim(verb, 0, "remind", **what), began_at=at(seconds - took), ended_at=at(seconds))

    def affect(self, id: int, moment: datetime, idempotency_key: str = "") -> None:
        """Record the effect of the handler."""
        row = self.evidence.ledger[id]
        what = row.policy.rpartition(".")[2]
        self.evidence.effects.append(Effect(id, what, row.object_id, idempotency_key))
        self.note("effect", None, {"timeout_id": id, "what": what}, moment)

    def fire(self, id: int, **changes: Any) -> None:
        """Fire a row; `changes`: its columns in the ledger before."""
        self.evidence.ledger[id] = row = replace(self.evidence.ledger[id], **changes)
        policy, order = row.policy.rpartition(".")[2], int(row.object_id)
        self.write(id, policy, order, row.due_at, "fired")
        self.affect(id, row.due_at + timedelta(milliseconds=5), "key" if policy == "send_outside" else "")
        if policy == "cancel_unpaid":
            self.evidence.orders[order] = "cancelled"
        self.evidence.committed[f"firing of {id}"] = (0, "")  # only so that the next transaction has another name
        self.evidence.operations.append(Operation(f"firing of {id}", "", "done", ({"verb": "cancel_many", **UNOWNED},)))

    @property
    def kinds(self) -> set[str]:
        return {violation.kind for violation in judge(self.evidence)}


@pytest.fixture
def outcome() -> Outcome:
    """Orders 1 (cancelled in the end), 2 (paid), 3 (reminded after a move), 4 (its reminder cancelled)."""
    outcome = Outcome()
    for order in (1, 2, 3, 4):
        outcome.place(order, 10)
    outcome.remind(33, 3, 5)
    outcome.remind(44, 4, 5)
    outcome.remind(33, 3, 8, "move")
    outcome.cancel(44, 4)
    outcome.pay(2)
    for id in (33, 1, 3, 4):
        outcome.fire(id)
    return outcome


def test_a_sound_outcome_is_no_violation(outcome: Outcome) -> None:
    assert judge(outcome.evidence) == []


def skip_unpaid(outcome: Outcome) -> None:
    outcome.place(5, 10)
    outcome.write(5, "cancel_unpaid", 5, at(10), "skipped")


def save_and_never_arm(outcome: Outcome) -> None:
    outcome.evidence.orders[6] = "unpaid"
    outcome.note("order", None, {"id": 6, "note": "out-1", "created_at": NOON.isoformat()})


def fire_a_second_row(outcome: Outcome) -> None:
    outcome.write(66, "remind", 3, at(8), "pending")
    outcome.fire(66)


def act_outside_under_two_keys(outcome: Outcome) -> None:
    outcome.write(77, "send_outside", 3, at(5), "pending")
    outcome.operate(given("schedule", 3, 5, "send_outside"))
    outcome.fire(77)
    outcome.affect(77, at(6), "key")
    assert outcome.kinds == set(), "at least once, under one key"
    outcome.affect(77, at(6), "another")


def lose_the_effect(outcome: Outcome) -> None:
    outcome.evidence.effects = [effect for effect in outcome.evidence.effects if effect.timeout_id != 33]
    notes = outcome.evidence.notes
    outcome.evidence.notes = [note for note in notes if not (note.after and note.after.get("timeout_id") == 33)]


def settle_again(outcome: Outcome) -> None:
    before = columns(outcome.evidence.ledger[44])
    outcome.note("timeout", before, {**before, "state": "pending"})


def leave_what_was_rolled_back(outcome: Outcome) -> None:
    rolled_back = outcome.fail("undone")
    assert outcome.kinds == set()
    outcome.write(99, "remind", 1, at(5), "cancelled")
    outcome.note("timeout", None, {**columns(outcome.evidence.ledger[99]), "reason": rolled_back})


def leave_what_a_savepoint_rolled_back(outcome: Outcome) -> None:
    id = next(iter(outcome.evidence.committed))
    outcome.note("order", None, {"id": 1, "note": f"half-{id}", "created_at": NOON.isoformat()})


def answer_an_earlier_deadline(outcome: Outcome) -> None:
    outcome.write(88, "remind", 1, at(5), "pending")
    outcome.operate(given("schedule", 1, 5, answer=4.9, heard=1))
    outcome.fire(88)


DOCTORED: dict[str, tuple[Callable[[Outcome], object], str]] = {
    "a row is still pending": (lambda now: now.remind(55, 4, 5), "lost"),
    "no row at all": (lambda now: now.operate(given("schedule", 4, 5)), "lost"),
    "a commit that was answered": (lambda now: now.fail("done"), "lost"),
    "a row was deleted": (lambda now: now.note("timeout", columns(now.evidence.ledger[33]), None), "lost"),
    "skipped, although unpaid": (skip_unpaid, "lost"),
    "saved in two commits, and never armed": (save_and_never_arm, "lost"),
    "two effects of one timeout": (lambda now: now.affect(33, at(9)), "doubled, effect without fired"),
    "two rows fired for one round": (fire_a_second_row, "doubled"),
    "an outside effect under two keys": (act_outside_under_two_keys, "doubled"),
    "early by the clock of the effect": (lambda now: now.change("effect", 1, at=at(9.999)), "early"),
    "early by the clock of the mark": (lambda now: now.change("timeout", 1, asked_at=at(9.999)), "early"),
    "moved, and fired at the old deadline": (lambda now: now.change("effect", 33, at=at(5.1)), "early"),
    "fired after its cancel": (lambda now: now.fire(44, state="pending"), "after cancel"),
    "fired after an accepted payment": (lambda now: now.fire(2, state="pending"), "after cancel, order"),
    "an effect of a cancelled row": (
        lambda now: now.evidence.ledger.update({33: replace(now.evidence.ledger[33], state="cancelled")}),
        "effect without fired",
    ),
    "an effect in another transaction": (
        lambda now: now.change("effect", 33, xid="another"),
        "effect without fired, fired without effect",
    ),
    "an effect of an unknown timeout": (lambda now: now.evidence.ledger.pop(33), "effect without fired, lost"),
    "fired without effect": (lose_the_effect, "fired without effect, lost"),
    "settled again": (settle_again, "settled again"),
    "an order disagrees with the ledger": (lambda now: now.evidence.orders.update({1: "unpaid"}), "order"),
    "the guard let a payment through too late": (
        lambda now: now.operate(claim("pay", 1, "cancel_unpaid", answer="was cancelled")),
        "answer",
    ),
    "a payment was refused in time": (
        lambda now: now.operate(claim("pay", 2, "cancel_unpaid", answer="too late")),
        "answer",
    ),
    "a cancel that came too late": (lambda now: now.operate(claim("cancel", 3, "remind", answer=True)), "answer"),
    "a wrong count of a bulk verb": (
        lambda now: now.operate({**UNOWNED, "verb": "cancel_many", "orders": [1, 2], "answer": 1}),
        "answer",
    ),
    "an earlier deadline": (answer_an_earlier_deadline, "answer"),
    "a transaction was rolled back": (leave_what_was_rolled_back, "phantom"),
    "a savepoint was rolled back": (leave_what_a_savepoint_rolled_back, "phantom"),
    "dead, although its handler has not failed": (lambda now: now.write(99, "remind", 1, at(5), "dead"), "dead"),
    "an unexpected exception": (lambda now: now.fail("failed", "ValueError"), "error"),
    "a deadlock": (lambda now: now.fail("resolved", "deadlock"), "deadlock"),
    "a change by another installation": (lambda now: now.change("timeout", 1, by_user="intruder"), "intrusion"),
    "no journal knows it": (lambda now: now.evidence.committed.update({"c" * 32: (1000, "1000")}), "journal"),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_each_violation_is_found(outcome: Outcome, what: str) -> None:
    doctor, kinds = DOCTORED[what]
    doctor(outcome)
    assert outcome.kinds == set(kinds.split(", "))


@pytest.mark.parametrize(
    ("answer", "asked", "heard", "kinds"),
    [
        ("too late", 9.8, 9.9, {"answer"}),
        ("too late", 9.9, 10.1, set()),
        ("paid", 9.9, 10.1, set()),
        ("paid", 10.1, 10.2, {"answer"}),
    ],
)
def test_a_strict_guard_that_decides_against_the_deadline(
    outcome: Outcome, answer: str, asked: float, heard: float, kinds: set[str]
) -> None:
    outcome.place(5, 10)
    times = {"asked": at(asked).isoformat(), "heard": at(heard).isoformat()}
    outcome.operate(claim("pay_in_time", 5, "cancel_unpaid", answer=answer, **times))
    if answer == "paid":
        outcome.evidence.orders[5] = "paid"
        outcome.write(5, "cancel_unpaid", 5, at(10), "cancelled")
    else:
        outcome.fire(5)
    assert outcome.kinds == kinds


@pytest.mark.parametrize(
    ("began", "effect", "kinds"),
    [(5.9, 6.5, set()), (6.1, 6.5, {"while stopped"}), (6.9, 7.1, set()), (7.1, 7.2, set())],
)
@pytest.mark.parametrize("ending", ["until", "resume"])
def test_an_effect_while_its_policy_was_certainly_paused(
    outcome: Outcome, began: float, effect: float, kinds: set[str], ending: str
) -> None:
    outcome.remind(55, 4, 5)
    outcome.stop("pause", 6, until=at(7 if ending == "until" else 90).isoformat())
    if ending == "resume":
        outcome.stop("resume", 7.1)
    outcome.fire(55)
    outcome.change("effect", 55, began_at=at(began), at=at(effect))
    assert outcome.kinds == kinds


@pytest.mark.parametrize(("effect", "kinds", "again"), [(10.8, {"early"}, 0), (11.0, set(), 0), (11.2, set(), 1)])
def test_early_after_a_hold_that_moved_a_deadline(outcome: Outcome, effect: float, kinds: set[str], again: int) -> None:
    outcome.remind(55, 4, 9, began_at=at(1), ended_at=at(2))
    outcome.stop("hold", 6)
    outcome.stop("resume", 8.1)
    for verb in ("hold", "resume") * again:  # the second hold has waited for the lock of the resume
        outcome.stop(verb, 8.3, took=0.5)
    outcome.fire(55)
    outcome.change("effect", 55, began_at=at(8.5), at=at(effect + 0.05))
    assert outcome.kinds == kinds


def test_an_uncertain_operation_counts_if_the_database_has_it(outcome: Outcome) -> None:
    id = outcome.fail("uncertain", "", given("schedule", 4, 5))
    assert outcome.kinds == set()
    outcome.evidence.committed[id] = (1000, "1000")
    assert outcome.kinds == {"lost"}
