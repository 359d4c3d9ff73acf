"""An action refuses fields that it does not know: a misspelt one would change more than the caller asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from django_delayq.models import PolicyChange, PolicyControl
from tests.integration.rest.test_acting import (
    ALL,
    POLICY,
    POLICY_VERBS,
    VERBS,
    ClientWith,
    Schedule,
    ready_for,
    stored,
    url,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(client_with: ClientWith) -> APIClient:
    return client_with("pause_policy", "change_policy_guards", *ALL)


@pytest.mark.parametrize("verb", VERBS)
def test_an_action_on_a_timeout_refuses_an_unknown_field(operator: APIClient, schedule: Schedule, verb: str) -> None:
    row = ready_for(verb, schedule())
    before = stored()
    for form in ("json", "multipart"):
        answer = operator.post(url(row, verb), {**VERBS[verb][1], "dryrun": True}, format=form)
        assert (answer.status_code, [*answer.data]) == (400, ["dryrun"])
        assert '"dry_run"' in answer.data["dryrun"][0]
    assert stored() == before


@pytest.mark.parametrize("unknown", [{"dry_run": True}, {"untill": "2030-01-01T00:00:00Z"}, {"\ud800": 1}])
@pytest.mark.parametrize("verb", POLICY_VERBS)
def test_an_action_on_a_policy_refuses_an_unknown_field(operator: APIClient, verb: str, unknown: Any) -> None:
    if verb == "resume":
        assert operator.post(f"{POLICY}pause/").status_code == 200
    before = [*PolicyControl.objects.values()], [*PolicyChange.objects.values()]
    body = json.dumps({**POLICY_VERBS[verb], **unknown})
    answer = operator.post(f"{POLICY}{verb}/", body, content_type="application/json")
    assert (answer.status_code, len(answer.json())) == (400, 1)
    assert '"reason"' in next(iter(answer.json().values()))[0]
    assert ([*PolicyControl.objects.values()], [*PolicyChange.objects.values()]) == before


@pytest.mark.parametrize("address", [f"{POLICY}pause/", "/api/schedule/", "/api/timeouts/1/postpone/"])
def test_the_answer_to_very_many_unknown_fields_is_short(
    admin_client: Client, schedule: Schedule, address: str
) -> None:
    """Each name was answered with a list of all fields: 10.5 MB for a request of 0.6 MB."""
    body = json.dumps({f"n{number}": 1 for number in range(50_000)})
    answer = admin_client.post(address, body, content_type="application/json")
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 10_000 < len(body)


def test_a_form_may_contain_the_token_of_djangos_csrf_check(admin_client: Client) -> None:
    checking = Client(enforce_csrf_checks=True)
    checking.cookies.update(admin_client.cookies)
    checking.cookies["csrftoken"] = token = "a" * 32
    assert checking.post(f"{POLICY}pause/", {"reason": "outage"}).status_code == 403
    assert checking.post(f"{POLICY}pause/", {"reason": "outage", "csrfmiddlewaretoken": token}).status_code == 200


@pytest.mark.parametrize("query", ["dry_run=true", "reason=", "hours=2&minutes=1"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_action_on_a_timeout_refuses_what_its_address_has(
    operator: APIClient, schedule: Schedule, verb: str, query: str
) -> None:
    """`?dry_run=true` would otherwise cancel."""
    row = ready_for(verb, schedule())
    before = stored()
    answer = operator.post(f"{url(row, verb)}?{query}", VERBS[verb][1], format="json")
    assert (answer.status_code, sorted(answer.data)) == (400, sorted(each.split("=")[0] for each in query.split("&")))
    assert stored() == before
    assert operator.post(f"{url(row, verb)}?format=json", VERBS[verb][1], format="json").status_code == 200


def test_an_action_on_a_policy_refuses_what_its_address_has(operator: APIClient) -> None:
    assert operator.post(f"{POLICY}pause/?until=2030-01-01").status_code == 400
    assert not PolicyControl.objects.exists()


@pytest.mark.parametrize(
    ("verb", "name"), [("late", "then"), ("late", "after_seconds"), ("pause", "until"), ("pause", "reason")]
)
def test_lone_surrogates_are_refused_by_the_name_of_their_field(operator: APIClient, verb: str, name: str) -> None:
    """JSON may contain them, and an answer that quoted one could not be encoded."""
    body = json.dumps({**POLICY_VERBS[verb], name: "\ud800"})
    answer = operator.post(f"{POLICY}{verb}/", body, content_type="application/json")
    assert (answer.status_code, answer.json()) == (400, {name: ["Surrogate characters are not allowed: U+D800."]})
    listed = operator.post(
        f"{POLICY}{verb}/", json.dumps({name: ["\ud800", {"\ud801": 1}]}), content_type="application/json"
    )
    assert listed.status_code == 400 and listed.json()
