"""One transaction that fires: lock, check, mark, call the handler, commit. Everything else is built on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from django.db import connections
from django.db.models import Case, Model, Q, Value, When

from django_delayq import signals
from django_delayq.firing.checkpoints import reach
from django_delayq.firing.failures import settle_dead_attempts
from django_delayq.firing.handler import call_handler, firing_transaction, guarded
from django_delayq.firing.overlap import OverlapDetector, StatementMonitor
from django_delayq.firing.report import MAX_ID, Candidate, ReportBuilder
from django_delayq.firing.state import TRANSIENT_MAX_SECONDS, Cost, firing_state
from django_delayq.key_types import pk_of, root_of_key
from django_delayq.ledger import settling
from django_delayq.ledger.controls import stop_cache
from django_delayq.ledger.db_errors import driver_connection_of, transient_reason
from django_delayq.ledger.locking import for_update, has_own_manager, lock_objects, rows_of
from django_delayq.ledger.statements import Param, compiled, padded
from django_delayq.models import Timeout
from django_delayq.outcomes import Outcome
from django_delayq.policies import TimeoutPolicy
from django_delayq.policy_rules import reads_other_rows

if TYPE_CHECKING:
    from django.db.models import QuerySet

Cause = Timeout.Cause
ALONE_AFTER_OVERLAP_SECONDS = 600.0


class LostRace(Exception):
    """The compare-and-set found fewer rows than were locked: one of them is not due after all."""


class Overlap(Exception):
    """A handler wrote what another member of its group had read before."""


@dataclass(slots=True)
class Member:
    """A timeout that may be fired now and its object, both locked."""

    row: Timeout
    obj: Model
    place: int
    """The position of the object in the order of keys."""
    seen: dict[str, Any] = field(init=False)
    """Columns of the row before it was marked. If this transaction rolls back, a later one compares them."""

    def __post_init__(self) -> None:
        self.seen = {name: getattr(self.row, name) for name in ("state", "attempts", "run_at", "idempotency_key")}
        Timeout._meta.get_field("content_object").set_cached_value(self.row, self.obj)


@dataclass(slots=True)
class Attempt:
    """One transaction over one or several timeouts of one policy. Its report counts only if it committed.

    Attributes:
        is_counted: an earlier transaction has counted this attempt.
        ready: the members whose handler runs.
        turn: the member whose handler ran last.
        driver_connection: the connection of the database driver when the first handler began.
        monitor: what the handlers did to the connection; None: none has run.
        expired: rows that were `firing` too long.
        cost: what the handlers cost.
        is_committed: the transaction has committed.
    """

    policy: TimeoutPolicy[Any]
    candidates: Sequence[Candidate]
    using: str
    is_counted: bool = False
    report: ReportBuilder = field(default_factory=ReportBuilder)
    ready: list[Member] = field(default_factory=list)
    turn: Member | None = None
    driver_connection: object = None
    monitor: StatementMonitor | None = None
    expired: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    cost: Cost = field(default_factory=Cost)
    is_committed: bool = False

    def fire(self, failed: Callable[[BaseException], ReportBuilder]) -> ReportBuilder:
        """Run the transaction and return its report.

        A transient error releases all candidates and counts no attempt. After any other error, which also rolled
        everything back, the report is what `failed` returns. If the connection was lost during COMMIT, the outcome is
        unknown: the next attempt finds it in the row.
        """
        return guarded(self._run, lambda error: self._released(error) or failed(error))

    def _run(self) -> ReportBuilder:
        with firing_transaction(self.using):
            reach("begun")
            now = self._lock_and_check()
            reach("checked")
            if self.ready:
                self._mark(now)
            reach("marked")
            if self.ready:
                self._call()
        self.is_committed = True
        reach("committed")
        sizes = firing_state.group_size(self.policy.label)
        if self.ready:
            sizes.record_success(len(self.ready), self.cost)
        if self.monitor and self.monitor.overlaps:  # only the last member did, which affected no other member
            sizes.fire_alone_for(ALONE_AFTER_OVERLAP_SECONDS)
        if self.expired:
            try:
                self.report.add(settle_dead_attempts(self.using, len(self.expired), self.expired))
            except Exception as error:  # noqa: BLE001 - the commit above must be reported
                self.report.release_unknown(self.policy.label, self.expired, error, self.using)
        return self.report

    def _lock_and_check(self) -> datetime:
        """Lock the objects, then the rows, then check the condition. Waits for no lock.

        The condition is a statement of its own after the locks: joined into the locking one, PostgreSQL refuses outer
        joins, and to-many look-ups find a row twice.
        """
        policy, using, report = self.policy, self.using, self.report
        objects, locked_elsewhere = _lock_objects_of(policy, self.candidates, using)
        reach("locked")
        free = [candidate for candidate in self.candidates if candidate.id not in locked_elsewhere]
        rows, now = settling.lock_rows([candidate.id for candidate in free], using, policy=policy)
        report.now = now
        due = self._due(free, rows, now)
        if due and vars(due[0])["is_stopped"]:
            report.release_rest((row.pk for row in due), stop_cache.read(using).recheck_at(policy.label, now))
            due = []
        places = {timeout_id: place for place, timeout_id in enumerate(objects)}
        matching = matching_of(policy, [objects[row.pk] for row in due if row.pk in objects], using)
        gone, unmet = [], []
        for row in due:
            obj = objects.get(row.pk)
            if obj is None:
                gone.append(row)
            elif obj.pk in matching:
                self.ready.append(Member(row, obj, places[row.pk]))
            else:
                unmet.append(row)
        for skipped, cause in ((gone, Cause.GONE), (unmet, Cause.CONDITION)):
            if skipped:
                settling.mark_skipped(skipped, cause, now, using)
                report.done += [row.pk for row in skipped]
                report.signals += [(signals.timeout_skipped, row) for row in skipped]
        report.release(locked_elsewhere, using, "another transaction has locked its object")
        missing = [candidate.id for candidate in free if candidate.id not in rows]
        report.release(missing, using, "another transaction has locked its row")
        return now

    def _due(self, candidates: Sequence[Candidate], rows: dict[int, Timeout], now: datetime) -> list[Timeout]:
        """Return the rows that are pending and due by the database clock, in the order of `candidates`."""
        due = []
        for candidate in candidates:
            row = rows.get(candidate.id)
            if row is None:  # locked by another transaction, or deleted by hand: the next plan shows which
                continue
            if row.is_settled:
                self.report.done.append(row.pk)
            elif row.run_at > now:  # moved meanwhile, or the entry in Redis was early; if firing: until it expires
                self.report.again[row.pk] = row.run_at
            elif row.state == Timeout.State.FIRING:
                self.expired.append(row.pk)
            elif row.object_id != candidate.object_id or row.policy not in self.policy.labels:  # forged or stale work
                self.report.again[row.pk] = now
            else:
                due.append(row)
        return due

    def _mark(self, now: datetime) -> None:
        rows = [member.row for member in self.ready]
        if not settling.mark_fired(rows, now, self.using, counted=self.is_counted):
            raise LostRace
        ids = [row.pk for row in rows]
        self.report.done += ids
        self.report.fired += ids
        self.report.signals += [(signals.timeout_fired, row) for row in rows]

    def _call(self) -> None:
        """Call the handler for each ready member in due order, or once for a batch."""
        is_group = len(self.ready) > 1 and self.policy.batch is None
        group = OverlapDetector(self.policy, self.ready, self.using) if is_group else None
        self.monitor = StatementMonitor(self.using, group)
        self.driver_connection = driver_connection_of(self.using)
        began, cpu = time.monotonic(), time.thread_time()
        try:
            with connections[self.using].execute_wrapper(self.monitor):
                if self.policy.batch:
                    self._call_batch()
                else:
                    for member in self.ready:
                        if self.monitor.overlaps:
                            raise Overlap
                        self._call_one(member, member.obj, member.row)
        finally:
            self.cost = Cost(began - self.began, time.monotonic() - began, time.thread_time() - cpu)
        reach("handled")

    def _call_batch(self) -> None:
        """Call the handler once with `(queryset, timeouts)`, both in the order of keys, then sync the objects.

        `QuerySet.update` sends no signals, so nothing else arms or cancels what follows from it. The sync is inside
        the transaction, so that it commits together with its cause.
        """
        from django_delayq.arming.sync import sync_timeouts

        members = sorted(self.ready, key=lambda member: member.place)
        objects = self.policy.model._base_manager.using(self.using)
        # Not `order_by`, which an UPDATE of the handler would contain: MariaDB would then wait for every row it scans.
        queryset = objects.filter(pk__in=[member.obj.pk for member in members]).extra(order_by=["pk"])
        self._call_one(members[0], queryset, [member.row for member in members])
        sync_timeouts(queryset.all())

    def _call_one(self, member: Member, target: Any, timeouts: Timeout | list[Timeout]) -> None:
        """Call the handler and check that its work can be committed."""
        assert self.monitor is not None
        self.turn = member
        if self.monitor.group:
            self.monitor.group.member = member
        call_handler(self.policy, target, timeouts)
        self.monitor.check_unbroken(member.row.pk)

    def _released(self, error: BaseException) -> ReportBuilder | None:
        """Return a report that releases all candidates if `error` is transient, else None. Adapt the group size."""
        report, ids = ReportBuilder(now=self.report.now), [candidate.id for candidate in self.candidates]
        sizes, reason = firing_state.group_size(self.policy.label), None
        if isinstance(error, Overlap):
            sizes.fire_alone_for(ALONE_AFTER_OVERLAP_SECONDS)
        elif isinstance(error, LostRace):
            report.release(ids, self.using, reason := "the database clock went back")
        elif not isinstance(error, Outcome):
            reason = transient_reason(error, self.using, self.monitor, self.driver_connection)
            if reason is not None:
                report.release(ids, self.using, reason, TRANSIENT_MAX_SECONDS)
        if reason is None or len(ids) > 1:
            sizes.record_failure(len(self.ready), self.cost)
        return None if reason is None else report


def _lock_objects_of(
    policy: TimeoutPolicy[Any], candidates: Sequence[Candidate], using: str
) -> tuple[dict[int, Model], set[int]]:
    """Return the locked objects by timeout id, in the order of their keys, and the ids that cannot be locked now.

    A timeout in neither has no object any more. No object is returned twice: what one handler leaves unsaved on an
    instance must not reach the next one.
    """
    pks = {candidate.id: _readable_pk(policy, candidate.object_id) for candidate in candidates}
    asked = {pk for pk in pks.values() if pk is not None}
    objects: dict[Any, Model] = lock_free_objects(policy, asked, using) if asked else {}
    spelled = _spelled(policy, asked, set(objects), using)
    owners: dict[Any, int] = {}
    locked_elsewhere: set[int] = set()
    for timeout_id, pk in pks.items():
        name = spelled.get(pk)
        if name in objects and name not in owners:
            owners[name] = timeout_id
        elif name is not None:
            locked_elsewhere.add(timeout_id)
    return {owners[name]: obj for name, obj in objects.items() if name in owners}, locked_elsewhere


def _spelled(policy: TimeoutPolicy[Any], asked: set[Any], locked: set[Any], using: str) -> dict[Any, Any]:
    """Return for each key of `asked` that exists how the table spells it.

    MySQL finds "ABC" for "abc", so a set of found keys does not show which question each answers.
    """
    missing = asked - locked
    present = _present(policy, missing, using)
    spelled = {pk: pk for pk in (locked | present) & asked}
    if not locked <= asked or not present <= missing:
        for pk in asked - set(spelled):
            for name in _present(policy, {pk}, using):
                spelled[pk] = name
    return spelled


def _present(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> set[Any]:
    """Return those of `pks` that exist, locked or not."""
    if not pks:
        return set()
    found = policy.model._base_manager.using(using).filter(pk__in=pks).values_list("pk", flat=True)
    return set(map(root_of_key(policy.model).to_python, found))


def _readable_pk(policy: TimeoutPolicy[Any], object_id: str) -> Any:
    """Return the key that `object_id` means, or None if the database would raise because no row can have it."""
    try:
        pk = pk_of(policy.concrete_model, object_id)
    except ValueError:
        return None
    if isinstance(pk, int):
        return pk if -MAX_ID <= pk <= MAX_ID else None
    return None if isinstance(pk, str) and "\0" in pk else pk


def lock_free_objects(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> dict[Any, Model]:
    """Lock the rows `pks` that no other transaction has locked; return them fresh, by key, in the order of their keys.

    A condition on the object's own columns is read by the same statement, which evaluates it on the rows as they are
    when they are locked.
    """
    if not is_compilable(policy.model):
        return lock_objects(policy.model, pks, using, wait=False)
    wanted, to_python = padded(pks), root_of_key(policy.model).to_python
    return {to_python(obj.pk): obj for obj in _free_objects.objects(using, policy, len(wanted), pk=wanted)}


@compiled
def _free_objects(using: str, policy: TimeoutPolicy[Any], count: int) -> QuerySet[Any]:
    rows = rows_of(policy.model, using).filter(pk__in=_keys(policy, count)).order_by("pk")
    if policy.when and not reads_other_rows(policy):
        rows = rows.annotate(delayq_matches=Case(When(policy.when, then=Value(1)), default=Value(0)))
    return for_update(rows, using, wait=False)


def matching_of(policy: TimeoutPolicy[Any], objects: Sequence[Model], using: str) -> set[Any]:
    """Return the keys of those of the locked `objects` for which `when` holds now.

    A set, because to-many look-ups find a row several times. They, and outer joins, need a statement of their own:
    PostgreSQL refuses to lock their rows.
    """
    pks = [obj.pk for obj in objects]
    if not policy.when or not objects:
        return set(pks)
    if "delayq_matches" in vars(objects[0]):
        return {obj.pk for obj in objects if vars(obj).pop("delayq_matches")}
    if not is_compilable(policy.model):
        return set(_matching(using, policy, pks).values_list("pk", flat=True))
    wanted = padded(pks)
    return {pk for (pk,) in _matching_compiled.rows(using, policy, len(wanted), pk=wanted)}


def _matching(using: str, policy: TimeoutPolicy[Any], pks: Sequence[Any]) -> QuerySet[Any]:
    rows: QuerySet[Any] = policy.model._base_manager.using(using).filter(pk__in=pks)
    return rows.filter(policy.when or Q()).order_by()


@compiled
def _matching_compiled(using: str, policy: TimeoutPolicy[Any], count: int) -> QuerySet[Any, Any]:
    return _matching(using, policy, _keys(policy, count)).values_list("pk")


def is_compilable(model: type[Model]) -> bool:
    """Return whether statements on `model` can be kept: not with a manager of its own, which may change its mind."""
    return not has_own_manager(model) and not cast("Any", model._meta.pk).is_relation


def _keys(policy: TimeoutPolicy[Any], count: int) -> list[Param]:
    return [Param(cast("Any", policy.model._meta.pk), "pk", index) for index in range(count)]
