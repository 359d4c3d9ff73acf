"""Wherever a policy is named, the policy itself serves; and it still looks like the function that it was."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from django.db import models
from django.template import engines
from django.test.utils import isolate_apps
from django.utils import timezone

import django_delayq as dq
from tests.testapp.models import Order
from tests.testapp.timeouts import cancel_unpaid


def test_a_policy_names_itself() -> None:
    assert dq.get_policy(cancel_unpaid) is cancel_unpaid


@isolate_apps("tests.testapp")
def test_a_model_and_its_name_give_one_label_also_in_an_app_with_capitals() -> None:
    class Invoice(models.Model):
        class Meta:
            app_label = "Billing"

    given: list[Any] = [Invoice, "Billing.Invoice"]
    labels = {dq.TimeoutPolicy(model=model, handler=lambda *_: None, name="remind").label for model in given}
    assert labels == {"Billing.invoice.remind"}


@pytest.mark.parametrize("wrong", [None, 5, Order, (Order,), (Order, "remind", 1), ("testapp.Order", "remind")])
def test_what_is_no_name_is_an_unknown_policy(wrong: Any) -> None:
    with pytest.raises(dq.UnknownPolicy, match="Name a policy by its name, its label or the policy itself"):
        dq.get_policy(wrong)


@pytest.mark.parametrize("name", ["chase", "testapp.parcel.chase"])
def test_a_policy_of_another_model_is_named_with_its_model(name: str) -> None:
    with pytest.raises(dq.UnknownPolicy) as caught:
        dq.schedule_timeout(Order(pk=1), name, hours=1)
    assert str(caught.value) == f"{name!r} is declared for testapp.Parcel, not for testapp.Order."


def test_a_name_means_its_policy_and_not_another_one_that_was_called_so_elsewhere(declare: Any) -> None:
    other = declare(Order, name="other", aliases=("former.order.nudge",))
    nudge = declare(Order, name="nudge")
    assert dq.get_policy((Order, "nudge")) is nudge
    assert dq.get_policy("former.order.nudge") is other


def test_similar_names_are_those_whose_last_part_is_similar() -> None:
    with pytest.raises(dq.UnknownPolicy) as caught:
        dq.get_policy("testapp.order.chsae")
    assert str(caught.value).endswith("Did you mean 'testapp.parcel.chase'?")
    with pytest.raises(dq.UnknownPolicy) as caught:
        dq.get_policy((Order, "xyz"))
    listed = str(caught.value).partition("Known: ")[2].rstrip(".").split(", ")
    assert listed == sorted(policy.name for policy in dq.get_policies(Order)), "each once"


@pytest.mark.parametrize("wrong", ["testapp.Order", 5, Order()])
def test_policies_of_what_is_no_model_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="takes a model class, not "):
        dq.get_policies(wrong)


def test_registering_a_function_is_refused_with_the_decorator() -> None:
    def remind(order: Any, timeout: Any) -> None: ...

    register: Any = dq.register_policy
    with pytest.raises(dq.PolicyError, match=r"takes a TimeoutPolicy, not .*remind.*@timeout_policy\(Order, after="):
        register(remind)


@pytest.mark.django_db
def test_a_policy_in_the_context_of_a_template_is_not_called() -> None:
    order = Order.objects.create(created_at=timezone.now())
    template = engines["django"].from_string("{% load delayq %}{% deadline order policy as due %}{{ due.state }}")
    assert template.render({"order": order, "policy": cancel_unpaid}) == "pending"


def test_a_policy_looks_like_its_handler_and_its_class_like_a_class() -> None:
    assert cancel_unpaid.__name__ == "cancel_unpaid"  # type: ignore[attr-defined]
    assert inspect.signature(cancel_unpaid) == inspect.signature(cancel_unpaid.handler)
    assert inspect.getdoc(dq.get_policy((Order, "kill_worker"))) == "Kill the process before anything can be recorded."
    assert "handler" in inspect.signature(dq.TimeoutPolicy).parameters


@pytest.mark.parametrize("option", ["aliases", "search"])
@pytest.mark.parametrize("value", [(1,), 1, None])
def test_an_alias_or_a_search_that_is_no_text_is_refused(option: str, value: Any) -> None:
    declare: Any = dq.timeout_policy
    with pytest.raises(dq.PolicyError, match=option):
        declare(Order, name="other", **{option: value})(lambda order, timeout: None)
