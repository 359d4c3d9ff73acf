"""Lock, then check: which of some timeouts may be fired now, with their objects locked and fresh."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django_delayq.firing.checkpoints import reach
from django_delayq.firing.objects import lock_objects_of
from django_delayq.firing.report import Candidate, Findings
from django_delayq.ledger import settling
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from django.db.models import Model

    from django_delayq.policies import TimeoutPolicy


@dataclass(slots=True)
class Member:
    """A timeout that may be fired now, and its object, both locked."""

    row: Timeout
    obj: Model
    place: int
    """Where the object stands in the order of keys."""
    seen: dict[str, Any] = field(init=False)
    """What the row said before it was marked: what a later transaction compares, should this one be undone."""

    def __post_init__(self) -> None:
        self.seen = {name: getattr(self.row, name) for name in ("state", "attempts", "run_at", "idempotency_key")}
        Timeout._meta.get_field("content_object").set_cached_value(self.row, self.obj)


@dataclass(slots=True)
class Taken:
    """What locking and checking found."""

    now: datetime
    ready: list[Member] = field(default_factory=list)
    gone: list[Timeout] = field(default_factory=list)
    unmet: list[Timeout] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)


def take(policy: TimeoutPolicy[Any], candidates: Sequence[Candidate], using: str, findings: Findings) -> Taken:
    """Lock the objects, then the rows, then ask the condition; what cannot be fired now goes to `findings`.

    Waits for no lock. The condition is a statement of its own, after the lock: joined into the locking one,
    PostgreSQL refuses outer joins, and to-many look-ups find a row twice.
    """
    objects, held = lock_objects_of(policy, candidates, using)
    reach("locked")
    free = [candidate for candidate in candidates if candidate.id not in held]
    rows, now = settling.lock_rows([candidate.id for candidate in free], using, policy=policy)
    taken = Taken(now)
    findings.now = now
    due = _sorted_out(policy, free, rows, taken, findings)
    if due and vars(due[0])["is_stopped"]:
        _put_aside(due, policy, using, findings)
        due = []
    places = {timeout_id: place for place, timeout_id in enumerate(objects)}
    matching = _matching(policy, [objects[row.pk].pk for row in due if row.pk in objects], using)
    for row in due:
        obj = objects.get(row.pk)
        if obj is None:
            taken.gone.append(row)
        elif obj.pk in matching:
            taken.ready.append(Member(row, obj, places[row.pk]))
        else:
            taken.unmet.append(row)
    findings.put_back(held, using, "others hold its object")
    findings.put_back((candidate.id for candidate in free if candidate.id not in rows), using, "others hold its row")
    reach("checked")
    return taken


def _sorted_out(
    policy: TimeoutPolicy[Any],
    candidates: Sequence[Candidate],
    rows: dict[int, Timeout],
    taken: Taken,
    findings: Findings,
) -> list[Timeout]:
    """Those of `rows` that are pending and due by the database's clock, in the order of `candidates`."""
    due = []
    for candidate in candidates:
        row = rows.get(candidate.id)
        if row is None:  # held by somebody, or deleted by hand: the next plan will see which
            continue
        if row.is_settled:
            findings.done.append(row.pk)
        elif row.run_at > taken.now:  # moved meanwhile, or a hint that came early; if firing: until it expires
            findings.again[row.pk] = row.run_at
        elif row.state == Timeout.State.FIRING:
            taken.expired.append(row.pk)
        elif row.object_id != candidate.object_id or row.policy not in policy.labels:  # a forged or stale work
            findings.again[row.pk] = taken.now
        else:
            due.append(row)
    return due


def _put_aside(rows: Sequence[Timeout], policy: TimeoutPolicy[Any], using: str, findings: Findings) -> None:
    """`rows` come again when it is worth a look whether `policy` goes on: at once if it does so just now."""
    stopped, now = stop_cache.read(using), findings.moment()
    for row in rows:
        findings.again[row.pk] = stopped.recheck_at(policy.label, now)
        findings.blameless.add(row.pk)


def _matching(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> set[Any]:
    """Those of the locked `pks` for which `when` holds now; a set, as a to-many look-up finds some twice."""
    if not policy.when or not pks:
        return set(pks)
    rows = policy.model._base_manager.using(using).filter(pk__in=pks).filter(policy.when)
    return set(rows.order_by().values_list("pk", flat=True))
