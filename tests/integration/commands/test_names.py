"""Commands name an object by what people call it, beside its primary key, and find it by that name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError

from django_delayq.models import Timeout
from tests.integration.commands.conftest import Do
from tests.integration.operations.conftest import pending
from tests.testapp.models import Customer, ExpressOrder, Order

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("without_redis", "policies")]


@pytest.fixture
def policies(declare: Callable[..., Any]) -> None:
    declare(Order, name="noted", search="note")


def titles(text: str) -> set[str]:
    return {part.splitlines()[0].partition(" of ")[2] for part in text.split("\n\n")[1:]}


def test_the_list_shows_the_name_beside_the_key_and_no_column_without_names(do: Do) -> None:
    plain = pending(Order.objects.create())
    assert "name" not in do("delayq_list", "--all").out.splitlines()[0].split()
    order = Order.objects.create(note="A-2026-0050")
    pending(order)
    head, *rows = do("delayq_list", "--all").out.splitlines()
    assert head.split()[:4] == ["id", "policy", "object", "name"]
    assert [row.split()[2:4] for row in rows if row][-1] == [str(order.pk), "A-2026-0050"]
    assert str(plain.pk) in rows[0]


def test_an_object_is_explained_by_its_number(do: Do) -> None:
    order = Order.objects.create(note="A-2026-0050")
    pending(order), pending(Order.objects.create(note="A-2026-0019"))
    answer = do("delayq_explain", "testapp.order", "A-2026-0050")
    assert titles(answer.out) == {f"{order.pk}: A-2026-0050"} and not answer.err
    assert titles(do("delayq_explain", "testapp.order", str(order.pk)).out) == {f"{order.pk}: A-2026-0050"}
    (*_, value) = json.loads(do("delayq_explain", "testapp.order", "A-2026-0050", "--json").out)
    assert value["name"] == "A-2026-0050"
    with pytest.raises(CommandError, match="A-1 is not a key of Order"):
        do("delayq_explain", "testapp.order", "A-1")


def test_a_child_is_explained_by_the_number_of_its_parent(do: Do) -> None:
    order = ExpressOrder.objects.create(note="A-7")
    pending(order)
    assert titles(do("delayq_explain", "testapp.expressorder", "A-7").out) == {f"{order.pk}: A-7"}


def test_a_key_takes_precedence_over_a_number_and_the_other_object_is_named(do: Do) -> None:
    wanted = Order.objects.create()
    other = Order.objects.create(note=str(wanted.pk))
    pending(wanted), pending(other)
    answer = do("delayq_explain", "testapp.order", str(wanted.pk))
    assert titles(answer.out) == {str(wanted.pk)}
    assert (
        answer.err.strip() == f"{wanted.pk} is a primary key. As a field in search= it also finds the order {other.pk}."
    )
    Timeout.objects.filter(object_id=str(wanted.pk)).delete()
    wanted_pk = wanted.pk
    Order.objects.filter(pk=wanted_pk).delete()
    assert titles(do("delayq_explain", "testapp.order", str(wanted_pk)).out) == {f"{other.pk}: {wanted_pk}"}


def test_without_a_search_an_object_is_named_by_its_str(
    do: Do, declare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(Customer, name="greet")
    customer = Customer.objects.create(name="Ada")
    monkeypatch.setattr(Customer, "__str__", lambda self: self.name)
    assert titles(do("delayq_explain", "testapp.customer", str(customer.pk)).out) == {f"{customer.pk}: Ada"}
