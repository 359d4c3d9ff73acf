"""The verbs for many at once: few statements, in the order of slots, and no signals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, cast

from django.db.models import Model, QuerySet

from django_delayq import clock
from django_delayq.delays import Delay, parse_delay, shifted
from django_delayq.exceptions import InvalidDelay, TimeoutConflict
from django_delayq.key_types import pk_of
from django_delayq.ledger import writing
from django_delayq.ledger.announcing import push, withdraw
from django_delayq.ledger.history import appended, event
from django_delayq.ledger.locking import database_of, lock_objects, transaction_of
from django_delayq.ledger.subjects import Subject, instances, model_of_kind, objects_of, subject_at, subject_of
from django_delayq.models import Timeout
from django_delayq.policies import M, TimeoutPolicy, registry, resolve_policy
from django_delayq.scheduling.payloads import check_payload
from django_delayq.scheduling.single import delay_for, may_extend, parse_span, round_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Unpack

    from django_delayq.delays import DelayArgs, Span
    from django_delayq.models import TimeoutQuerySet

    Rows = Timeout | TimeoutQuerySet | Iterable[Timeout]

_EXPECTED = "Expected timeouts, such as pending_timeouts(...) returns, not {}."


def schedule_timeouts(
    objects: Iterable[M],
    policy: str | TimeoutPolicy[M],
    *,
    key: str = "",
    payload: Any = None,
    on_conflict: Literal["replace", "keep", "error"] = "replace",
    reason: str = "",
    **delay: Unpack[DelayArgs],
) -> int:
    """`schedule_timeout` for each of `objects`, all of one model; returns how many were scheduled or moved.

    One transaction for all. With `"keep"`, those that were pending already are not counted; with `"error"`,
    one of them is enough to refuse the whole call before anything is written.

    Raises:
        The same as `schedule_timeout`; also TypeError for objects of several models.
    """
    given, body = parse_delay(dict(delay)), check_payload(payload)
    if on_conflict not in ("replace", "keep", "error"):
        raise ValueError(f'on_conflict is "replace", "keep" or "error", not {on_conflict!r}.')
    subjects = _subjects(objects, policy, key)
    if not subjects:
        return 0
    using, model = subjects[0].using, cast("type[Model]", subjects[0].model)
    with transaction_of(using):
        rows: list[tuple[Subject, Timeout]] = []
        in_force = delay_for(subjects[0], given)
        for chunk in writing.chunks(subjects):
            fresh = lock_objects(model, [subject.pk for subject in chunk], using)
            for subject in chunk:
                if subject.pk not in fresh:
                    raise ValueError(f"{subject}: the object is not in the database (any more).")
                since_at, due_at = round_of(subject, fresh[subject.pk], given, in_force)
                rows.append((subject, writing.new_row(subject, due_at, since_at, payload=body, reason=reason)))
        taken = _taken(subjects, using)
        if taken and on_conflict == "error":
            raise TimeoutConflict(f"{len(taken)} of {len(rows)} are pending already, such as {taken[0]}.", taken[0])
        return _write(rows, taken, using, keep=on_conflict == "keep")


def _write(rows: list[tuple[Subject, Timeout]], taken: list[Timeout], using: str, *, keep: bool) -> int:
    held = {row.slot for row in taken}
    chosen = [row for subject, row in rows if not (keep and held & set(subject.slots))]
    if not keep:
        for subject, _ in rows:
            if len(subject.labels) > 1 and held & set(subject.slots[1:]):
                writing.adopt(subject)
    if chosen:
        writing.insert(chosen, using, replace=not keep)
        push(chosen, using)
    return len(chosen)


def _subjects(objects: QuerySet[Any] | Iterable[Model], policy: str | TimeoutPolicy[Any], key: str) -> list[Subject]:
    """One per object, in the order of their keys, so that two calls lock them in the same order."""
    if isinstance(objects, QuerySet):
        resolved = resolve_policy(policy, objects.model)
        using = database_of(objects.model, objects)
        rows = (objects if objects.query.is_sliced else objects.order_by()).using(using)
        pks = rows.values_list(cast("Any", resolved.concrete_model._meta.pk).name, flat=True)
        found = [subject_at(resolved, pk, key, using) for pk in pks]
    else:
        found = [subject_of(obj, policy, key) for obj in map(_scheduled, instances(objects))]
    if len({(subject.model, subject.using) for subject in found}) > 1:
        raise TypeError("The objects must be of one model in one database.")
    return sorted({subject.pk: subject for subject in found}.values(), key=lambda subject: subject.pk)


def _scheduled(obj: Model) -> Model:
    if isinstance(obj, Timeout):
        raise TypeError(
            "schedule_timeouts() takes objects and a policy, not a Timeout: that one is scheduled already. To move "
            "it, use reschedule_timeouts() or extend_timeouts()."
        )
    return obj


def _taken(subjects: list[Subject], using: str) -> list[Timeout]:
    rows: list[Timeout] = []
    for chunk in writing.chunks(subjects):
        slots = [slot for subject in chunk for slot in subject.slots]
        rows += writing.locked(Timeout.objects.using(using).filter(slot__in=slots, slot_taken=1), using)
    return rows


def cancel_timeouts(rows: Rows, *, reason: str = "") -> int:
    """Those of `rows` (such as `pending_timeouts(...)`) that are still pending are cancelled by hand; how many.

    A single `Timeout` will do. The rows are read again on the writer. Each page of 500 is one transaction, or part of
    the caller's.
    """

    def cancel(page: list[Timeout], using: str) -> int:
        withdraw([(row.queue, row.pk) for row in page], using)
        return writing.cancel([row.pk for row in page], using, Timeout.Cause.HAND, reason)

    return _page_by_page(rows, cancel)


def extend_timeouts(rows: Rows, *, reason: str = "", **span: Unpack[Span]) -> int:
    """The deadlines of those of `rows` that are pending lie later by `span`; returns how many.

    Rows whose policy's `max_extensions` is used up stay as they are. Raises InvalidDelay.
    """
    by = parse_span(dict(span)).after
    assert by is not None

    def extend(page: list[Timeout], using: str) -> int:
        movable = [row for row in page if may_extend(row, registry.get(row.policy))]
        for row in movable:
            _shift(row, shifted(row.due_at, by), "extended", reason)
            row.run_at = max(row.run_at, row.due_at)
            row.extensions += 1
        return _save(movable, using)

    return _page_by_page(rows, extend)


def reschedule_timeouts(rows: Rows, *, reason: str = "", **delay: Unpack[DelayArgs]) -> int:
    """Those of `rows` that are pending are due when `delay` says, counted from now; returns how many.

    Raises InvalidDelay.
    """
    given: Delay | None = parse_delay(dict(delay))
    if given is None:
        raise InvalidDelay("To when? Give units, after= or at=.")
    due_at = given.due_from(clock.now())

    def move(page: list[Timeout], using: str) -> int:
        for row in page:
            _shift(row, due_at, "rescheduled", reason)
            row.run_at = due_at
        return _save(page, using)

    return _page_by_page(rows, move)


def _shift(row: Timeout, due_at: Any, what: str, reason: str) -> None:
    details = {"from": row.due_at, "to": due_at}
    row.history = appended(row.history, event(what, clock.now(), by="hand", reason=reason, **details))
    row.due_at, row.claims, row.claimed_until = due_at, 0, None


def _save(rows: list[Timeout], using: str) -> int:
    writing.save_moved(rows, using)
    push(rows, using)
    return len(rows)


def _page_by_page(rows: Rows, change: Callable[[list[Timeout], str], int]) -> int:
    """`change` for the pending rows of each page, locked: first their objects, then themselves by slot."""
    using, ids = ids_in_lock_order(rows)
    changed = 0
    for page in writing.chunks(ids):
        changed += _change_page(page, using, change)
    return changed


def ids_in_lock_order(rows: Rows) -> tuple[str, list[int]]:
    """Return the writer, and the ids in the order of the objects' kinds and keys, in which all callers lock them.

    Not of the keys' texts, of which 10 would come before 9. A queryset is evaluated again, by the writer.
    """
    names = ("content_type_id", "object_id", "pk")
    if isinstance(rows, QuerySet):
        if rows.model is not Timeout:
            raise TypeError(_EXPECTED.format(rows.model.__name__ + " queryset"))
        using, plain = database_of(Timeout, rows), rows if rows.query.is_sliced else rows.order_by()
        found = list(plain.using(using).values_list(*names))
    else:
        listed = _listed(rows)
        writers = sorted({database_of(Timeout, row) for row in listed}) or [database_of(Timeout)]
        if len(writers) > 1:
            raise TypeError(f"The timeouts are in several databases, {', '.join(writers)}. Pass those of one.")
        using, found = writers[0], [tuple(getattr(row, name) for name in names) for row in listed]
    return using, [place[-1] for place in sorted(_place(kind, key, row_id, using) for kind, key, row_id in found)]


def _listed(rows: Any) -> list[Timeout]:
    if isinstance(rows, Timeout):
        return [rows]
    if isinstance(rows, type | str | Model) or not isinstance(rows, Iterable):
        raise TypeError(_EXPECTED.format(rows.__name__ if isinstance(rows, type) else type(rows).__name__))
    listed = list(rows)
    for row in listed:
        if not isinstance(row, Timeout):
            raise TypeError(_EXPECTED.format(type(row).__name__))
    return listed


def _place(content_type_id: int, object_id: str, row_id: int, using: str) -> tuple[int, bool, Any, int]:
    model = model_of_kind(content_type_id, using)
    try:
        return content_type_id, False, object_id if model is None else pk_of(model, object_id), row_id
    except ValueError:  # no key of this model: nothing will be locked for it
        return content_type_id, True, object_id, row_id


def _change_page(page: Sequence[int], using: str, change: Callable[[list[Timeout], str], int]) -> int:
    with transaction_of(using):
        rows = Timeout.objects.using(using).filter(pk__in=page, slot_taken=1)
        _lock_objects_of(rows, using)
        locked = writing.locked(rows, using)
        return change(locked, using) if locked else 0


def _lock_objects_of(rows: TimeoutQuerySet, using: str) -> None:
    for _, model, pks in objects_of(rows.only("policy", "content_type_id", "object_id"), using):
        lock_objects(model, pks, using)
