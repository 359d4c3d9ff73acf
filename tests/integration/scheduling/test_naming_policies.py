"""Wherever a policy is named, the policy itself serves; and it still looks like the function that it was."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from django.template import engines
from django.utils import timezone

import django_delayq as dq
from tests.testapp.models import Order
from tests.testapp.timeouts import cancel_unpaid


def test_a_policy_names_itself() -> None:
    assert dq.get_policy(cancel_unpaid) is cancel_unpaid


@pytest.mark.parametrize("wrong", [None, 5, Order])
def test_what_is_no_name_is_an_unknown_policy(wrong: Any) -> None:
    with pytest.raises(dq.UnknownPolicy, match="Name a policy by its name, its label or the policy itself"):
        dq.get_policy(wrong)


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


def test_an_alias_that_is_no_text_is_refused() -> None:
    aliases: Any = (1,)
    with pytest.raises(dq.PolicyError, match="aliases"):
        dq.timeout_policy(Order, name="other", aliases=aliases)(lambda order, timeout: None)
