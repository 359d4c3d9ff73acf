"""The pages that Django REST framework shows to people: a root, and forms with the fields of each action."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest
from django.utils import translation
from rest_framework.test import APIClient

from tests.integration.rest.conftest import ClientWith, Schedule, ready_for, url
from tests.integration.rest.places import POLICY, POLICY_VERBS, VERBS

pytestmark = pytest.mark.django_db


def page(client: APIClient, address: str) -> str:
    answer = client.get(address, headers={"accept": "text/html"})
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


@pytest.mark.parametrize("verb", [*VERBS, *POLICY_VERBS])
def test_the_form_of_an_action_has_fields_and_data_that_it_accepts(
    operator: APIClient, schedule: Schedule, verb: str
) -> None:
    """`shadow` offers null, as declared, which is in force."""
    if verb == "resume":
        assert operator.post(f"{POLICY}pause/").status_code == 200
    row = ready_for(verb, schedule(payload={"a": "<script>alert(1)</script>"}))
    address = url(row, verb) if verb in VERBS else f"{POLICY}{verb}/"
    shown = page(operator, address)
    assert {*re.findall(r'name="(\w+)"', shown)} >= {
        "reason",
        *(POLICY_VERBS.get(verb) or ["dry_run"] * (verb in VERBS)),
    }
    assert 'name="policy"' not in shown and "<script>alert" not in shown
    assert operator.options(address).status_code == 200
    answer = operator.post(address, raw_data(shown), format="json")
    assert answer.status_code == (409 if verb == "shadow" else 200), answer.data


def test_numbers_in_forms_are_written_as_the_browser_reads_them(operator: APIClient, schedule: Schedule) -> None:
    """A browser leaves a number field empty that contains the comma of the language."""
    addresses = [url(ready_for(verb, schedule()), verb) for verb in VERBS]
    numbers = []
    with translation.override("de"):
        for address in [*addresses, *(f"{POLICY}{verb}/" for verb in POLICY_VERBS)]:
            fields = re.findall(r'<input\s[^>]*type="number"[^>]*>', page(operator, address))
            numbers += [value for field in fields for value in re.findall(r'value="([^"]+)"', field)]
    assert "1" in numbers
    assert [each for each in numbers if "," in each] == []
