"""Every verb, and firing, with every type of primary key; a second object with a similar key keeps its timeouts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Count, FilteredRelation, Model, Q, QuerySet
from django.utils import timezone

import django_delayq as dq
from django_delayq import TimeoutPolicy
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from django_delayq.sql.key_types import root_of_key
from tests.integration.firing.conftest import due, fire, make_due, state
from tests.testapp import keys
from tests.testapp.models import Voucher

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db]

PENDING, CANCELLED, FIRED = ["pending"], ["cancelled"], ("fired", "due")
commits = pytest.mark.django_db(transaction=True)
Declare = Callable[..., TimeoutPolicy[Any]]


@dataclass(frozen=True)
class Case:
    """A model, the model of its policies, and the fields that make three objects."""

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


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def world(request: pytest.FixtureRequest, declare: Declare) -> Iterator[World]:
    """Policies, and three open objects, whose timeouts are armed."""
    case, handled, begun = request.param, list[Any](), timezone.now()

    def handler(obj: Any, timeout: Timeout) -> None:
        assert timeout.content_object == obj
        handled.append(obj.pk)

    automatic: dict[str, Any] = {"after": timedelta(hours=1), "since": "begun_at", "when": Q(status="open")}
    auto = declare(case.policy_model, handler, name="auto", **automatic)
    hand = declare(case.policy_model, handler, name="hand")
    obj, twin, other = (case.make(number, begun_at=begun) for number in range(3))
    made = World(case, auto, hand, obj, twin, other, handled)
    dq.schedule_timeout(made.twin, made.hand, hours=1)
    before = [vars(row) | {"_state": None} for row in made.rows(made.twin)]
    yield made
    assert [vars(row) | {"_state": None} for row in made.rows(made.twin)] == before, "another object's timeouts"


def test_saving_arms_cancels_and_arms_again(world: World) -> None:
    obj, auto = world.obj, world.auto
    assert world.states(obj, auto) == world.states(world.twin, auto) == PENDING
    obj.status = "done"
    obj.save()
    assert world.states(obj, auto) == CANCELLED
    obj.status = "open"
    obj.save(update_fields=["status"])
    assert world.states(obj, auto) == [*CANCELLED, *PENDING]
    obj.begun_at += timedelta(minutes=1)
    obj.save()
    assert world.row(obj, auto).since_at == obj.begun_at


def test_deleting_cancels(world: World) -> None:
    dq.schedule_timeout(world.obj, world.hand, hours=1, key="k")
    rows = world.rows(world.obj)
    world.obj.delete()
    found = Timeout.objects.filter(pk__in=[row.pk for row in rows])
    assert {(row.state, row.cause) for row in found} == {("cancelled", "gone")}
    rows = world.rows(world.other)
    world.case.model._base_manager.filter(pk=world.other.pk).delete()
    assert {row.state for row in Timeout.objects.filter(pk__in=[row.pk for row in rows])} == {"cancelled"}


def test_the_single_verbs(world: World) -> None:
    obj, hand = world.obj, world.hand
    row = dq.schedule_timeout(obj, hand, hours=1)
    assert row.content_object == world.case.policy_model._base_manager.get(pk=world.auto.pk_of(obj))
    moved = dq.reschedule_timeout(obj, hand, hours=2)
    assert moved is not None and moved.pk == row.pk
    extended = dq.extend_timeout(obj, hand, hours=1)
    assert extended is not None and extended.due_at == moved.due_at + timedelta(hours=1)
    assert dq.get_deadline(obj, hand) == extended.due_at
    assert "It is due" in str(dq.explain_timeout(obj, world.auto))
    assert dq.schedule_timeout(obj, hand, hours=5).pk == row.pk
    assert dq.cancel_timeout(obj, hand)
    assert dq.get_deadline(obj, hand) is None
    assert world.states(obj, hand) == CANCELLED


def test_the_bulk_verbs(world: World) -> None:
    obj, hand, model = world.obj, world.hand, world.case.model
    mine = model._base_manager.filter(pk__in=[obj.pk, world.other.pk])
    assert dq.schedule_timeouts([obj], hand, hours=1) == 1
    assert dq.schedule_timeouts(mine, hand, hours=2) == 2
    due = dq.get_deadline(obj, hand)
    assert due is not None
    for target in (obj, [obj], model._base_manager.filter(pk=obj.pk)):
        assert dq.extend_timeouts(dq.pending_timeouts(target, hand), hours=1) == 1
    assert dq.get_deadline(obj, hand) == due + timedelta(hours=3)
    assert dq.reschedule_timeouts(dq.pending_timeouts(mine, hand), hours=9) == 2
    assert dq.cancel_timeouts(dq.pending_timeouts(obj)) == 2
    assert world.states(obj, hand) == world.states(obj, world.auto) == CANCELLED
    assert dq.cancel_timeouts(dq.pending_timeouts([world.other], "hand")) == 1


def test_syncing_arms_and_cancels(world: World) -> None:
    model, obj, auto = world.case.model, world.obj, world.auto
    one = model._base_manager.filter(pk=obj.pk)
    assert dq.sync_timeouts(obj) == dq.sync_timeouts(model._base_manager.all()) == 0
    one.update(status="done")
    assert dq.sync_timeouts([obj]) == 1
    assert world.states(obj, auto) == CANCELLED
    one.update(status="open")
    assert dq.sync_timeouts(one) == 1
    assert world.states(obj, auto) == [*CANCELLED, *PENDING]
    one.update(status="done")
    assert sync_policy(auto, "default").cancelled == 1
    one.update(status="open")
    assert sync_policy(auto, "default").armed == 1
    assert sum(sync_policy(auto, "default")) == 0
    assert world.states(obj, auto) == [*CANCELLED, *CANCELLED, *PENDING]


def test_the_relation_of_one_object_and_prefetched(world: World) -> None:
    objects = [world.obj, world.twin, world.other]
    expected = {obj.pk: [row.pk for row in world.rows(obj)] for obj in objects}
    assert all(expected.values())
    assert {obj.pk: [row.pk for row in obj.timeouts.order_by("id")] for obj in objects} == expected
    found = world.case.model._base_manager.prefetch_related("timeouts")
    assert {obj.pk: sorted(row.pk for row in obj.timeouts.all()) for obj in found} == expected
    rows = Timeout.objects.filter(pk__in=[pk for pks in expected.values() for pk in pks])
    if not issubclass(world.case.model, keys.PolyBase):  # Django compares classes: not those of polymorphic instances
        owners: dict[int, Any] = {row.pk: row.content_object for row in rows.prefetch_related("content_object")}
        assert {owners[pk].pk for pk in expected[world.obj.pk]} == {world.auto.pk_of(world.obj)}
    assert world.obj.timeouts.filter(policy=world.auto.label).get() == world.row(world.obj, world.auto)


def test_joins_along_the_relation(world: World) -> None:
    model, obj, twin, other = world.case.model, world.obj, world.twin, world.other
    rows = model._base_manager.order_by("pk")
    dq.cancel_timeout(obj, world.auto)

    def keys_of(found: Any) -> set[Any]:
        return {each.pk for each in found}

    assert keys_of(rows.filter(timeouts__state="pending")) == {twin.pk, other.pk}
    assert keys_of(rows.filter(timeouts__state="cancelled")) == {obj.pk}
    assert keys_of(rows.filter(timeouts=world.row(obj, world.auto))) == {obj.pk}
    assert keys_of(rows.exclude(timeouts__state="pending")) == {obj.pk}
    assert keys_of(rows.filter(timeouts__isnull=True)) == set()
    counted = rows.annotate(waiting=Count("timeouts", filter=Q(timeouts__state="pending")), all=Count("timeouts"))
    numbers = {each.pk: (each.waiting, each.all) for each in counted}
    assert numbers == {obj.pk: (0, 1), twin.pk: (2, 2), other.pk: (1, 1)}
    assert keys_of(rows.filter(~Q(timeouts__policy=world.hand.label))) == {obj.pk, other.pk}
    inner = model._base_manager.filter(timeouts__state="cancelled").values("pk")
    assert keys_of(rows.filter(pk__in=inner)) == {obj.pk}
    assert keys_of(rows.filter(timeouts__in=[world.row(obj, world.auto)])) == {obj.pk}
    waiting = FilteredRelation("timeouts", condition=Q(timeouts__state="pending"))
    assert keys_of(rows.annotate(waiting=waiting).filter(waiting__isnull=True)) == {obj.pk}


def test_a_deadline_as_a_column_and_the_guard(world: World) -> None:
    obj, twin, other, auto = world.obj, world.twin, world.other, world.auto
    dq.reschedule_timeout(obj, auto, hours=9)
    dq.cancel_timeout(other, auto)
    rows = world.case.model._base_manager.annotate(due=dq.Deadline("auto"))
    expected = {each.pk: dq.get_deadline(each, "auto") for each in (obj, twin, other)}
    assert dict(rows.values_list("pk", "due")) == expected or {each.pk: each.due for each in rows} == expected
    assert [each.pk for each in rows.filter(due__isnull=False).order_by("due")] == [twin.pk, obj.pk]
    assert [each.pk for each in rows.filter(due__gt=timezone.now() + timedelta(hours=5))] == [obj.pk]
    with dq.before_deadline(obj, auto) as row:
        assert row is not None and row.pk == world.row(obj, auto).pk
        obj.status = "done"
        obj.save()
    assert world.row(obj, auto).cause == "condition"


@commits
def test_a_handler_that_is_fired_alone_gets_the_right_object(world: World, declare: Declare) -> None:
    obj, twin, other, model = world.obj, world.twin, world.other, world.case.model
    outside = declare(world.case.policy_model, world.hand.handler, name="outside", atomic=False)
    alone = world.row(obj, world.auto)
    make_due(alone)
    rows = [alone, due(obj, outside)]
    for row in rows:
        fire(row)
    assert {state(row) for row in rows} == {FIRED}
    assert world.handled == [world.auto.pk_of(obj)] * 2
    unmet = world.row(other, world.auto)
    model._base_manager.filter(pk=other.pk).update(status="done")
    make_due(unmet)
    fire(unmet)
    assert state(unmet) == ("skipped", "condition")
    gone = due(other, world.hand)
    for table in (model._meta.concrete_model, *model._meta.all_parents):
        # As by SQL: no signal cancels the timeout.
        table._base_manager.filter(pk=getattr(other, table._meta.pk.attname))._raw_delete("default")
    fire(gone)
    assert state(gone) == ("skipped", "gone")
    assert state(world.row(twin, world.auto)) == ("pending", "")


@commits
def test_handlers_that_share_a_transaction_and_batches_get_the_right_objects(world: World, declare: Declare) -> None:
    objects = [world.obj, world.twin, world.other]
    expected = {world.auto.pk_of(each) for each in objects}
    batches: list[tuple[list[Any], list[Any]]] = []

    def batch(queryset: QuerySet[Any], timeouts: list[Timeout]) -> None:
        about: list[Any] = [timeout.content_object for timeout in timeouts]
        batches.append(([each.pk for each in queryset], [each.pk for each in about]))

    batched = declare(world.case.policy_model, batch, name="batched", batch=5)
    handled: list[Any] = []
    shared = declare(world.case.policy_model, lambda obj, timeout: handled.append(obj.pk), name="shared", together=5)
    rows = [due(each, shared) for each in objects]
    fire(*rows)
    assert {state(row) for row in rows} == {FIRED}
    assert set(handled) == expected and len(handled) == 3
    fire(*[due(each, batched) for each in objects])
    [(pks, from_rows)] = batches
    assert pks == from_rows and set(pks) == expected
    assert dq.get_deadline(world.twin, world.auto) is not None


def test_joins_that_begin_at_another_model_find_a_child_with_a_key_of_its_own(declare: Declare) -> None:
    declare(keys.Parent, name="hand")
    children = [keys.OwnChild.objects.create(id=number, number=number + 1) for number in (1, 2, 3)]
    holders = [keys.Holder.objects.create(child=child) for child in children]
    without_child = keys.Holder.objects.create()
    dq.schedule_timeout(children[0], "hand", hours=1)
    assert list(keys.Holder.objects.filter(child__timeouts__state="pending")) == [holders[0]]
    assert set(keys.Holder.objects.exclude(child__timeouts__state="pending")) == {*holders[1:], without_child}
    assert set(keys.OwnChild.objects.exclude(holder__child__timeouts__state="pending")) == set(children[1:])


def test_keys_of_timeouts_that_differ_in_case_or_spaces_are_different(declare: Declare) -> None:
    hand = declare(keys.BigAutoKey, name="hand")
    obj = keys.BigAutoKey.objects.create()
    for key in ("a", "A", "a ", "ä"):
        dq.schedule_timeout(obj, hand, hours=1, key=key)
    assert [row.key for row in dq.pending_timeouts(obj, hand, key="a")] == ["a"]
    assert dq.cancel_timeouts(dq.pending_timeouts(obj, hand, key="A")) == 1
    assert sorted(dq.pending_timeouts(obj, hand).values_list("key", flat=True)) == ["a", "a ", "ä"]


def test_a_key_that_ends_with_spaces_is_stored_as_it_is_by_bulk_writes_too(declare: Declare) -> None:
    options: Any = {"name": "auto", "since": "begun_at", "when": Q(status="open")}
    auto, hand = declare(keys.TextKey, after=timedelta(hours=1), **options), declare(keys.TextKey, name="hand")
    [obj] = keys.TextKey.objects.bulk_create([keys.TextKey(code="a  ", begun_at=timezone.now())])
    assert dq.sync_timeouts([obj]) == dq.schedule_timeouts([obj], hand, hours=1) == 1
    assert {row.object_id for row in Timeout.objects.all()} == {"a  "}
    assert dq.pending_timeouts(keys.TextKey.objects.all()).count() == 2
    assert sum(sync_policy(auto, "default")) == 0


def test_the_sync_notices_a_key_in_other_letters_that_a_collation_takes_for_the_same() -> None:
    auto = dq.get_policy((Voucher, "expire"))
    Voucher.objects.create(code="Spring é", issued_at=timezone.now())
    Voucher.objects.update(code="SPRING E")
    done = sync_policy(auto, "default")
    assert (done.armed, done.cancelled) == (1, 1)
    assert dict(Timeout.objects.values_list("object_id", "state")) == {"Spring é": "cancelled", "SPRING E": "pending"}
    assert sum(sync_policy(auto, "default")) == 0
