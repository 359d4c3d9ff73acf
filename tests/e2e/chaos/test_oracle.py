"""The oracle can fail: one sound outcome, then the same doctored in one way at a time, and each is found out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.e2e.chaos.evidence import Effect, Evidence, Note, Operation, Row
from tests.e2e.chaos.oracle import judge

NOON, HALF_AN_HOUR = datetime(2026, 1, 1, 12, tzinfo=UTC), timedelta(minutes=30)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


class Outcome:
    """Evidence made by hand. Its verbs add what a sound product would leave behind, one transaction each."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._number = 0

    def note(self, kind: str, before: Any, after: Any, moment: datetime = NOON) -> None:
        self._number += 1
        xid = str(len(self.evidence.committed))
        self.evidence.notes.append(Note(self._number, moment, moment, xid, kind, before, after))

    def operate(self, *claims: dict[str, Any], step: str = "done") -> None:
        """Add the operation whose changes were just recorded."""
        self._number += 1
        id = f"{self._number:032x}"
        self.evidence.operations.append(Operation(id, "operation", step, claims))
        self.evidence.committed[id] = (self._number, str(len(self.evidence.committed)))

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
        self.operate(claim("place", order, "cancel_unpaid", since=since))

    def remind(self, id: int, order: int, due: float) -> None:
        self.write(id, "remind", order, at(due), "pending")
        moment = at(due).isoformat()
        self.operate(claim("schedule", order, "remind", deadline=moment, answer=moment, heard=moment))

    def move(self, id: int, order: int, due: float) -> None:
        self.write(id, "remind", order, at(due), "pending")
        moment = at(due).isoformat()
        self.operate(claim("move", order, "remind", deadline=moment, answer=moment, heard=moment))

    def cancel(self, id: int, order: int, policy: str = "remind") -> None:
        self.write(id, policy, order, self.evidence.ledger[id].due_at, "cancelled")
        self.operate(claim("cancel", order, policy, answer=True))

    def pay(self, order: int) -> None:
        self.evidence.orders[order] = "paid"
        self.write(order, "cancel_unpaid", order, self.evidence.ledger[order].due_at, "cancelled")
        self.operate(claim("pay", order, "cancel_unpaid", answer="paid"))

    def affect(self, id: int, moment: datetime, idempotency_key: str = "") -> None:
        """Record the effect of the handler."""
        row = self.evidence.ledger[id]
        what = row.policy.rpartition(".")[2]
        self.evidence.effects.append(Effect(id, what, row.object_id, idempotency_key))
        self.note("effect", None, {"timeout_id": id, "what": what}, moment)

    def fire(self, id: int) -> None:
        row = self.evidence.ledger[id]
        policy, order = row.policy.rpartition(".")[2], int(row.object_id)
        self.write(id, policy, order, row.due_at, "fired")
        self.affect(id, row.due_at + timedelta(milliseconds=5), "key" if policy == "send_outside" else "")
        if policy == "cancel_unpaid":
            self.evidence.orders[order] = "cancelled"
        self.evidence.committed[f"firing of {id}"] = (0, "")  # only so that the next transaction has another name
        self.evidence.operations.append(Operation(f"firing of {id}", "", "done", ({"verb": "cancel_many", **NOBODY},)))

    @property
    def kinds(self) -> set[str]:
        return {violation.kind for violation in judge(self.evidence)}


NOBODY = {"policy": "gather", "key": "", "orders": [], "answer": 0}


def claim(verb: str, order: int, policy: str, **what: Any) -> dict[str, Any]:
    return {"verb": verb, "order": order, "policy": policy, "key": "", **what}


def columns(row: Row) -> dict[str, Any]:
    due = row.due_at.isoformat()
    return {
        "id": row.id,
        "policy": row.policy,
        "state": row.state,
        "due_at": due,
        "run_at": due,
        "idempotency_key": "key",
        "reason": "",
    }


@pytest.fixture
def outcome() -> Outcome:
    """Orders 1 (cancelled in the end), 2 (paid), 3 (reminded after a move), 4 (its reminder cancelled)."""
    outcome = Outcome()
    for order in (1, 2, 3, 4):
        outcome.place(order, 10)
    outcome.remind(33, 3, 5)
    outcome.remind(44, 4, 5)
    outcome.move(33, 3, 8)
    outcome.cancel(44, 4)
    outcome.pay(2)
    for id in (33, 1, 3, 4):
        outcome.fire(id)
    return outcome


def drop_effect(outcome: Outcome, id: int) -> None:
    outcome.evidence.effects = [effect for effect in outcome.evidence.effects if effect.timeout_id != id]
    notes = outcome.evidence.notes
    outcome.evidence.notes = [note for note in notes if not (note.after and note.after.get("timeout_id") == id)]


def change_notes(outcome: Outcome, kind: str, id_name: str, id: int, **values: Any) -> None:
    """All notes of the kind about `id`."""
    notes = outcome.evidence.notes
    for index, note in enumerate(notes):
        if note.kind == kind and note.after and note.after.get(id_name) == id:
            notes[index] = replace(note, **values)


def test_a_sound_outcome_is_no_violation(outcome: Outcome) -> None:
    assert judge(outcome.evidence) == []


def test_lost_a_row_that_is_still_pending(outcome: Outcome) -> None:
    outcome.remind(55, 4, 5)
    assert outcome.kinds == {"lost"}


def test_lost_an_accepted_timeout_that_left_no_row_at_all(outcome: Outcome) -> None:
    moment = at(5).isoformat()
    outcome.operate(claim("schedule", 4, "remind", deadline=moment, answer=moment, heard=moment))
    assert outcome.kinds == {"lost"}


def test_lost_a_commit_that_was_answered(outcome: Outcome) -> None:
    outcome.evidence.operations.append(Operation("f" * 32, "place", "done", ()))
    assert outcome.kinds == {"lost"}


def test_lost_a_row_that_was_deleted(outcome: Outcome) -> None:
    outcome.note("timeout", columns(outcome.evidence.ledger[33]), None)
    assert outcome.kinds == {"lost"}


def test_lost_an_order_whose_timeout_was_skipped_although_nobody_had_paid(outcome: Outcome) -> None:
    outcome.place(5, 10)
    outcome.write(5, "cancel_unpaid", 5, at(10), "skipped")
    assert outcome.kinds == {"lost"}


def test_lost_an_order_saved_in_two_commits_that_was_never_armed(outcome: Outcome) -> None:
    outcome.evidence.orders[6] = "unpaid"
    outcome.note("order", None, {"id": 6, "note": "out-1", "created_at": NOON.isoformat()})
    assert outcome.kinds == {"lost"}


def test_doubled_two_effects_of_one_timeout(outcome: Outcome) -> None:
    outcome.affect(33, at(9))
    assert "doubled" in outcome.kinds


def test_doubled_two_rows_fired_for_one_round(outcome: Outcome) -> None:
    outcome.write(66, "remind", 3, at(8), "pending")
    outcome.fire(66)
    assert outcome.kinds == {"doubled"}


def test_doubled_an_outside_effect_under_two_keys(outcome: Outcome) -> None:
    outcome.write(77, "send_outside", 3, at(5), "pending")
    moment = at(5).isoformat()
    outcome.operate(claim("schedule", 3, "send_outside", deadline=moment, answer=moment, heard=moment))
    outcome.fire(77)
    outcome.affect(77, at(6), "key")
    assert outcome.kinds == set(), "at least once, under one key"
    outcome.affect(77, at(6), "another")
    assert outcome.kinds == {"doubled"}


def test_early_by_the_clock_of_the_effect(outcome: Outcome) -> None:
    change_notes(outcome, "effect", "timeout_id", 1, at=at(9.999))
    assert outcome.kinds == {"early"}


def test_early_by_the_clock_of_the_mark(outcome: Outcome) -> None:
    change_notes(outcome, "timeout", "id", 1, asked_at=at(9.999))
    assert outcome.kinds == {"early"}


def test_early_a_moved_one_that_fired_at_its_old_deadline(outcome: Outcome) -> None:
    """Also if the ledger has forgotten the move: the producer's journal has not."""
    change_notes(outcome, "effect", "timeout_id", 33, at=at(5.1))
    assert outcome.kinds == {"early"}


def test_after_cancel(outcome: Outcome) -> None:
    outcome.evidence.ledger[44] = replace(outcome.evidence.ledger[44], state="pending")
    outcome.fire(44)
    assert outcome.kinds == {"after cancel"}


def test_after_an_accepted_payment(outcome: Outcome) -> None:
    outcome.evidence.ledger[2] = replace(outcome.evidence.ledger[2], state="pending")
    outcome.fire(2)
    assert outcome.kinds == {"after cancel", "order"}


def test_effect_without_fired(outcome: Outcome) -> None:
    outcome.evidence.ledger[33] = replace(outcome.evidence.ledger[33], state="cancelled")
    assert outcome.kinds == {"effect without fired"}


def test_effect_without_fired_in_the_same_transaction(outcome: Outcome) -> None:
    change_notes(outcome, "effect", "timeout_id", 33, xid="another")
    assert outcome.kinds == {"effect without fired", "fired without effect"}


def test_effect_of_a_timeout_that_the_ledger_does_not_know(outcome: Outcome) -> None:
    del outcome.evidence.ledger[33]
    assert "effect without fired" in outcome.kinds


def test_fired_without_effect(outcome: Outcome) -> None:
    drop_effect(outcome, 33)
    assert outcome.kinds == {"fired without effect", "lost"}


def test_settled_again(outcome: Outcome) -> None:
    before = columns(outcome.evidence.ledger[44])
    outcome.note("timeout", before, {**before, "state": "pending"})
    assert outcome.kinds == {"settled again"}


def test_an_order_that_disagrees_with_the_ledger(outcome: Outcome) -> None:
    outcome.evidence.orders[1] = "unpaid"
    assert outcome.kinds == {"order"}


def test_a_payment_that_the_guard_let_through_too_late(outcome: Outcome) -> None:
    outcome.operate(claim("pay", 1, "cancel_unpaid", answer="was cancelled"))
    assert outcome.kinds == {"answer"}


def test_a_payment_that_was_refused_in_time(outcome: Outcome) -> None:
    outcome.operate(claim("pay", 2, "cancel_unpaid", answer="too late"))
    assert outcome.kinds == {"answer"}


@pytest.mark.parametrize(
    ("answer", "asked", "heard", "is_wrong"),
    [
        ("too late", 9.8, 9.9, True),
        ("too late", 9.9, 10.1, False),
        ("paid", 9.9, 10.1, False),
        ("paid", 10.1, 10.2, True),
    ],
)
def test_a_strict_guard_that_decides_against_the_deadline(
    outcome: Outcome, answer: str, asked: float, heard: float, is_wrong: bool
) -> None:
    outcome.place(5, 10)
    times = {"asked": at(asked).isoformat(), "heard": at(heard).isoformat()}
    outcome.operate(claim("pay_in_time", 5, "cancel_unpaid", answer=answer, **times))
    if answer == "paid":
        outcome.evidence.orders[5] = "paid"
        outcome.write(5, "cancel_unpaid", 5, at(10), "cancelled")
    else:
        outcome.fire(5)
    assert outcome.kinds == ({"answer"} if is_wrong else set())


def stop(outcome: Outcome, verb: str, seconds: float, *, took: float = 0.1, **what: Any) -> None:
    """Add an operation on `remind` that ended after so many seconds."""
    outcome.operate(claim(verb, 0, "remind", **what))
    operation = outcome.evidence.operations.pop()
    outcome.evidence.operations.append(replace(operation, began_at=at(seconds - took), ended_at=at(seconds)))


@pytest.mark.parametrize(
    ("began", "effect", "is_wrong"), [(5.9, 6.5, False), (6.1, 6.5, True), (6.9, 7.1, False), (7.1, 7.2, False)]
)
@pytest.mark.parametrize("ending", ["until", "resume"])
def test_an_effect_while_its_policy_was_certainly_paused(
    outcome: Outcome, began: float, effect: float, is_wrong: bool, ending: str
) -> None:
    outcome.remind(55, 4, 5)
    stop(outcome, "pause", 6, until=at(7 if ending == "until" else 90).isoformat())
    if ending == "resume":
        stop(outcome, "resume", 7.1)
    outcome.fire(55)
    change_notes(outcome, "effect", "timeout_id", 55, began_at=at(began), at=at(effect))
    assert outcome.kinds == ({"while stopped"} if is_wrong else set())


@pytest.mark.parametrize(("effect", "is_wrong", "again"), [(10.8, True, 0), (11.0, False, 0), (11.2, False, 1)])
def test_early_after_a_hold_that_moved_a_deadline(outcome: Outcome, effect: float, is_wrong: bool, again: int) -> None:
    outcome.remind(55, 4, 9)
    outcome.evidence.operations.append(replace(outcome.evidence.operations.pop(), began_at=at(1), ended_at=at(2)))
    stop(outcome, "hold", 6)
    stop(outcome, "resume", 8.1)
    for verb in ("hold", "resume") * again:  # the second hold has waited for the lock of the resume
        stop(outcome, verb, 8.3, took=0.5)
    outcome.fire(55)
    change_notes(outcome, "effect", "timeout_id", 55, began_at=at(8.5), at=at(effect + 0.05))
    assert outcome.kinds == ({"early"} if is_wrong else set())


@pytest.mark.parametrize(("order", "policy", "answer"), [(3, "remind", True), (4, "remind", False)])
def test_a_wrong_answer_to_a_cancel(outcome: Outcome, order: int, policy: str, answer: bool) -> None:
    outcome.operate(claim("cancel", order, policy, answer=answer))
    assert outcome.kinds == {"answer"}


def test_a_wrong_count_of_a_bulk_verb(outcome: Outcome) -> None:
    outcome.operate({**NOBODY, "verb": "cancel_many", "orders": [1, 2], "answer": 1})
    assert outcome.kinds == {"answer"}


@pytest.mark.parametrize(("verb", "seconds"), [("schedule", 4.9), ("schedule", 5.1), ("refire", 4.9)])
def test_a_wrong_deadline(outcome: Outcome, verb: str, seconds: float) -> None:
    outcome.write(88, "remind", 1, at(5), "pending")
    told = {"deadline": at(5).isoformat(), "answer": at(seconds).isoformat(), "heard": at(1).isoformat()}
    outcome.operate(claim(verb, 1, "remind", **told))
    outcome.fire(88)
    assert "answer" in outcome.kinds


def test_a_phantom_of_a_transaction_that_was_rolled_back(outcome: Outcome) -> None:
    rolled_back = "e" * 32
    outcome.evidence.operations.append(Operation(rolled_back, "remind", "undone", ()))
    assert outcome.kinds == set()
    outcome.write(99, "remind", 1, at(5), "cancelled")
    outcome.note("timeout", None, {**columns(outcome.evidence.ledger[99]), "reason": rolled_back})
    assert outcome.kinds == {"phantom"}


def test_a_phantom_of_a_savepoint_that_was_rolled_back(outcome: Outcome) -> None:
    id = next(iter(outcome.evidence.committed))
    outcome.note("order", None, {"id": 1, "note": f"half-{id}", "created_at": NOON.isoformat()})
    assert outcome.kinds == {"phantom"}


def test_dead_although_nobody_is_to_blame(outcome: Outcome) -> None:
    outcome.write(99, "remind", 1, at(5), "dead")
    assert outcome.kinds == {"dead"}


@pytest.mark.parametrize(
    ("step", "words", "kind"), [("failed", "ValueError", "error"), ("resolved", "deadlock", "deadlock")]
)
def test_an_operation_that_failed_as_it_should_not(outcome: Outcome, step: str, words: str, kind: str) -> None:
    outcome.evidence.operations.append(Operation("d" * 32, "cancel", step, (), words))
    assert outcome.kinds == {kind}


def test_a_change_by_a_worker_of_another_installation(outcome: Outcome) -> None:
    outcome.evidence.notes[0] = replace(outcome.evidence.notes[0], by_user="intruder")
    assert outcome.kinds == {"intrusion"}


def test_an_operation_that_no_journal_knows(outcome: Outcome) -> None:
    outcome.evidence.committed["c" * 32] = (1000, "1000")
    assert outcome.kinds == {"journal"}


@pytest.mark.parametrize("is_there", [True, False])
def test_an_uncertain_operation_counts_if_the_database_has_it(outcome: Outcome, is_there: bool) -> None:
    operation = Operation("b" * 32, "schedule", "uncertain", (TO_COME,))
    outcome.evidence.operations.append(operation)
    if is_there:
        outcome.evidence.committed[operation.id] = (1000, "1000")
    assert outcome.kinds == ({"lost"} if is_there else set())


_MOMENT = at(5).isoformat()
TO_COME = claim("schedule", 4, "remind", deadline=_MOMENT, answer=_MOMENT, heard=_MOMENT)
