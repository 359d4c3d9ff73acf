"""Primary keys whose text differs between Python and the databases are refused, at the latest when Django starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core import checks
from django.db import models
from django.test.utils import isolate_apps

import django_delayq as dq
from django_delayq import TimeoutPolicy, TimeoutRelation
from django_delayq.exceptions import PolicyError
from tests.testapp.keys import Holder, OwnChild, Parent

Declare = Callable[..., TimeoutPolicy[Any]]


class Reversed(models.CharField):  # type: ignore[type-arg]
    """Stored as another text than Python has."""

    def from_db_value(self, value: Any, *_: Any) -> Any:
        return value[::-1]

    def get_prep_value(self, value: Any) -> Any:
        return value[::-1]


NAMED = ("Date", "DateTime", "GenericIPAddress", "Duration", "Time", "Float", "Binary", "Boolean", "JSON", "Text")
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    **{name: (getattr(models, f"{name}Field"), {}, f"is a {name}Field, which is not supported") for name in NAMED},
    "Decimal": (
        models.DecimalField,
        {"max_digits": 9, "decimal_places": 2},
        "is a DecimalField, which is not supported",
    ),
    "converted": (Reversed, {"max_length": 10}, "is a Reversed, which is not supported"),
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
