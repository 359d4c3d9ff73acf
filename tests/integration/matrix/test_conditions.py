"""Every kind of condition, on every database, wherever it is read: on saving, syncing and firing.

What must hold is asked of the database by the test itself, in a query of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest
from django.db import connection
from django.db.models import Model, Q, QuerySet
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.receivers import arm_saved
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, locking, needs_row_locks, state
from tests.testapp.models import (
    Customer,
    Item,
    ManagedChild,
    ManagedDistinct,
    ManagedNotHidden,
    ManagedWithCount,
    ManagedWithOwner,
    ProxyWithColumns,
    Tag,
    Task,
)

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
HOUR = timedelta(hours=1)
FIRED, UNMET, HIDDEN = ("fired", "due"), ("skipped", "condition"), ("pending", "")
Declare = Callable[..., dq.TimeoutPolicy[Any]]
Change = dict[str, Any] | Callable[[Any], object]


@dataclass(frozen=True)
class Case:
    """A condition, and states of an object that make it true, false or unknown, in this order."""

    when: Callable[[], Q]
    states: tuple[Change, ...]
    model: type[Model] = Task
    own: bool = True
    """Whether it reads columns of the object alone, so that a save of other columns cannot change it."""


def _table(obj: Any) -> QuerySet[Any]:
    """All rows, whatever the managers of the model hide."""
    return QuerySet(type(obj))


def _owned(obj: Any, **fields: Any) -> Any:
    obj.owner = Customer.objects.create(**fields)
    return _table(obj).filter(pk=obj.pk).update(owner=obj.owner)


def _disowned(obj: Any) -> None:
    obj.owner = None
    _table(obj).filter(pk=obj.pk).update(owner=None)


def _with_items(*states: bool) -> Callable[[Any], None]:
    def change(task: Any) -> None:
        task.items.all().delete()
        Item.objects.bulk_create(Item(task=task, is_open=is_open) for is_open in states)

    return change


def _tagged(*names: str) -> Callable[[Any], None]:
    return lambda task: task.tags.set([Tag.objects.create(name=name) for name in names])


VIP = (lambda obj: _owned(obj, vip=True), lambda obj: _owned(obj, vip=False), _disowned)
OWN = ({"status": "open"}, {"status": "done"})
Status = Enum("Status", {"OPEN": "open"}, type=str)  # its `str()` is not its value, unlike that of `StrEnum`
CASES = {
    "own columns": Case(lambda: Q(status="open", amount__lt=5), ({"amount": 1}, {"amount": 7}, {"status": "done"})),
    "member of an enumeration": Case(lambda: Q(status=Status.OPEN), OWN),
    "null": Case(lambda: Q(note="x"), ({"note": "x"}, {"note": "y"}, {"note": None})),
    "generated": Case(lambda: Q(doubled__lt=10), ({"amount": 1}, {"amount": 5})),
    "json": Case(lambda: Q(data__paid=True), ({"data": {"paid": True}}, {"data": {"paid": False}}, {"data": {}})),
    "foreign key": Case(lambda: Q(owner__vip=True), VIP, own=False),
    "no items": Case(lambda: Q(items__isnull=True), (_with_items(), _with_items(True, False)), own=False),
    "items": Case(
        lambda: Q(items__is_open=True), (_with_items(True, True, False), _with_items(False), _with_items()), own=False
    ),
    "tags": Case(lambda: Q(tags__name="late"), (_tagged("late", "big"), _tagged("big"), _tagged()), own=False),
    "always": Case(Q, OWN),
    "manager joins": Case(lambda: Q(status="open"), (*OWN, VIP[0]), ManagedWithOwner),
    "manager counts": Case(lambda: Q(status="open"), (*OWN, VIP[0]), ManagedWithCount),
    "manager makes distinct": Case(lambda: Q(status="open"), (*OWN, VIP[0]), ManagedDistinct),
    "manager hides": Case(
        lambda: Q(status="open"), (*OWN, {"status": "open", "amount": 1}), ManagedNotHidden, own=False
    ),
    "proxy's manager": Case(
        lambda: Q(of_vip=True, size=2), ({"amount": 1}, VIP[0], {"amount": 2}), ProxyWithColumns, own=False
    ),
    "child of managed": Case(
        lambda: Q(status="open", place=""), ({"place": "x"}, {"place": "", "status": "done"}, VIP[0]), ManagedChild
    ),
}
each_condition = pytest.mark.parametrize("on", CASES, indirect=True)


class Stage:
    """A case and its negation, each the condition of its own policies, and what the database returns for them."""

    def __init__(self, case: Case, declare: Declare) -> None:
        self.case, self.model, self.declare = case, case.model, declare
        self.conditions = [case.when()] if case.when is Q else [case.when(), ~case.when()]
        self.now = timezone.now().replace(microsecond=0)
        self.changes = (*case.states, case.states[0])
        """From each state to the next, and from the last to the first."""
        self.automatic: list[dq.TimeoutPolicy[Any]] = []

    def arm_by_itself(self) -> None:
        for number, when in enumerate(self.conditions):
            name = f"automatic{number}"
            self.automatic.append(self.declare(self.model, name=name, after=HOUR, since="begun_at", when=when))

    def create(self) -> Any:
        return self.model._base_manager.create(begun_at=self.now)

    def is_visible(self, obj: Any) -> bool:
        return self.model._base_manager.filter(pk=obj.pk).exists()

    def holds(self, obj: Any, when: Q) -> bool:
        return self.model._base_manager.filter(when, pk=obj.pk).exists()

    def wanted(self, obj: Any) -> list[bool]:
        """For each automatic policy, whether a round must be pending."""
        has_begun = _table(obj).filter(pk=obj.pk, begun_at__isnull=False).exists()
        return [has_begun and self.holds(obj, when) for when in self.conditions]

    def pending(self, obj: Any) -> list[bool]:
        """For each automatic policy, whether one is."""
        rows = Timeout.objects.filter(object_id=str(obj.pk), state="pending")
        labels = list(rows.values_list("policy", flat=True))
        return [labels.count(policy.label) == 1 for policy in self.automatic]


@pytest.fixture
def on(request: pytest.FixtureRequest, declare: Declare) -> Stage:
    return Stage(CASES[request.param], declare)


def assign(obj: Any, change: Change) -> list[str]:
    """Change the object as a view does before saving; return the names of the fields."""
    if callable(change):
        change(obj)
        return []
    for name, value in change.items():
        setattr(obj, name, value)
    return list(change)


def write(obj: Any, change: Change) -> None:
    """In the database alone, where no signal notices it."""
    if callable(change):
        change(obj)
    else:
        _table(obj).filter(pk=obj.pk).update(**change)


@each_condition
def test_a_save_arms_cancels_and_moves_and_one_of_some_fields_costs_nothing_if_it_cannot_matter(
    on: Stage, django_assert_num_queries: Callable[[int], AbstractContextManager[Any]]
) -> None:
    obj = on.create()
    with CaptureQueriesContext(connection) as without_policies:
        obj.save(update_fields=["remark"])
    on.arm_by_itself()
    obj.save(update_fields=["begun_at", "remark"])  # what is asked once in a process has been asked
    # One query for all policies, without a lock, as the save is committed already.
    with django_assert_num_queries(len(without_policies) + (0 if on.case.own else 1)):
        obj.save(update_fields=["remark"])
    for number, change in enumerate(on.changes):
        names = assign(obj, change)
        if not on.is_visible(obj):  # Django itself cannot save a row that the base manager hides
            continue
        before = on.pending(obj)
        if names:  # in memory alone
            obj.save(update_fields=["remark"])
            assert on.pending(obj) == before == on.wanted(obj), change
        some = names or (["owner"] if on.case.own else ["remark"])
        obj.save(update_fields=some if number % 2 else None)
        assert on.pending(obj) == on.wanted(obj), change
        if obj.begun_at is not None:
            obj.begun_at = on.now + timedelta(minutes=number)
            obj.save()
            assert on.pending(obj) == on.wanted(obj), change
            due = Timeout.objects.filter(object_id=str(obj.pk), state="pending").values_list("due_at", flat=True)
            assert set(due) <= {obj.begun_at + HOUR}


@each_condition
def test_sync_makes_up_for_what_no_save_noticed(on: Stage) -> None:
    on.arm_by_itself()
    objects = [on.create() for _ in on.changes]
    for change_now in (list(on.changes), [*on.changes[1:], on.changes[0]]):
        for obj, change in zip(objects, change_now, strict=True):
            write(obj, change)
        if change_now[0] is on.changes[0]:
            dq.sync_timeouts(objects)
        else:
            for policy in on.automatic:
                sync_policy(policy, "default")
        assert [on.pending(obj) for obj in objects] == [on.wanted(obj) for obj in objects]


MODES: list[dict[str, Any]] = [{"alone": {}, "in_a_batch": {"batch": 50}}, {"together": {"together": 50}}]
"""In which ways the policies of a condition fire, and those of its negation."""


@each_condition
def test_only_what_matches_on_the_locked_row_is_fired_and_the_story_says_so_before(on: Stage) -> None:
    for number, when in enumerate(on.conditions):
        for how, options in MODES[number].items():
            ran: list[Any] = []
            policy = on.declare(on.model, note_in(ran), name=f"{how}{number}", when=when, **options)
            objects = [on.create() for _ in on.case.states]
            rows = [due(obj, policy) for obj in objects]
            for obj, change in zip(objects, on.case.states, strict=True):
                write(obj, change)
            holds = [on.holds(obj, when) for obj in objects]
            outlooks = [dq.explain_timeout(obj, policy).outlook for obj in objects]
            assert ["will be skipped" not in outlook for outlook in outlooks] == holds
            for rows_now in [[row] for row in rows] if how == "alone" else [rows]:
                fire(*rows_now)
            unmet = [UNMET if on.is_visible(obj) else HIDDEN for obj in objects]
            assert [state(row) for row in rows] == [FIRED if yes else no for yes, no in zip(holds, unmet, strict=True)]
            assert sorted(ran) == [obj.pk for obj, yes in zip(objects, holds, strict=True) if yes]


def note_in(ran: list[Any]) -> Callable[[Any, Any], None]:
    def handler(found: Any, timeouts: Any) -> None:
        ran.extend([obj.pk for obj in found] if isinstance(timeouts, list) else [found.pk])

    return handler


@needs_row_locks
@pytest.mark.parametrize("model", [Task, ManagedWithOwner, ManagedWithCount, ManagedDistinct])
def test_only_the_row_itself_is_locked(model: type[Model], declare: Declare) -> None:
    when = Q(owner__vip=True, status="open")
    policy = declare(model, name="automatic", after=lambda obj: HOUR, since="begun_at", when=when)
    by_hand = declare(model, name="by_hand", when=when)
    owner = Customer.objects.create(vip=True)
    objects: Any = model._base_manager
    obj = objects.create(begun_at=timezone.now(), owner=owner)
    with locking(owner), short_lock_waits():
        arm_saved(model, obj, "default")  # not save(), whose own statements lock what a foreign key points to
        row = due(obj, by_hand)
        dq.sync_timeouts(obj)
        fire(row)
        with dq.before_deadline(obj, policy) as guarded:
            pass
    assert state(row) == FIRED
    assert guarded is not None


@contextmanager
def short_lock_waits() -> Iterator[None]:
    """Make statements of this session fail if they must wait for a lock."""
    name, short, usual = {
        "postgresql": ("lock_timeout", "'1s'", "0"),
        "mysql": ("innodb_lock_wait_timeout", "1", "50"),
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION {name} = {short}")
        try:
            yield
        finally:
            cursor.execute(f"SET SESSION {name} = {usual}")
