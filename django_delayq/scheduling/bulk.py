"""The verbs for many timeouts: few statements, in lock order, without signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, cast

from django.db import connections
from django.db.models import Model, Q, QuerySet

from django_delayq.arming import holding
from django_delayq.arming.row_state import objects_of_policy, terms_of
from django_delayq.ledger import paging, writing
from django_delayq.ledger.controls import read_delay
from django_delayq.ledger.locking import lock_in_slot_order, locking_rows, read_committed, transaction_of
from django_delayq.ledger.outbox import line_of
from django_delayq.ledger.paging import OBJECT_COLUMNS, PENDING, Page, each_page
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import check_key, instances, order_matters, place_of, slots_of, subject_at
from django_delayq.models import Timeout
from django_delayq.policy.policies import M, TimeoutPolicy, registry, resolve_policy
from django_delayq.rounds.columns import ATTEMPTS, GROUPS
from django_delayq.scheduling import single
from django_delayq.scheduling.errors import TimeoutConflict
from django_delayq.scheduling.payloads import check_payload
from django_delayq.sql.key_types import pk_of, root_of_key
from django_delayq.sql.statements import chunks
from django_delayq.times import clock
from django_delayq.times.lengths import Delay, DelayArgs, Duration, added, needs_object, parse_delay, relations_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from django_delayq.ledger.paging import Rows
    from django_delayq.scheduling.single import Moved, OnConflict
    from django_delayq.times.spans import Length

LOCKED_AT_ONCE = 5_000
"""To find 500 rows of a table of 50,000, PostgreSQL reads all of it, so smaller pages take longer."""
COLUMNS = (*OBJECT_COLUMNS, "queue", "state", "since_at", "created_at", "history", *ATTEMPTS)
COLUMNS += tuple(name for group in ("deadline", "moves", "clock", "steps", "lease") for name in GROUPS[group])
"""What moving a row reads and writes."""


def schedule_timeouts(
    objects: Iterable[M],
    policy: str | TimeoutPolicy[M],
    *,
    key: str = "",
    payload: Any = None,
    on_conflict: OnConflict = "replace",
    reason: str = "",
    **delay: Unpack[DelayArgs],
) -> int:
    """Schedule `policy` for each of `objects`, all of one model; return how many were scheduled or moved.

    One transaction for all. With `"keep"`, those that were pending already are not counted; with `"error"`,
    one of them is enough to refuse the whole call before anything is written, as is one whose deadline would move
    beyond `Limits(total=...)`. With `"once"`, those that have fired for this deadline, or `since`, are not counted.

    Raises:
        TypeError: the objects are of several models.
        UnknownPolicy, InvalidDelay, InvalidPayload, TimeoutConflict, ExtensionLimit, ValueError: as for
            `schedule_timeout`.
    """
    given, body = parse_delay(dict(delay)), check_payload(payload)
    check_key(key)
    found = _places(objects, policy)
    if found is None:
        return 0
    resolved, using, pks = found
    single.check_conflict(on_conflict, given, resolved)
    once = on_conflict == "once"
    replace = once or on_conflict == "replace"
    with transaction_of(using):
        rounds = _lock_and_plan(resolved, pks, key, given, using, as_given=once)
        if once:
            rounds = _without_fired(rounds, using, reason, is_by_since=given is None)
        # One statement inserts where the slot is free, so that only these cases need the rows that are pending already.
        is_limited = replace and resolved.total is not None
        taken: list[Any] = []
        if on_conflict == "error" or is_limited or resolved.hold_when is not None:
            taken = _taken(resolved, pks, key, using)
            if taken and on_conflict == "error":
                row = Timeout.objects.using(using).get(pk=taken[0].pk)
                raise TimeoutConflict(f"Pending already: {len(taken)} of {len(rounds)}, such as {row}.", row)
            if is_limited:
                _check_totals(resolved, rounds, taken, key, using)
        options: dict[str, Any] = {"key": key, "payload": body, "reason": reason, "replace": replace}
        count = paging.insert_rounds(resolved, rounds, using, **options)
        if resolved.hold_when is not None:
            kept = [] if replace else [row.pk for row in taken]
            holding.hold_scheduled(resolved, pks, key, using, is_computed=given is None, kept=kept)
        return count


def _places(
    objects: QuerySet[Any] | Iterable[Model], policy: str | TimeoutPolicy[Any]
) -> tuple[TimeoutPolicy[Any], str, list[Any]] | None:
    """Return policy, database and keys of `objects`, in the order in which all callers lock them; None: no objects."""
    if isinstance(objects, QuerySet):
        resolved, using = resolve_policy(policy, objects.model), database_of(objects.model, objects)
        rows = (objects if order_matters(objects) else objects.order_by()).using(using)
        pks = rows.values_list(cast("Any", resolved.concrete_model._meta.pk).name, flat=True)
        places, found = {(resolved, using)}, set(pks)
    else:
        each = [place_of(obj, policy) for obj in instances(objects)]
        places = {(resolved, using) for resolved, using, _ in each}
        found = {pk_of(resolved.concrete_model, pk) for resolved, _, pk in each}  # `"7"` is the key 7, too
    if len(places) > 1:
        raise TypeError("The objects must be of one model in one database.")
    return (*places.pop(), sorted(found)) if found else None


def _lock_and_plan(
    policy: TimeoutPolicy[Any], pks: Sequence[Any], key: str, given: Delay | None, using: str, *, as_given: bool
) -> list[paging.Round]:
    """Lock the objects `pks` and return their rounds. `as_given`: see `Delay.due_from`.

    Reads whole objects only for callables, because an instance costs more than everything else.
    """
    in_force = None if given is not None or policy.after is None else read_delay(policy, using)
    now, to_python = clock.now(), root_of_key(policy.model).to_python
    rounds: list[paging.Round] = []
    needs_object = policy.needs_object if given is None else given.needs_object
    due_at = None if given is None or needs_object else given.due_from(now, as_given=as_given)
    for chunk in chunks(pks, None if connections[using].features.max_query_params else LOCKED_AT_ONCE):
        rows = locking_rows(policy.model, chunk, using)
        if needs_object or not policy.has_plain_since:
            list(rows.values_list("pk"))  # locks them, without the rows of relations, which are read afterwards
            read = {pk: (policy.since_of(obj), obj) for pk, obj in objects_of_policy(policy, chunk, using).items()}
        elif policy.since:
            read = {
                to_python(pk): (policy.checked_since(at), None) for pk, at in rows.values_list("pk", str(policy.since))
            }
        else:
            read = dict.fromkeys(map(to_python, rows.values_list("pk", flat=True)), (None, None))
        terms: dict[Any, Any] = {} if given is not None else terms_of(policy, read, using)
        for pk, object_id, slot in slots_of(policy, chunk, key, using):
            if pk not in read:
                raise ValueError(f"{subject_at(policy, pk, key, using)}: the object is not in the database (any more).")
            since_at, obj = read[pk]
            due = due_at or (given and given.due_from(now, obj, as_given=as_given))
            due = due or policy.due_of(obj, now if policy.since is None else since_at, in_force)
            if due is None:
                raise single.no_deadline(subject_at(policy, pk, key, using))
            rounds.append((slot, object_id, since_at, due, terms.get(pk)))
    return rounds


def _without_fired(rounds: list[paging.Round], using: str, reason: str, *, is_by_since: bool) -> list[paging.Round]:
    """Return those of `rounds` that have not fired: see `fired_rows`; cancel the pending rows of the others."""
    times = {slot: since_at if is_by_since else due_at for slot, _, since_at, due_at, _ in rounds}
    fired = {row.slot for row in single.fired_rows(times, using, is_by_since=is_by_since)}
    for chunk in chunks(sorted(fired)):
        pending = lock_in_slot_order(Timeout.objects.using(using).filter(slot__in=chunk, slot_taken=1), using)
        writing.cancel_ids({row.pk: line_of(row) for row in pending}, using, Timeout.Cause.SUPERSEDED, reason)
    return [each for each in rounds if each[0] not in fired]


def _taken(policy: TimeoutPolicy[Any], pks: Iterable[Any], key: str, using: str) -> list[Any]:
    """Return id, object and deadlines of the pending rows of the objects `pks`.

    They need no lock: each caller that inserts or cancels one has locked its object first.
    """
    slots = [slot for _, _, slot in slots_of(policy, pks, key, using)]
    taken: list[Any] = []
    for chunk in chunks(sorted(slots)):
        rows = read_committed(Timeout.objects.using(using).filter(slot__in=chunk, slot_taken=1).order_by("slot"), using)
        taken += rows.values_list("pk", "object_id", "due_at", "first_due_at", named=True)
    return taken


def _check_totals(
    policy: TimeoutPolicy[Any], rounds: list[paging.Round], taken: list[Any], key: str, using: str
) -> None:
    """Raise ExtensionLimit if one of `rounds` would move a row of `taken` too far."""
    due = {object_id: due_at for _, object_id, _, due_at, _ in rounds}
    pks = [pk_of(policy.concrete_model, row.object_id) for row in taken]
    is_read = policy.total is not None and needs_object(policy.total)
    objects = objects_of_policy(policy, pks, using) if is_read else {}
    for row, pk in zip(taken, pks, strict=True):
        due_at, obj = due[row.object_id], objects.get(pk)
        if single.is_beyond_total(row, due_at, policy, obj):
            subject = subject_at(policy, row.object_id, key, using)
            single.check_total(Timeout.objects.using(using).get(pk=row.pk), due_at, subject, obj)


def cancel_timeouts(rows: Rows, *, reason: str = "") -> int:
    """Cancel those of `rows` (such as `pending_timeouts(...)`) that are still pending; return how many.

    Those that are firing get no further attempt, and are not counted. `rows` may be a single `Timeout`. The rows are
    read again on the writer. Each page of 500 is one transaction, or part of the caller's.
    """

    def change(page: Page) -> int:
        pending = {row.pk: line_of(row) for row in page.rows if row.is_waiting}
        writing.forbid_attempts(page.rows, page.using, reason, clock.now())
        return writing.cancel_ids(pending, page.using, Timeout.Cause.HAND, reason)

    pending_or_firing = PENDING | Q(state=Timeout.State.FIRING)
    return sum(each_page(rows, change, only=pending_or_firing, columns=("queue", "policy", "state", "history")))


def reschedule_timeouts(rows: Rows, *, reason: str = "", **delay: Unpack[DelayArgs]) -> int:
    """Move those of `rows` that are pending to `delay`, counted from now; return how many.

    Rows that `Limits(total=...)` of their policy does not let move so far stay as they are. Raises InvalidDelay.
    """
    given = single.parse_target(dict(delay))
    if given.needs_object:
        return _move(rows, "rescheduled", reason, lambda _, obj: given.due_from(clock.now(), obj), reads=given.after)
    due_at = given.due_from(clock.now())
    return _move(rows, "rescheduled", reason, lambda *_: due_at)


def extend_timeouts(rows: Rows, *, reason: str = "", **span: Unpack[Duration]) -> int:
    """Move the deadlines of those of `rows` that are pending later by `span`; return how many.

    Rows whose policy's `max_extensions` or `Limits(total=...)` is used up stay as they are. Raises InvalidDelay.
    """
    by = single.parse_span(dict(span))

    def later(row: Timeout, obj: Any) -> datetime | None:
        may_extend = single.may_extend(row, registry.get(row.policy))
        return added(by, holding.extended_from(row), obj) if may_extend else None

    return _move(rows, "extended", reason, later, reads=by, by=by)


def _move(
    rows: Rows,
    what: Moved,
    reason: str,
    deadline_of: Callable[[Timeout, Any], datetime | None],
    *,
    reads: Length | None = None,
    by: Length | None = None,
) -> int:
    """Move those of `rows` that are pending and have a `deadline_of`, by row and object; return how many.

    Objects are read only if `reads`, or a limit of a policy, needs them: half of the work is to make instances.
    """
    by_object = any(length and needs_object(length) for length in (reads, *(policy.total for policy in registry)))
    own = relations_of(reads) if reads else ()

    def change(page: Page) -> int:
        facts, deadlines = holding.Facts.of_page(page), []
        holding.end_passed(page.rows, facts)
        for row in page.rows:
            policy = registry.get(row.policy)
            obj = facts.of(row, own + (policy.followed if policy else ())) if by_object else None
            due_at = deadline_of(row, obj)
            if due_at is not None and not single.is_beyond_total(row, due_at, policy, obj):
                deadlines.append((row, due_at))
        return len(single.move_by_hand(deadlines, facts, what, reason, by))

    return sum(each_page(rows, change, columns=() if by_object else COLUMNS))
