"""`DeadlineField("cancel_unpaid")`: an object's deadline in your serializer, without a query for each row."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Manager, Model
from rest_framework import serializers
from rest_framework.fields import get_attribute

from django_delayq.contrib.countdown import Countdown, pending_countdowns
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.times import clock


def shown_time(at: datetime) -> Any:
    """Return a time as the serializers show the times of rows: in the present time zone, and in the project's format.

    A view that returned the datetime itself would show UTC beside local times.
    """
    return serializers.DateTimeField().to_representation(at)


class Instant(serializers.DateTimeField):
    """A time with its offset, also with `USE_TZ = False`: a browser takes one without it for its own local time."""

    def to_representation(self, value: datetime) -> str:
        return super().to_representation(value) if settings.USE_TZ else clock.aware(value).isoformat()


class SecondsField(serializers.FloatField):
    """A duration in seconds."""

    def run_validation(self, data: Any = serializers.empty) -> Any:
        value = super().run_validation(data)
        try:
            return timedelta(seconds=value)
        except ValueError:  # not a number, which no limit refuses
            self.fail("invalid")

    def to_representation(self, value: Any) -> Any:
        return float(value.total_seconds())


class DeadlineField(serializers.Field[Any, Any, Any, Any]):
    """`{"due_at", "seconds_left", "server_time"}` of the pending timeout, or null. Read-only.

    With `many=True`, also of nested serializers, one query reads the deadlines of all objects when the first one is
    serialized; none if their `TimeoutRelation` was prefetched. With `source=` the field reads a `Deadline` annotation
    and never queries.

    An object that is not saved, such as the validated data of a serializer, has no deadline: the field shows its
    `default`, or null.

    Args:
        policy: a name, a label or the policy itself; not needed with `source`.
        key: that of the timeout, if a policy has several for an object.
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
        if not self.annotated and not _is_saved(value):
            return None if self.default is serializers.empty else self.get_default()
        seen = Countdown(value, "pending", clock.now()) if self.annotated else self._look_up(value)
        if seen is None:
            return None
        times = {"due_at": seen.due_at, "server_time": seen.now}
        shown = {name: _iso.to_representation(at) for name, at in times.items() if at is not None}
        return {**shown, "seconds_left": seen.seconds_left}

    def _look_up(self, obj: Model) -> Countdown | None:
        """Return the countdown of `obj`, from one query for all objects that are serialized together."""
        assert self.policy is not None
        if _identity(obj) not in self._looked_up:
            others = [each for each in serialized_by(self.parent) if type(each) is type(obj) and _is_saved(each)]
            together = {_identity(each): each for each in (*others, obj)}
            found = pending_countdowns(list(together.values()), self.policy, self.key)
            self._looked_up |= zip(together, found, strict=True)
        return self._looked_up[_identity(obj)]


_iso: Any = Instant()


def _is_saved(obj: Any) -> bool:
    """Return whether `obj` is an object with timeouts. A new one may have a key already, such as a UUID."""
    return isinstance(obj, Model) and obj.pk is not None and not obj._state.adding


def _identity(obj: Model) -> tuple[Any, ...]:
    """Return what identifies the object: a relation that was not prefetched returns a new instance each time."""
    return obj.__class__, obj._state.db, obj.pk


def serialized_by(node: Any) -> list[Any]:
    """Return the objects that a serializer serializes together, from the outermost serializer down to this one."""
    if isinstance(node.parent, serializers.ListSerializer):
        return serialized_by(node.parent)  # each of its members
    if node.parent is None:
        objects = [node.instance]
    else:
        objects = [_followed(obj, node.source_attrs) for obj in serialized_by(node.parent)]
    if isinstance(node, serializers.ListSerializer):
        return [member for several in objects for member in _members(several)]
    return objects


def _followed(obj: Any, names: list[str]) -> Any:
    """Return `obj.a.b`, read as DRF does; None if it does not exist."""
    try:
        return get_attribute(obj, names)
    except (AttributeError, KeyError):
        return None


def _members(several: Any) -> Any:
    """Return the objects of a list; none of an iterator, which can be read only once and DRF has yet to read."""
    found = several.all() if isinstance(several, Manager) else several
    return found if hasattr(found, "__getitem__") else ()
