"""What a declaration with `hold_when` must fit, and what it reads."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Exists, OuterRef, Q

import django_delayq as dq
from django_delayq import checks
from django_delayq.ledger.declarations import fingerprint
from django_delayq.policy.reads import columns_read, reads_other_rows
from tests.integration.held.times import HOUR, Declare
from tests.testapp.models import Customer, Order

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
def test_a_wrong_hold_when_is_refused(declare: Declare, options: dict[str, Any], words: str) -> None:
    with pytest.raises(dq.PolicyError, match=words):
        declare(Order, name="wrong", **options)


def test_what_it_reads_is_a_part_of_what_the_policy_reads(declare: Declare) -> None:
    vip = Exists(Customer.objects.filter(pk=OuterRef("customer"), vip=True))
    plain, talks, watched, hidden = (
        declare(Order, name=name, hold_when=hold_when, **AUTOMATIC)
        for name, hold_when in (("plain", None), ("talks", Q(note="talks")), ("watched", Q(customer__vip=True)),
                                ("hidden", Q(vip)))
    )  # fmt: skip
    assert {"status", "note", "created_at"} <= (columns_read(talks) or set())
    assert fingerprint(talks) != fingerprint(plain)
    assert [reads_other_rows(policy) for policy in (plain, talks, watched, hidden)] == [False, False, True, True]
    found = [each for each in checks.check_policies() if each.obj in {talks, watched, hidden}]
    assert [each.obj for each in found if "hold_when" in each.msg] == [hidden], "a subquery cannot be watched"
