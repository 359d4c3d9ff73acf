"""`DeadlineField("cancel_unpaid")`: an object's deadline in a serializer of your own, without a query per row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.exceptions import ObjectDoesNotExist
from django.db.models import Manager, Model, QuerySet
from rest_framework import serializers

from django_delayq import clock
from django_delayq.scheduling.queries import Countdown, pending_countdowns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    from django_delayq.policies import TimeoutPolicy


class DeadlineField(serializers.Field[Any, Any, Any, Any]):
    """`{"due_at", "seconds_left", "server_time"}` of what is pending, or null. Read-only.

    With `many=True`, also for serializers within serializers, all objects are looked up in one query when the
    first of them is written; in none if their `TimeoutRelation` was prefetched. With `source=` the field reads
    a `Deadline` annotation instead and never queries.

    An object that is not saved yet, such as the validated data of a serializer, has no deadline: the field shows its
    `default`, or null.

    Args:
        policy: a name, a label or the policy itself; not needed with `source`.
        key: tells several pending timeouts of one policy and object apart.
        **options: those of DRF's fields.
    """

    def __init__(self, policy: str | TimeoutPolicy[Any] | None = None, key: str = "", **options: Any) -> None:
        if policy is None and "source" not in options:
            raise TypeError('DeadlineField needs a policy, or source= with the name of a "Deadline" annotation.')
        self.policy, self.key = policy, key
        self.annotated = "source" in options
        self._looked_up: dict[tuple[Any, ...], Countdown | None] = {}
        super().__init__(**{"source": "*", **options, "read_only": True})

    def to_representation(self, value: Any) -> dict[str, Any] | None:
        """`value` is the object, or the annotated moment."""
        if not self.annotated and (not isinstance(value, Model) or value.pk is None):
            return None if self.default is serializers.empty else self.get_default()
        seen = Countdown(value, "pending", clock.now()) if self.annotated else self._look_up(value)
        if seen is None:
            return None
        moments = {"due_at": seen.due_at, "server_time": seen.now}
        shown = {name: _iso.to_representation(moment) for name, moment in moments.items() if moment is not None}
        return {**shown, "seconds_left": seen.seconds_left}

    def _look_up(self, obj: Model) -> Countdown | None:
        """What is pending for `obj`, from the one look at all that are written together with it."""
        assert self.policy is not None
        if _identity(obj) not in self._looked_up:
            together = [other for other in self._written_together() if type(other) is type(obj)]
            if not any(_identity(other) == _identity(obj) for other in together):
                together = [obj]
            found = pending_countdowns(together, self.policy, self.key)
            self._looked_up |= {_identity(other): seen for other, seen in zip(together, found, strict=True)}
        return self._looked_up[_identity(obj)]

    def _written_together(self) -> Iterator[Model]:
        """The objects that this field will be asked for, from the outermost serializer down to its own."""
        way: list[Any] = []
        node = self.parent
        while node is not None:
            way.append(node)
            node = node.parent
        outermost = way.pop()
        objects = [outermost.instance]
        if isinstance(outermost, serializers.ListSerializer):
            objects = list(_members(outermost.instance))
            way.pop()  # its child, of which each member is an instance
        while way:
            step = way.pop()
            objects = [found for obj in objects for found in _followed(obj, step.source_attrs)]
            if isinstance(step, serializers.ListSerializer):
                objects = [member for several in objects for member in _members(several)]
                way.pop()
        yield from (obj for obj in objects if isinstance(obj, Model))


class _Iso(serializers.DateTimeField):
    """As DRF writes moments elsewhere in the project."""

    def to_representation(self, value: datetime) -> Any:
        return super().to_representation(value)


_iso = _Iso()


def _identity(obj: Model) -> tuple[Any, ...]:
    """Not the instance: a relation that was not prefetched makes new ones each time it is followed."""
    return type(obj), obj._state.db, obj.pk


def _followed(obj: Any, names: Iterable[str]) -> Iterator[Any]:
    """What `obj.a.b` is, as DRF goes there; nothing, where there is nothing."""
    for name in names:
        try:
            obj = obj[name] if isinstance(obj, dict) else getattr(obj, name)
        except (ObjectDoesNotExist, AttributeError, KeyError):
            return
        if obj is None:
            return
    yield obj


def _members(several: Any) -> Iterator[Any]:
    """The objects of a list; nothing of what can be read only once, as DRF has yet to read it."""
    if isinstance(several, Manager):
        several = several.all()
    if isinstance(several, QuerySet) or hasattr(several, "__getitem__"):
        yield from several
