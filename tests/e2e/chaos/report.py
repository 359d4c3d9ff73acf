"""The result of a run, as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.e2e.chaos.crew import WITHOUT_REDIS
from tests.e2e.chaos.databases import CELERY
from tests.e2e.chaos.evidence import Evidence, Operation
from tests.e2e.chaos.history import Violation

SHOWN = 20
PROMISES = ("lost", "doubled", "early", "after cancel")
"""The kinds of violations that the verdict counts one by one."""


@dataclass(slots=True)
class Result:
    """What a run was, and what came of it."""

    seed: int
    seconds: float
    drained_after: float | None
    evidence: Evidence
    violations: list[Violation]
    faults: Mapping[str, int]
    cuts: Mapping[str, int]
    ends: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        operations = self.evidence.operations
        steps = Counter(map(self._outcome, operations))
        without_push = sum(each.producer == WITHOUT_REDIS and bool(each.claims) for each in operations)
        states = Counter(row.state for row in self.evidence.ledger.values())
        drained = "never" if self.drained_after is None else f"after {self.drained_after:.1f} s"
        lines = [
            f"chaos  seed {self.seed}  {self.seconds:.0f} s of faults, drained {drained}",
            f"operations  {len(operations)}: {_told(steps)}",
            f"timeouts  {len(self.evidence.ledger)}: {_told(states)}; effects {len(self.evidence.effects)}",
            f"latest  {self._latest()}",
            f"faults  {sum(self.faults.values())}: {_told(self.faults)}",
            f"connections cut  {sum(self.cuts.values())}: {_told(self.cuts)}",
            f"pushes never made  {without_push} operations' worth",
            f"workers  {_told(self.ends)}; effects by Celery {self.by_celery}",
            f"violations  {len(self.violations)}: {_told(Counter(one.kind for one in self.violations))}",
            *(f"  {one}" for one in self.violations[:SHOWN]),
        ]
        return "\n".join(lines)

    @property
    def by_celery(self) -> int:
        """Return how many effects processes of Celery had."""
        return sum(note.kind == "effect" and note.by_user == CELERY for note in self.evidence.notes)

    @property
    def verdict(self) -> str:
        """Return one line, aligned with those of other runs."""
        kinds = Counter(one.kind for one in self.violations)
        counts = {name: kinds[name] for name in PROMISES}
        counts["other"] = len(self.violations) - sum(counts.values())
        broken = ", ".join(f"{name} {count}" for name, count in counts.items())
        return (
            f"{'FAILED' if self.violations else 'passed'}  seed {self.seed:<10} {broken};"
            f" timeouts {len(self.evidence.ledger):5}, effects {len(self.evidence.effects):5},"
            f" faults {sum(self.faults.values()):3}, connections cut {sum(self.cuts.values()):4}"
        )

    def _latest(self) -> str:
        """Return the timeout that fired latest after its deadline, to explain a slow run."""
        fired = (row for row in self.evidence.ledger.values() if row.state == "fired")
        row = max(fired, key=lambda row: row.late, default=None)
        if row is None:
            return "none"
        return f"timeout {row.id} ({row.policy}), {row.late:.1f} s after its deadline, at attempt {row.attempts}"

    def _outcome(self, operation: Operation) -> str:
        if operation.last_step not in ("resolved", "uncertain", "commit", "begin"):
            return operation.last_step
        return "uncertain, committed" if operation.id in self.evidence.committed else "uncertain, not committed"


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
