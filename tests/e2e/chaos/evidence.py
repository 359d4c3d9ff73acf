"""What is known after a run: the producers' journals and plain SELECTs. Nothing here knows the product's code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from tests.e2e.chaos import journal

NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a producer, as its journal has it."""

    id: str
    deed: str
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


@dataclass(slots=True)
class Evidence:
    """Everything that the oracle judges by."""

    operations: list[Operation] = field(default_factory=list)
    committed: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Number and transaction of the operations that the database has."""
    ledger: dict[int, Row] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    orders: dict[int, str] = field(default_factory=dict)
    """The state of each order that is there in the end."""
    notes: list[Note] = field(default_factory=list)
    released_at: datetime = NEVER
    """When the run began to resume the policies that producers had stopped."""


def gather(connection: psycopg.Connection[Any], journals: Iterable[Path], released_at: datetime) -> Evidence:
    """All there is, after everything has come to rest."""

    def rows(sql: str) -> list[tuple[Any, ...]]:
        return connection.execute(sql).fetchall()

    ledger = rows(
        "SELECT id, policy, object_id, key, state, cause, due_at, settled_at IS NOT NULL, "
        "coalesce(extract(epoch FROM settled_at - due_at), 0)::float, attempts FROM django_delayq_timeout"
    )
    notes = rows("SELECT number, at, asked_at, xid, kind, before, after, began_at FROM chaos_note ORDER BY number")
    effects = rows("SELECT timeout_id, what, object_id, idempotency_key FROM testapp_effect")
    return Evidence(
        operations=[operation for path in journals for operation in _operations(path)],
        committed={id: (number, xid) for id, number, xid in rows("SELECT id, number, xid FROM chaos_operation")},
        ledger={row[0]: Row(*row) for row in ledger},
        effects=[Effect(*effect) for effect in effects],
        orders=dict(rows("SELECT id, status FROM testapp_order")),
        notes=[Note(*note) for note in notes],
        released_at=released_at,
    )


def _operations(path: Path) -> list[Operation]:
    producer = path.name.rpartition("-")[2]
    found: dict[str, dict[str, Any]] = {}
    for line in journal.read(path):
        known = found.setdefault(line["operation"], {"deed": "", "claims": (), "words": ""})
        known["step"] = line["step"]
        known["ended_at"] = datetime.fromtimestamp(line["at"], UTC)
        known.setdefault("began_at", known["ended_at"])
        known.update({name: line[name] for name in ("deed", "claims") if name in line})
        known["words"] = line.get("error") or line.get("why") or known["words"]
    return [
        Operation(
            id,
            known["deed"],
            known["step"],
            tuple(known["claims"]),
            known["words"],
            producer,
            known["began_at"],
            known["ended_at"],
        )
        for id, known in found.items()
    ]
