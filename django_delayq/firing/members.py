"""Lock the objects of the timeouts of a transaction, without waiting for a lock.

Their conditions are checked on the locked rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from django.db.models import Model, Q

from django_delayq.firing.works import Candidate
from django_delayq.ledger import marking
from django_delayq.ledger.locking import for_update, has_own_manager, lock_objects, rows_of
from django_delayq.models import Timeout
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.policy.reads import reads_other_rows
from django_delayq.policy.steps import Ended
from django_delayq.sql.key_types import pk_of, root_of_key
from django_delayq.sql.statements import compiled, has_key, key_list
from django_delayq.times.clock import in_own_zone

if TYPE_CHECKING:
    from datetime import datetime

    from django.db.models import QuerySet

    from django_delayq.ledger.controls import Guards

_CONTENT_OBJECT: Any = Timeout._meta.get_field("content_object")


@dataclass(slots=True, eq=False)
class Member:
    """A timeout that may be fired now and its object, both locked."""

    row: Timeout
    obj: Model
    given: Timeout | None = None
    """What a step gets whose row is marked: the row as it was. None: the row itself."""
    planned_at: datetime | None = None
    """When the attempt was to run, of a row that is firing: that has the end of its lease."""
    ended: Ended | None = None
    """How a step of the row has just ended; None: none has."""

    @property
    def timeout(self) -> Timeout:
        """What the handler, or the step, gets."""
        return self.given or self.row

    def could_fire_at(self) -> datetime:
        return self.timeout.could_fire_at(self.planned_at)

    def __post_init__(self) -> None:
        _CONTENT_OBJECT.set_cached_value(self.row, self.obj)


def counted_from_resume(members: Sequence[Member], guards: Guards, now: datetime) -> list[Timeout]:
    """Return the rows of `members` that could have fired before the last stop of their policy ended.

    Their lateness, in memory, counts from that end.
    """
    if guards.resumed_at is None:
        return []
    start = min(guards.resumed_at, now)  # a pause that was to end later may have just been ended
    found = [member for member in members if member.could_fire_at() < start]
    for member in found:
        member.row.ready_at = member.timeout.ready_at = start
    return [member.row for member in found]


def lock_objects_of(
    policy: TimeoutPolicy[Any], candidates: Sequence[Candidate], using: str
) -> tuple[dict[int, Model], set[int]]:
    """Return the locked objects by timeout id, in the order of their keys, and the ids that cannot be locked now.

    An object that the base manager hides cannot be locked. A timeout in neither has no object any more. No object is
    returned twice: what one handler leaves unsaved on an instance must not reach the next one.
    """
    pks = {candidate.id: readable_pk(policy, candidate.object_id) for candidate in candidates}
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
    present = _present(policy, missing, using) if missing else set()
    spelled = {pk: pk for pk in (locked | present) & asked}
    if not locked <= asked or not present <= missing:
        for pk in asked - set(spelled):
            for name in _present(policy, {pk}, using):
                spelled[pk] = name
    return spelled


def _present(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> set[Any]:
    """Return those of `pks` that exist, locked or not, also those that the base manager hides.

    What it shows may depend on the thread, such as on its tenant: a timeout must not be settled as `gone` for that.
    """
    found = rows_of(policy.model, using).filter(pk__in=pks).values_list("pk", flat=True)
    return set(map(root_of_key(policy.model).to_python, found))


def readable_pk(policy: TimeoutPolicy[Any], object_id: str) -> Any:
    """Return the key that `object_id` means, or None if the database would raise because no row can have it."""
    try:
        pk = pk_of(policy.concrete_model, object_id)
    except ValueError:
        return None
    return None if isinstance(pk, str) and "\0" in pk else pk


def lock_free_objects(policy: TimeoutPolicy[Any], pks: Collection[Any], using: str) -> dict[Any, Model]:
    """Lock the rows `pks` that no other transaction has locked; return them fresh, by key, in the order of their keys.

    A condition on the object's own columns is read by the same statement, which evaluates it on the rows as they are
    when they are locked.
    """
    if not is_compilable(policy.model):
        return lock_objects(policy.model, pks, using, wait=False)
    (wanted, count), to_python = key_list(policy.model, pks, using), root_of_key(policy.model).to_python
    return {to_python(obj.pk): obj for obj in _free_objects.objects(using, policy, count, pk=wanted)}


@compiled
def _free_objects(using: str, policy: TimeoutPolicy[Any], count: int) -> QuerySet[Any]:
    rows = rows_of(policy.model, using).filter(has_key(policy.model, "pk", count, using)).order_by("pk")
    if (policy.when or policy.hold_when) and not reads_other_rows(policy):
        rows = rows.annotate(delayq_matches=marking.matches(policy))
    return for_update(rows, using, wait=False)


def matching_of(policy: TimeoutPolicy[Any], objects: Sequence[Model], using: str) -> tuple[set[Any], set[Any]]:
    """Return the keys of those of the locked `objects` for which `when` holds now: without, and with `hold_when`.

    Sets, because to-many look-ups find a row several times. They, and outer joins, need a statement of their own:
    PostgreSQL refuses to lock their rows.
    """
    pks = [obj.pk for obj in objects]
    if not objects or not (policy.when or policy.hold_when):
        return set(pks), set()
    if "delayq_matches" in vars(objects[0]):
        found = {obj.pk: vars(obj).pop("delayq_matches") for obj in objects}
        matching = {pk for pk, value in found.items() if value == marking.MATCHES}
        return matching, {pk for pk, value in found.items() if value == marking.ON_HOLD}
    matching = set(pks) if not policy.when else _fulfilling(policy, "when", pks, using)
    on_hold = matching & _fulfilling(policy, "hold_when", pks, using) if policy.hold_when else set[Any]()
    return matching - on_hold, on_hold


def _fulfilling(policy: TimeoutPolicy[Any], option: str, pks: Sequence[Any], using: str) -> set[Any]:
    """Return those of `pks` for which a condition of `policy`, `when` or `hold_when`, holds."""
    if not is_compilable(policy.model):
        with in_own_zone():
            return set(_matching(using, policy, option, Q(pk__in=pks)).values_list("pk", flat=True))
    wanted, count = key_list(policy.model, pks, using)
    return {pk for (pk,) in _matching_compiled.rows(using, policy, option, count, pk=wanted)}


def _matching(using: str, policy: TimeoutPolicy[Any], option: str, named: Any) -> QuerySet[Any]:
    rows: QuerySet[Any] = policy.model._base_manager.using(using).filter(named)
    return rows.filter(getattr(policy, option)).order_by()


@compiled
def _matching_compiled(using: str, policy: TimeoutPolicy[Any], option: str, count: int) -> QuerySet[Any, Any]:
    return _matching(using, policy, option, has_key(policy.model, "pk", count, using)).values_list("pk")


def is_compilable(model: type[Model]) -> bool:
    """Return whether statements on `model` can be kept: not with a manager of its own, which may change its mind."""
    return not has_own_manager(model) and not cast("Any", model._meta.pk).is_relation
