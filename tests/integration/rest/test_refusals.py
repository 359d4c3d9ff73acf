"""A refusal names the field of the request that is wrong, or why there was nothing to change."""

from __future__ import annotations

from typing import Any

import pytest
from rest_framework.test import APIClient

from django_delayq.models import Timeout
from tests.integration.rest.test_acting import ALL, POLICY, ClientWith, Schedule, act

pytestmark = pytest.mark.django_db
LIST = "/api/timeouts/"


@pytest.fixture
def operator(client_with: ClientWith) -> APIClient:
    return client_with("view_timeout", "pause_policy", "change_policy_guards", *ALL)


@pytest.mark.parametrize("label", ["remind", "testapp.order.remnd"])
def test_the_list_refuses_a_policy_that_is_neither_declared_nor_in_the_ledger(
    operator: APIClient, schedule: Schedule, label: str
) -> None:
    row = schedule()
    answer = operator.get(f"{LIST}?policy={label}&state=dead")
    assert (answer.status_code, answer.json()) == (400, {"policy": ["There is no such policy."]})
    Timeout.objects.filter(pk=row.pk).update(policy=label)
    assert operator.get(f"{LIST}?policy={label}&state=dead").json()["results"] == [], "the ledger has it"


def test_a_wrong_deadline_is_named_by_its_field(operator: APIClient, schedule: Schedule) -> None:
    row = schedule()
    assert [*act(operator, row, "postpone", at="2001-01-01T00:00:00Z").data] == ["at"]
    assert [*act(operator, row, "postpone", weeks=9e8).data] == ["delay"]


@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("pause", {"until": "2001-01-01T00:00:00Z"}, "until"),
        ("brake", {"most": 5}, "per_seconds"),
        ("brake", {"per_seconds": 60}, "most"),
        ("brake", {"most": 5, "off": True}, "guard"),
    ],
    ids=str,
)
def test_bad_input_of_a_policy_is_named_by_its_field(
    operator: APIClient, verb: str, body: dict[str, Any], field: str
) -> None:
    answer = operator.post(f"{POLICY}{verb}/", body, format="json")
    assert (answer.status_code, [*answer.data]) == (400, [field])


def test_an_operation_on_a_policy_that_changes_nothing_is_refused_with_its_reason(operator: APIClient) -> None:
    nothing = operator.post(f"{POLICY}resume/")
    words = "Nothing had to be changed: this is in force already."
    assert (nothing.status_code, nothing.data["refusal"]) == (409, {"code": "in_force", "detail": words})
    held = operator.post(f"{POLICY}hold/")
    assert (held.status_code, held.data["refusal"]) == (200, None)
