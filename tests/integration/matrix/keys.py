"""The cases of the key matrix: each type of primary key, with objects that are easily mistaken for each other."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db.models import Model, Q
from django.utils import timezone

from django_delayq import TimeoutPolicy
from django_delayq.models import Timeout
from django_delayq.sql.key_types import root_of_key
from tests.testapp import keys


@dataclass(frozen=True)
class Case:
    """A model, the model of its policies, and the fields that make four objects."""

    model: Any
    rows: Sequence[dict[str, Any]] = ()
    owner: Any = None
    """The model that the policies are declared for: the model itself, or one of its parents."""

    @property
    def name(self) -> str:
        return f"{self.model.__name__}-{self.policy_model.__name__}" if self.owner else self.model.__name__

    @property
    def policy_model(self) -> Any:
        return self.owner or self.model

    def make(self, number: int, **fields: Any) -> Any:
        """Create the object `number`, read back from the database."""
        given = self.rows[number] if self.rows else {}
        if self.model is keys.OneToOneKey:
            given = {"other": keys.UUIDKey.objects.create()}
        made = self.model._base_manager.create(**given, **fields)
        return self.model._base_manager.get(pk=made.pk)


def _keyed(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


TEXTS = ('50%\'s "a\\b"; ü/ß ✓', '50%\'S "A\\B"; Ü/SS ✓', '50_\'s "a\\b"; ü/ß ✓')
UUIDS = [uuid.UUID(int=(0xAB << 120) + number) for number in range(3)]
# The key of each child is that of another child's row in the parent's table.
OWN = [{"id": number, "number": number + 1, "code": str(number + 2)} for number in range(100, 103)]
CASES = [
    Case(keys.BigAutoKey, _keyed("id", 2**62, 2**62 + 1, 24)),
    Case(keys.UUIDKey, _keyed("id", *UUIDS)),
    Case(keys.HexUUIDKey, _keyed("id", *UUIDS)),
    Case(keys.DashedUUIDKey, _keyed("id", *UUIDS)),
    Case(keys.TextKey, _keyed("code", *TEXTS)),
    Case(keys.SlugKey, _keyed("slug", "äpfel-a", "Äpfel-a", "apfel-a")),
    Case(keys.OneToOneKey),
    Case(keys.ProxyKey, owner=keys.BigAutoKey),
    Case(keys.SharedChild, owner=keys.Parent),
    Case(keys.OwnGrandchild, OWN),
    Case(keys.OwnGrandchild, OWN, keys.OwnChild),
    Case(keys.OwnGrandchild, OWN, keys.Parent),
    Case(keys.PolyGrandchild, owner=keys.PolyBase),
]
if settings.AUTH_USER_MODEL == "swapped.Member":  # a process of its own: see test_keys_swapped_user
    CASES = [Case(get_user_model(), _keyed("email", "Ann@x.org", "ann@x.org", "ann@x.or"))]


@dataclass
class World:
    """One case with its policies, an object, a second one that must not be touched, and another one."""

    case: Case
    auto: TimeoutPolicy[Any]
    hand: TimeoutPolicy[Any]
    obj: Any
    twin: Any
    other: Any
    handled: list[Any]

    def rows(self, obj: Model) -> list[Timeout]:
        """Every row about `obj`, found in Python alone."""
        to_python = root_of_key(self.case.policy_model).to_python
        key = to_python(self.auto.pk_of(obj))
        rows = Timeout.objects.filter(policy__in=[self.auto.label, self.hand.label]).order_by("id")
        return [row for row in rows if to_python(row.object_id) == key]

    def row(self, obj: Model, policy: TimeoutPolicy[Any]) -> Timeout:
        """Return the newest row of `policy` about `obj`."""
        return [row for row in self.rows(obj) if row.policy == policy.label][-1]

    def states(self, obj: Model, policy: TimeoutPolicy[Any]) -> list[str]:
        return [row.state for row in self.rows(obj) if row.policy == policy.label]


def make_world(case: Case, declare: Callable[..., TimeoutPolicy[Any]]) -> World:
    """Declare the policies, and save three open objects, which arms their timeouts."""
    handled: list[Any] = []

    def handler(obj: Any, timeout: Timeout) -> None:
        assert timeout.content_object == obj
        handled.append(obj.pk)

    automatic: dict[str, Any] = {"after": datetime.timedelta(hours=1), "since": "begun_at", "when": Q(status="open")}
    auto = declare(case.policy_model, handler, name="auto", **automatic)
    hand = declare(case.policy_model, handler, name="hand")
    begun = timezone.now()
    obj, twin, other = (case.make(number, begun_at=begun) for number in range(3))
    return World(case, auto, hand, obj, twin, other, handled)
