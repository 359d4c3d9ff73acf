"""Firing with each type of primary key: alone, several in one transaction, in batches, and without a transaction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q, QuerySet
from django.utils import timezone

import django_delayq as dq
from django_delayq import TimeoutPolicy
from django_delayq.firing import plan
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, make_due, state
from tests.integration.matrix.keys import CASES, World, make_world
from tests.testapp import keys

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
FIRED = ("fired", "due")
Declare = Callable[..., TimeoutPolicy[Any]]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def world(request: pytest.FixtureRequest, declare: Declare) -> World:
    return make_world(request.param, declare)


def test_a_handler_that_is_fired_alone_gets_the_right_object(world: World, declare: Declare) -> None:
    obj, twin, other, model = world.obj, world.twin, world.others[0], world.case.model
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


def test_handlers_that_share_a_transaction_and_batches_get_the_right_objects(world: World, declare: Declare) -> None:
    objects = [world.obj, world.twin, world.others[0]]
    expected = {world.auto.pk_of(each) for each in objects}
    batches: list[tuple[list[Any], list[Any]]] = []

    def batch(queryset: QuerySet[Any], timeouts: list[Timeout]) -> None:
        about: list[Any] = [timeout.content_object for timeout in timeouts]
        batches.append(([each.pk for each in queryset], [each.pk for each in about]))

    batched = declare(world.case.policy_model, batch, name="batched", batch=5)
    handled: list[Any] = []
    shared = declare(world.case.policy_model, lambda obj, timeout: handled.append(obj.pk), name="shared", together=5)
    rows = [due(each, shared) for each in objects]
    [work], _ = plan({row.pk: 1 for row in rows}, "default")
    assert len(work.ids) == 3
    fire(*rows)
    assert {state(row) for row in rows} == {FIRED}
    assert set(handled) == expected and len(handled) == 3

    fire(*[due(each, batched) for each in objects])
    [(pks, from_rows)] = batches
    assert pks == from_rows and set(pks) == expected
    assert dq.get_deadline(world.twin, world.auto) is not None


@pytest.mark.skipif(connection.vendor != "postgresql", reason="of PostgreSQL, which returns character(n) with spaces")
def test_a_key_that_the_database_pads_with_spaces_is_fired(declare: Declare) -> None:
    handled: list[str] = []
    options: dict[str, Any] = {"name": "padded", "since": "begun_at", "after": timedelta(0), "when": Q(status="open")}
    policy = declare(keys.TextKey, lambda obj, timeout: handled.append(obj.pk), **options)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE testapp_textkey RENAME TO its_own")
        columns = "code character(40) PRIMARY KEY, status varchar(10), begun_at timestamptz"
        cursor.execute(f"CREATE TABLE testapp_textkey ({columns})")
    try:
        for code in ("a", "b"):
            keys.TextKey.objects.create(code=code, begun_at=timezone.now())
        rows = list(dq.pending_timeouts(policy=policy))
        fire(*rows)
        assert [state(row) for row in rows] == [FIRED, FIRED]
        assert [pk.rstrip() for pk in handled] == ["a", "b"]
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE testapp_textkey")
            cursor.execute("ALTER TABLE its_own RENAME TO testapp_textkey")
