"""Conditions that a system check reports: the database refuses them, or they compare with a time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.postgres.functions import TransactionNow
from django.core.checks import CheckMessage, run_checks
from django.db import DatabaseError, connection, transaction
from django.db.models import Exists, F, Func, IntegerField, OuterRef, Q, Value
from django.db.models.functions import Coalesce, Now
from django.db.models.lookups import Exact, GreaterThan
from django.utils import timezone

import django_delayq as dq
from django_delayq.policy.policies import registry
from django_delayq.sql.now import DatabaseNow
from tests.testapp.market import Purchase
from tests.testapp.models import Task

pytestmark = pytest.mark.django_db
Declare = Callable[..., dq.TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)


def found(check_id: str, **options: Any) -> list[CheckMessage]:
    return [each for each in run_checks(**options) if each.id == f"django_delayq.{check_id}"]


UNKNOWN = Func("status", function="no_such_function", output_field=IntegerField())
ONLY_POSTGRESQL = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="the others compare strings with numbers"
)


@pytest.mark.dialect
@pytest.mark.parametrize("option", ["when", "hold_when"])
@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (Task, Q(Exact(UNKNOWN, 1))),
        pytest.param(Purchase, ~Q(remarks__is_open=True), marks=ONLY_POSTGRESQL),  # whose `object_id` is a string
    ],
    ids=["function", "string for a key"],
)
def test_a_condition_that_the_database_refuses_is_reported_by_a_check_of_it(
    declare: Declare, model: Any, refused: Q, option: str
) -> None:
    """Every save failed, and no check reported it."""
    since = "begun_at" if model is Task else "created_at"
    options: dict[str, Any] = {"after": HOUR, "since": since, "when": Q()}
    policy = declare(model, name="refused", **{**options, option: refused})
    assert found("W007") == []
    (message,) = found("W007", databases=["default"])
    assert message.obj == policy and f" {option} of {policy.label}" in message.msg
    assert str(message).count("\n") == 1
    with pytest.raises(DatabaseError), transaction.atomic():
        model.objects.create(**{since: timezone.now()})


AT_START = timezone.now()
TIMES: dict[str, tuple[Q, bool | None]] = {
    "of the start": (Q(begun_at__lt=AT_START), True),
    "a day": (Q(begun_at__date=AT_START.date()), True),
    "a range": (Q(status="open") & ~Q(begun_at__range=(AT_START, AT_START + HOUR)), True),
    "a value": (Q(begun_at__gt=Coalesce("resumed_at", Value(AT_START))), True),
    "a lookup": (Q(GreaterThan(F("begun_at"), AT_START)), True),
    "of other rows": (Q(Exists(Task.objects.filter(parent=OuterRef("pk"), begun_at__lt=AT_START))), True),
    "of a list": (Q(parent__in=Task.objects.filter(begun_at__lt=Now() - HOUR)), False),
    "now": (Q(begun_at__lt=Now()), False),
    "an hour ago": (~Q(begun_at__lt=Now() - HOUR), False),
    "of the transaction": (Q(begun_at__lt=TransactionNow()), False),
    "of the ledger": (Q(begun_at__lt=DatabaseNow()), False),
    "none": (Q(begun_at__lt=F("resumed_at") + HOUR, status="2026-11-28", amount=2026), None),
}


@pytest.mark.parametrize("option", ["when", "hold_when"])
@pytest.mark.parametrize("kind", TIMES)
def test_a_time_in_a_condition_is_warned_of(declare: Declare, option: str, kind: str) -> None:
    """One that Python has computed stays as it was at the start; the database's changes without a save."""
    condition, is_fixed = TIMES[kind]
    options: dict[str, Any] = {"after": HOUR, "since": "begun_at", "when": Q(), option: condition}
    silenced = declare(Task, name="silenced", silenced_checks="W017", **options)
    assert found("W017") == []
    registry.remove(silenced)
    policy = declare(Task, name="timed", **options)
    messages = found("W017")
    assert [each.obj for each in messages] == [policy] * (is_fixed is not None)
    for message in messages:
        assert message.msg.startswith(f"{option} of testapp.task.timed compares with ")
        assert ("stays as it is" in message.msg) is is_fixed
        assert "since" in str(message.hint) and str(message).count("\n") == 1
