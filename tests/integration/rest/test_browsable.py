"""The pages that Django REST framework shows to people: a root, and forms with the fields of each action."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest
from django.utils import timezone, translation
from rest_framework.test import APIClient

from django_delayq.models import PolicyControl, Timeout
from tests.integration.rest.test_acting import ALL, POLICY, POLICY_VERBS, VERBS, ClientWith, Schedule, ready_for, url

pytestmark = pytest.mark.django_db
HTML = {"accept": "text/html"}


@pytest.fixture
def operator(client_with: ClientWith) -> APIClient:
    return client_with("view_timeout", "pause_policy", "change_policy_guards", *ALL)


def page(client: APIClient, address: str) -> str:
    answer = client.get(address, headers=HTML)
    assert answer["Content-Type"].startswith("text/html")
    return str(answer.content.decode())


def raw_data(shown: str) -> Any:
    (text,) = re.findall(r"<textarea[^>]*name=\"_content\"[^>]*>(.*?)</textarea>", shown, re.DOTALL)
    return json.loads(unescape(text))


def test_the_root_names_the_addresses_of_the_api(operator: APIClient, client_with: ClientWith) -> None:
    found = operator.get("/api/").json()
    assert found == {name: f"http://testserver/api/{name}/" for name in ("timeouts", "policies", "status")}
    assert all(operator.get(address).status_code == 200 for address in found.values())
    assert 'href="http://testserver/api/timeouts/"' in page(operator, "/api/")
    assert client_with("view_policycontrol").get("/api/").status_code == 200
    assert client_with().get("/api/").status_code == 403
    assert APIClient().get("/api/").status_code in (401, 403)


@pytest.mark.parametrize("verb", VERBS)
def test_the_form_of_an_action_on_a_timeout_has_its_fields_and_data_that_it_accepts(
    operator: APIClient, schedule: Schedule, verb: str
) -> None:
    row = ready_for(verb, schedule())
    shown = page(operator, url(row, verb))
    assert 'name="reason"' in shown and 'name="dry_run"' in shown
    assert 'name="policy"' not in shown
    data = raw_data(shown)
    answer = operator.post(url(row, verb), data, format="json")
    assert (answer.status_code, answer.data.get("changed")) == (200, True), answer.data


@pytest.mark.parametrize("verb", POLICY_VERBS)
def test_the_form_of_an_action_on_a_policy_has_its_fields_and_data_that_it_accepts(
    operator: APIClient, verb: str
) -> None:
    if verb == "resume":
        assert operator.post(f"{POLICY}pause/").status_code == 200
    shown = page(operator, f"{POLICY}{verb}/")
    assert 'name="reason"' in shown
    for name in POLICY_VERBS[verb]:
        assert f'name="{name}"' in shown
    answer = operator.post(f"{POLICY}{verb}/", raw_data(shown), format="json")
    # `shadow` offers null, as declared, which is in force.
    assert answer.status_code == (409 if verb == "shadow" else 200), answer.data


def test_a_form_that_was_not_filled_in_changes_what_it_shows(operator: APIClient, schedule: Schedule) -> None:
    row = schedule()
    empty = {"reason": "", "weeks": "", "days": "", "hours": "2", "minutes": "", "seconds": "", "at": ""}
    answer = operator.post(url(row, "postpone"), empty, format="multipart")
    assert answer.status_code == 200, answer.data
    assert Timeout.objects.get().due_at > row.due_at
    operator.post(f"{POLICY}hold/", format="json")
    assert 'name="shift" value="true" checked' in re.sub(r"\s+", " ", page(operator, f"{POLICY}resume/"))
    assert PolicyControl.objects.get().stop == "held"


@pytest.mark.parametrize("address", ["/api/timeouts/", "/api/policies/", POLICY, "/api/status/"])
def test_pages_that_only_read_have_no_form(operator: APIClient, schedule: Schedule, address: str) -> None:
    schedule()
    assert 'method="POST"' not in page(operator, address)


def test_the_time_of_the_server_is_in_the_zone_of_the_other_times(
    operator: APIClient, schedule: Schedule, settings: Any
) -> None:
    row = schedule()
    with timezone.override("Asia/Kolkata"):
        for answer in (operator.get("/api/timeouts/"), operator.get(f"/api/timeouts/{row.pk}/")):
            assert answer.json()["server_time"].endswith("+05:30")
        assert operator.get("/api/status/").json()["at"].endswith("+05:30")
    settings.REST_FRAMEWORK = {"DATETIME_FORMAT": "%Y"}
    assert operator.get("/api/timeouts/").json()["server_time"] == str(timezone.now().year)


def test_numbers_in_forms_are_written_as_the_browser_reads_them_in_each_language(
    operator: APIClient, schedule: Schedule
) -> None:
    """A browser leaves a number field empty that contains the comma of the language."""
    addresses = [url(ready_for(verb, schedule()), verb) for verb in VERBS]
    numbers = []
    with translation.override("de"):
        for address in [*addresses, *(f"{POLICY}{verb}/" for verb in POLICY_VERBS)]:
            fields = re.findall(r'<input\s[^>]*type="number"[^>]*>', page(operator, address))
            numbers += [value for field in fields for value in re.findall(r'value="([^"]+)"', field)]
    assert "1" in numbers
    assert [each for each in numbers if "," in each] == []
