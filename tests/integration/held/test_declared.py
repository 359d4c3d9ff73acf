"""What a declaration with `hold_when` must fit, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Exists, OuterRef, Q

import django_delayq as dq
from django_delayq import checks
from django_delayq.ledger.declarations import fingerprint
from django_delayq.policy.reads import columns_read, reads_other_rows
from tests.testapp.models import Customer, Order

HOUR = timedelta(hours=1)
AUTOMATIC: dict[str, Any] = {"after": HOUR, "since": "created_at", "when": Q(status="unpaid")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**AUTOMATIC, "hold_when": "status"}, "hold_when must be a Q, not of type str"),
        ({**AUTOMATIC, "hold_when": Q()}, "would hold every timeout"),
        ({"after": HOUR, "hold_when": Q(note="talks")}, "hold_when needs when and since"),
        ({**AUTOMATIC, "hold_when": Q(nothing=1)}, "its hold_when does not fit"),
        ({**AUTOMATIC, "hold_when": Q(note__in=iter([]))}, "its hold_when is an iterator without items"),
    ],
)
def test_a_wrong_hold_when_is_refused(
    declare: Callable[..., dq.TimeoutPolicy[Any]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(dq.PolicyError, match=words):
        declare(Order, name="wrong", **options)


def test_its_columns_are_read_and_its_fingerprint_differs(declare: Callable[..., dq.TimeoutPolicy[Any]]) -> None:
    policy = declare(Order, name="talks", hold_when=Q(note="talks"), **AUTOMATIC)
    assert {"status", "note", "created_at"} <= (columns_read(policy) or set())
    assert fingerprint(policy) != fingerprint(declare(Order, name="plain", **AUTOMATIC))


def test_a_related_lookup_is_watched_and_a_subquery_is_reported(declare: Callable[..., dq.TimeoutPolicy[Any]]) -> None:
    watched = declare(Order, name="talks", hold_when=Q(customer__vip=True), **AUTOMATIC)
    vip = Exists(Customer.objects.filter(pk=OuterRef("customer"), vip=True))
    policy = declare(Order, name="hidden", hold_when=Q(vip), **AUTOMATIC)
    assert reads_other_rows(watched)
    assert reads_other_rows(policy)
    found = [each for each in checks.check_policies() if each.obj in {watched, policy}]
    assert [each.obj for each in found if "hold_when" in each.msg] == [policy]
