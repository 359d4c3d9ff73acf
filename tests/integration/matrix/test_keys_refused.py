"""Primary keys whose text differs between Python and the databases are refused, at the latest when Django starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core import checks
from django.db import models
from django.test.utils import isolate_apps

from django_delayq import TimeoutPolicy, TimeoutRelation
from django_delayq.exceptions import PolicyError

Declare = Callable[..., TimeoutPolicy[Any]]


class Reversed(models.CharField):  # type: ignore[type-arg]
    """Stored as another text than Python has."""

    def from_db_value(self, value: Any, *_: Any) -> Any:
        return value[::-1]

    def get_prep_value(self, value: Any) -> Any:
        return value[::-1]


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "date": (models.DateField, {}, "is a DateField, which is not supported"),
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
