"""What is known after a run: the producers' journals and plain SELECTs. Nothing here knows the product's code."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.e2e.chaos import journal
from tests.e2e.chaos.databases import Database

NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a producer, as its journal has it."""

    id: str
    name: str
    last_step: str
    claims: Sequence[Mapping[str, Any]] = ()
    words: str = ""
    producer: str = ""
    began_at: datetime = NEVER
    ended_at: datetime = NEVER
    """When its outcome was known: after the answer to its COMMIT."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the ledger as it is in the end."""

    id: int
    policy: str
    object_id: str
    key: str
    state: str
    cause: str
    due_at: datetime
    is_settled: bool
    late: float = 0.0
    """Seconds from its deadline to its settling."""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect that is there in the end."""

    timeout_id: int | None
    what: str
    object_id: str
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Note:
    """What the database noted of one change; see `audit`.

    `asked_at`: when the statement began; `began_at`: when its transaction began.
    """

    number: int
    at: datetime
    asked_at: datetime
    xid: str
    kind: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    began_at: datetime = NEVER
    by_user: str = ""


@dataclass(slots=True)
class Evidence:
    """Everything that the oracle judges by."""

    operations: list[Operation] = field(default_factory=list)
    committed: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number and transaction of the operations that the database has, from their notes."""
    ledger: dict[int, Row] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    orders: dict[int, str] = field(default_factory=dict)
    """The state of each order that is there in the end."""
    notes: list[Note] = field(default_factory=list)
    released_at: datetime = NEVER
    """When the run began to resume the policies that producers had stopped."""


def gather(database: Database, journals: Iterable[Path], released_at: datetime) -> Evidence:
    """All there is, after everything has come to rest."""
    key = '"key"' if database.name != "mariadb" else "`key`"
    ledger = database.rows(
        f"SELECT id, policy, object_id, {key}, state, cause, due_at, settled_at, attempts FROM django_delayq_timeout"
    )
    notes = database.rows(
        "SELECT number, at, asked_at, xid, kind, was, became, began_at, by_user FROM chaos_note ORDER BY number"
    )
    effects = database.rows("SELECT timeout_id, what, object_id, idempotency_key FROM testapp_effect")
    evidence = Evidence(
        operations=[operation for path in journals for operation in _operations(path)],
        ledger={row[0]: _row(*row) for row in ledger},
        effects=[Effect(*effect) for effect in effects],
        orders=dict(database.rows("SELECT id, status FROM testapp_order")),
        notes=[_note(*note) for note in notes],
        released_at=released_at,
    )
    for note in evidence.notes:
        if note.kind == "operation" and note.after:
            evidence.committed[note.after["id"]] = (note.number, note.xid)
    return evidence


def _row(*values: Any) -> Row:
    id, policy, object_id, key, state, cause, due_at, settled_at, attempts = values
    due = moment(due_at)
    late = (moment(settled_at) - due).total_seconds() if settled_at else 0.0
    return Row(id, policy, object_id, key, state, cause, due, settled_at is not None, late, attempts)


def _note(*values: Any) -> Note:
    number, at, asked, xid, kind, was, became, began, user = values
    before, after = (json.loads(each) if isinstance(each, str) else each for each in (was, became))
    return Note(number, moment(at), moment(asked), xid, kind, before, after, moment(began), user)


def moment(value: Any) -> datetime:
    """Return a datetime of the database, which PostgreSQL alone stores with its zone, as an aware one."""
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _operations(path: Path) -> Iterator[Operation]:
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in journal.read(path):
        lines[line["operation"]].append(line)
    for id, steps in lines.items():
        began_at, ended_at = (datetime.fromtimestamp(steps[end]["at"], UTC) for end in (0, -1))
        all_of_them = {name: value for line in steps for name, value in line.items()}
        claims, error = all_of_them.get("claims", ()), all_of_them.get("error", "")
        producer = path.name.rpartition("-")[2]
        yield Operation(id, steps[0]["name"], steps[-1]["step"], claims, error, producer, began_at, ended_at)
