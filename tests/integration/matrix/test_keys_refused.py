"""Primary keys whose text differs between Python and the databases are refused, at the latest when Django starts."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections, models
from django.test.utils import isolate_apps

import django_delayq as dq
from django_delayq import TimeoutPolicy, TimeoutRelation
from django_delayq.checks import check_policies
from django_delayq.exceptions import PolicyError
from django_delayq.key_types import object_id_of, pk_of, refusal
from django_delayq.ledger.subjects import object_id
from tests.testapp.keys import DateTimeKey, DecimalKey, Holder, OwnChild, Parent

Declare = Callable[..., TimeoutPolicy[Any]]


class Reversed(models.CharField):  # type: ignore[type-arg]
    """Stored as another text than Python has."""

    def from_db_value(self, value: Any, *_: Any) -> Any:
        return value[::-1]

    def get_prep_value(self, value: Any) -> Any:
        return value[::-1]


REFUSED = {
    "duration": (models.DurationField, {}, "is a DurationField, which is not supported"),
    "time": (models.TimeField, {}, "is a TimeField, which is not supported"),
    "float": (models.FloatField, {}, "is a FloatField, which is not supported"),
    "binary": (models.BinaryField, {}, "is a BinaryField, which is not supported"),
    "boolean": (models.BooleanField, {}, "is a BooleanField, which is not supported"),
    "json": (models.JSONField, {}, "is a JSONField, which is not supported"),
    "converted": (Reversed, {"max_length": 10}, "is a Reversed, which is not supported"),
    "text without end": (models.TextField, {}, "is a TextField, which is not supported"),
    "long text": (models.CharField, {"max_length": 256}, "set max_length=255"),
}


@pytest.mark.parametrize("kind", REFUSED)
@isolate_apps("tests.testapp")
def test_a_key_without_one_text_is_refused_when_the_policy_is_declared(kind: str, declare: Declare) -> None:
    field, options, words = REFUSED[kind]
    meta = type("Meta", (), {"app_label": "testapp"})
    body = {"__module__": __name__, "Meta": meta, "code": field(primary_key=True, **options)}
    model: Any = type("Odd", (models.Model,), {**body, "timeouts": TimeoutRelation()})
    with pytest.raises(PolicyError) as refused:
        declare(model, name="odd")
    for part in ("testapp.odd.odd", "testapp.Odd", "'code'", words, "use an automatic primary key"):
        assert part in str(refused.value)
    [error] = [found for found in model._meta.get_field("timeouts").check() if found.id == "django_delayq.E010"]
    assert isinstance(error, checks.Error) and words in error.msg


@isolate_apps("tests.testapp")
def test_a_composite_key_is_refused(declare: Declare) -> None:
    class Composite(models.Model):
        pk = models.CompositePrimaryKey("a", "b")
        a = models.IntegerField()
        b = models.IntegerField()

        class Meta:
            app_label = "testapp"

    with pytest.raises(PolicyError, match="composite primary key are not supported. Use a single field"):
        declare(Composite, name="odd")


@isolate_apps("tests.testapp")
@pytest.mark.django_db
def test_decimals_with_more_digits_than_sqlite_stores_are_refused_there(declare: Declare) -> None:
    class Precise(models.Model):
        number = models.DecimalField(max_digits=16, decimal_places=2, primary_key=True)

        class Meta:
            app_label = "testapp"

    declare(Precise, name="precise")
    found = [error for error in check_policies() if error.id == "django_delayq.E011"]
    if connection.vendor != "sqlite":
        assert not found
        return
    assert "SQLite stores 15 digits of a decimal exactly: set max_digits=15" in found[0].msg
    with pytest.raises(SystemCheckError, match=r"E011"):
        call_command("check")
    with pytest.raises(PolicyError, match="set max_digits=15"):
        object_id(models.F("number"), Precise, "default")


def test_datetimes_in_a_local_time_zone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    database = connections["default"]
    assert refusal(DateTimeKey, database) == ""
    monkeypatch.setattr(database, "timezone_name", "Europe/Berlin")
    words = refusal(DateTimeKey, database)
    assert words == "" if connection.vendor == "postgresql" else "remove TIME_ZONE" in words


@pytest.mark.django_db
def test_a_decimal_with_more_places_than_the_key_is_refused(declare: Declare) -> None:
    declare(DecimalKey, name="hand")
    obj = DecimalKey.objects.create(number=Decimal("1.25"))
    obj.number = Decimal("1.254")
    with pytest.raises(ValueError, match=r"1\.254 is not a key with at most 10 digits, 2 of them"):
        dq.schedule_timeout(obj, "hand", hours=1)


@isolate_apps("tests.testapp")
def test_a_decimal_key_may_have_more_digits_than_python_calculates_with() -> None:
    class Precise(models.Model):
        number = models.DecimalField(max_digits=38, decimal_places=10, primary_key=True)

        class Meta:
            app_label = "testapp"

    text = "1234567890123456789012345678.0123456789"
    assert object_id_of(Precise, Decimal(text)) == text
    assert pk_of(Precise, text) == Decimal(text)
    for wrong in ("1e28", "1e-11", text + "1", "1e999999999", "NaN", "-Infinity"):
        with pytest.raises(ValueError, match="is not a key of Precise"):
            pk_of(Precise, wrong)


@pytest.mark.django_db
def test_joins_that_begin_at_another_model_find_a_child_with_a_key_of_its_own(declare: Declare) -> None:
    declare(Parent, name="hand")
    children = [OwnChild.objects.create(id=number, number=number + 1) for number in (1, 2, 3)]
    holders = [Holder.objects.create(child=child) for child in children]
    without_child = Holder.objects.create()
    dq.schedule_timeout(children[0], "hand", hours=1)
    assert list(Holder.objects.filter(child__timeouts__state="pending")) == [holders[0]]
    assert set(Holder.objects.exclude(child__timeouts__state="pending")) == {*holders[1:], without_child}
    assert set(OwnChild.objects.exclude(holder__child__timeouts__state="pending")) == set(children[1:])
