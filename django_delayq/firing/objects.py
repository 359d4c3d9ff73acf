"""Lock the objects of some timeouts, and tell those that are gone from those that somebody else holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_delayq.key_types import pk_of, root_of_key
from django_delayq.ledger.locking import lock_objects

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from django.db.models import Model

    from django_delayq.firing.report import Candidate
    from django_delayq.policies import TimeoutPolicy

_BIGGEST = 2**63 - 1


def lock_objects_of(
    policy: TimeoutPolicy[Any], candidates: Sequence[Candidate], using: str
) -> tuple[dict[int, Model], set[int]]:
    """The locked objects by timeout id, in the order of their keys, and the ids of those that cannot be had now.

    A timeout in neither has no object any more. No object is given out twice: what one handler leaves
    unsaved on an instance must not meet the next one.
    """
    pks = {candidate.id: _readable_pk(policy, candidate.object_id) for candidate in candidates}
    asked = {pk for pk in pks.values() if pk is not None}
    objects: dict[Any, Model] = lock_objects(policy.model, asked, using, wait=False) if asked else {}
    spelled = _spelled(policy, asked, set(objects), using)
    owners: dict[Any, int] = {}
    held: set[int] = set()
    for timeout_id, pk in pks.items():
        name = spelled.get(pk)
        if name in objects and name not in owners:
            owners[name] = timeout_id
        elif name is not None:
            held.add(timeout_id)
    return {owners[name]: obj for name, obj in objects.items() if name in owners}, held


def _spelled(policy: TimeoutPolicy[Any], asked: set[Any], locked: set[Any], using: str) -> dict[Any, Any]:
    """Of the keys `asked` for those that exist, each as the table spells it.

    MySQL finds "ABC" when asked for "abc", so a set of answers does not tell which question each belongs to.
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
    """Which of `pks` exist, locked by somebody or not."""
    if not pks:
        return set()
    found = policy.model._base_manager.using(using).filter(pk__in=pks).values_list("pk", flat=True)
    return set(map(root_of_key(policy.model).to_python, found))


def _readable_pk(policy: TimeoutPolicy[Any], object_id: str) -> Any:
    """The key that `object_id` stands for; None if no row can have it and asking would make the database raise."""
    try:
        pk = pk_of(policy.concrete_model, object_id)
    except ValueError:
        return None
    if isinstance(pk, int):
        return pk if -_BIGGEST <= pk <= _BIGGEST else None
    return None if isinstance(pk, str) and "\0" in pk else pk
