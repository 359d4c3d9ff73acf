"""The verdict on a run: which promises were broken, judged by evidence alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime

from tests.e2e.chaos.databases import INTRUDER
from tests.e2e.chaos.evidence import Evidence, Note, Operation
from tests.e2e.chaos.history import AT_LEAST_ONCE, History, Violation

SETTLED = {"fired", "skipped", "cancelled", "dead"}
IN_SHADOW = {"ghost"}
IN_TWO_COMMITS = {"place_outside_a_transaction", "place_unseen"}
_OPERATION = re.compile(r"(half-)?[0-9a-f]{32}")


def judge(evidence: Evidence) -> list[Violation]:
    """Every violation that the evidence shows; [] if every promise was kept."""
    history = History(evidence)
    history.replay()
    return [
        *history.violations,
        *_never_settled(evidence, history),
        *_orders(evidence, history),
        *_effects(evidence),
        *_transitions(evidence),
        *_firings(evidence),
        *_phantoms(evidence),
        *_operations(evidence),
        *_intrusions(evidence),
    ]


def _never_settled(evidence: Evidence, history: History) -> Iterator[Violation]:
    """Lost: a row that never settled, or a promise that has no row to show for it."""
    settled_otherwise = {
        (int(row.object_id), _name(row.policy), row.key)
        for row in evidence.ledger.values()
        if row.state == "dead" or (row.cause == "shadow" and _name(row.policy) in IN_SHADOW)
    }
    for row in evidence.ledger.values():
        if not row.is_settled:
            yield Violation("lost", f"timeout {row.id} ({row.policy} of {row.object_id}) is still {row.state}")
        if row.state == "dead" and _name(row.policy) not in AT_LEAST_ONCE:
            yield Violation("dead", f"timeout {row.id} ({row.policy} of {row.object_id}): {row.cause}")
    for subject in history.subjects.values():
        may_be_settled = subject.name[1] in AT_LEAST_ONCE | IN_SHADOW
        if subject.state == "pending" and not (may_be_settled and subject.name in settled_otherwise):
            yield Violation("lost", f"{subject}: accepted, due at {subject.deadline}, and never had its effect")


def _orders(evidence: Evidence, history: History) -> Iterator[Violation]:
    for order in sorted(evidence.orders.keys() | history.orders.keys()):
        there, expected = evidence.orders.get(order), history.orders.get(order)
        if there != expected:
            yield Violation("order", f"order {order} is {there}, and should be {expected}")


def _effects(evidence: Evidence) -> Iterator[Violation]:
    """Effect rows are fired rows, one for one; outside a transaction at least one, under one key."""
    counts = Counter(effect.timeout_id for effect in evidence.effects)
    for id, count in counts.items():
        row = evidence.ledger.get(id) if id is not None else None
        once = row is None or _name(row.policy) not in AT_LEAST_ONCE
        if once and count > 1:
            yield Violation("doubled", f"timeout {id} has {count} effects")
        if once and (row is None or row.state != "fired"):
            yield Violation("effect without fired", f"timeout {id} is {row.state if row else 'not in the ledger'}")
    for row in evidence.ledger.values():
        if row.state == "fired" and not counts[row.id]:
            yield Violation("fired without effect", f"timeout {row.id} ({row.policy} of {row.object_id})")
    keys: dict[int | None, set[str]] = defaultdict(set)
    for effect in evidence.effects:
        if effect.what in AT_LEAST_ONCE:
            keys[effect.timeout_id].add(effect.idempotency_key)
    for id, found in keys.items():
        if len(found) > 1 or "" in found:
            yield Violation("doubled", f"timeout {id} had its outside effects under {len(found)} idempotency keys")


def _transitions(evidence: Evidence) -> Iterator[Violation]:
    """Check that a row settles once, and fires when it is due by its own columns."""
    for note in evidence.notes:
        if note.kind != "timeout" or note.before is None:
            continue
        row, was = note.before["id"], note.before["state"]
        becomes = note.after["state"] if note.after else "deleted"
        if note.after is None:
            yield Violation("lost", f"timeout {row}, {was}, was deleted")
        elif was in SETTLED and becomes != was and (was, becomes) != ("dead", "cancelled"):
            yield Violation("settled again", f"timeout {row} went from {was} to {becomes}")
        elif was == "pending" and becomes in ("fired", "firing"):
            due = max(datetime.fromisoformat(note.before[name]) for name in ("due_at", "run_at"))
            if note.asked_at < due:
                yield Violation("early", f"timeout {row} was {becomes} at {note.asked_at}, before {due}")


def _firings(evidence: Evidence) -> Iterator[Violation]:
    """Check that the mark and the effect are in one transaction."""
    marks, effects = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for note in evidence.notes:
        after = note.after or {}
        if note.kind == "timeout" and _turned(note, "fired") and _name(after["policy"]) not in AT_LEAST_ONCE:
            marks[after["id"], note.xid] += 1
        elif note.kind == "effect" and note.before is None and after["what"] not in AT_LEAST_ONCE:
            effects[after["timeout_id"], note.xid] += 1
    for id, xid in effects - marks:
        yield Violation("effect without fired", f"timeout {id} had one in transaction {xid}, which did not mark it")
    for id, xid in marks - effects:
        yield Violation("fired without effect", f"timeout {id} was marked in transaction {xid}")


def _turned(note: Note, state: str) -> bool:
    return bool(note.after and note.after["state"] == state and (note.before or {}).get("state") != state)


def _name(policy: str) -> str:
    return policy.rpartition(".")[2]


def _phantoms(evidence: Evidence) -> Iterator[Violation]:
    """Check that rolled back transactions left neither a timeout nor an order."""
    for note in evidence.notes:
        before, after = note.before or {}, note.after or {}
        if note.kind == "timeout" and after and before.get("idempotency_key") != after["idempotency_key"]:
            name = after["reason"]
        elif note.kind == "order" and not before:
            name = after["note"]
        else:
            continue
        if _OPERATION.fullmatch(name) and evidence.committed.get(name, (0, ""))[1] != note.xid:
            yield Violation("phantom", f"{note.kind} {after['id']} stems from {name}, which was not committed")


def _intrusions(evidence: Evidence) -> Iterator[Violation]:
    """Check that no worker of another installation has changed anything."""
    for note in evidence.notes:
        if note.by_user == INTRUDER:
            yield Violation("intrusion", f"a worker of another installation changed {note.kind} {note.after}")


def _operations(evidence: Evidence) -> Iterator[Violation]:
    """Check that committed changes exist, rolled back ones do not, and that there were no unexpected errors."""
    outside = {note.after["note"] for note in evidence.notes if note.kind == "order" and note.after}
    known = {operation.id for operation in evidence.operations}
    for unknown in evidence.committed.keys() - known:
        yield Violation("journal", f"operation {unknown} is in the database, and in no journal")
    for operation in evidence.operations:
        is_there = operation.id in evidence.committed
        if operation.name in IN_TWO_COMMITS:
            is_there = f"out-{operation.id}" in outside
        yield from _answered(operation, is_there=is_there)


def _answered(operation: Operation, *, is_there: bool) -> Iterator[Violation]:
    name = f"{operation.name} {operation.id}"
    if operation.last_step == "done" and not is_there:
        yield Violation("lost", f"{name}: its COMMIT was answered, and the database does not have it")
    if operation.last_step in ("undone", "failed") and is_there:
        yield Violation("phantom", f"{name}: it was rolled back, and the database has it")
    if operation.last_step == "failed":
        yield Violation("error", f"{name}: {operation.words}")
    if "deadlock" in operation.words:
        yield Violation("deadlock", f"{name}: {operation.words}")
