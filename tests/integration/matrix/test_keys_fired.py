"""Firing with each type of primary key: alone, several in one transaction, in batches, and without a transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import QuerySet

import django_delayq as dq
from django_delayq import TimeoutPolicy
from django_delayq.firing import plan
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, grouping, make_due, state
from tests.integration.matrix.keys import CASES, Case, make_world

pytestmark = pytest.mark.django_db(transaction=True)
FIRED = ("fired", "due")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_handlers_get_the_right_object(case: Case, declare: Callable[..., TimeoutPolicy[Any]]) -> None:
    world = make_world(case, declare)
    obj, twin, other = world.obj, world.twin, world.others[0]
    pk_of = world.auto.pk_of
    batches: list[tuple[list[Any], list[Any]]] = []

    def batch(objects: QuerySet[Any], timeouts: list[Timeout]) -> None:
        about: list[Any] = [timeout.content_object for timeout in timeouts]
        batches.append(([each.pk for each in objects], [each.pk for each in about]))

    batched = declare(case.policy_model, batch, name="batched", batch=5)
    outside = declare(case.policy_model, world.hand.handler, name="outside", atomic=False)

    alone = world.row(obj, world.auto)
    make_due(alone)
    fire(alone)
    assert state(alone) == FIRED and world.handled == [pk_of(obj)]

    unmet = world.row(other, world.auto)
    case.model._base_manager.filter(pk=other.pk).update(status="done")
    make_due(unmet)
    fire(unmet)
    assert state(unmet) == ("skipped", "condition")
    assert state(world.row(twin, world.auto)) == ("pending", "")

    world.handled.clear()
    grouping(world.hand)
    rows = [due(each, world.hand) for each in (obj, twin, other)]
    [work], _ = plan({row.pk: 1 for row in rows}, "default")
    assert len(work.ids) == 3
    fire(*rows)
    assert {state(row) for row in rows} == {FIRED}
    assert set(world.handled) == {pk_of(each) for each in (obj, twin, other)} and len(world.handled) == 3

    rows = [due(each, batched) for each in (obj, twin, other)]
    fire(*rows)
    [(pks, from_rows)] = batches
    assert pks == from_rows and set(pks) == {pk_of(each) for each in (obj, twin, other)}

    world.handled.clear()
    row = due(obj, outside)
    fire(row)
    assert state(row) == FIRED and world.handled == [pk_of(obj)]

    gone = due(other, world.hand)
    for table in (
        case.model._meta.concrete_model,
        *case.model._meta.all_parents,
    ):  # as by SQL, unseen
        table._base_manager.filter(pk=getattr(other, table._meta.pk.attname))._raw_delete("default")
    fire(gone)
    assert state(gone) == ("skipped", "gone")
    assert dq.get_deadline(twin, world.auto) is not None
