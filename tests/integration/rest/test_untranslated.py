"""Every message of REST to people can be translated: each is requested in a pseudo-language."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import translation
from rest_framework import serializers
from rest_framework.test import APIClient

from django_delayq.contrib.rest_framework import inputs, outputs, services
from tests.integration.rest.conftest import LIST, POLICY, REMIND, ClientWith, Schedule, act
from tests.pseudo import english_in, speak_it
from tests.support.typed import Patch

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
EVERYTHING = (
    *("view_timeout", "cancel_timeout", "fire_timeout", "postpone_timeout", "retry_timeout"),
    *("view_policycontrol", "pause_policy", "change_policy_guards", "schedule_timeout"),
)
FAR, PAST = "2500-01-01T00:00Z", "2020-01-01T00:00Z"
DATA = (
    r"testapp\.order\.remind",
    r'"[\w/]+"',  # what was sent, such as a method or a choice
    r"YYYY-MM-DDThh:mm\S*",
    r"\bweeks\b",
    r"\bshop\.order:17\b",
)
"""What is the project's own, or a name that a program knows."""
NAMES_IN_HELP = (*DATA, r"`[^`]*`", r"\b(null|true|false)\b")


@pytest.fixture
def operator(client_with: ClientWith, monkeypatch: Patch) -> APIClient:
    client = client_with(*EVERYTHING)
    speak_it(monkeypatch)
    return client


def texts(answered: Any) -> Iterator[str]:
    """Every text in it."""
    if isinstance(answered, dict | list | tuple):
        for part in answered.values() if isinstance(answered, dict) else answered:
            yield from texts(part)
    elif isinstance(answered, str):
        yield str(answered)


def test_what_is_refused_is_refused_in_translated_words(operator: APIClient, schedule: Schedule) -> None:
    row = schedule(minutes=0)
    here, services = f"{LIST}{row.pk}/", {"policy": REMIND, "object": row.object_id}
    bodies: list[tuple[str, dict[str, Any], int]] = [
        *((f"{here}postpone/", body, 400) for body in ({}, {"weeks": 1e9}, {"at": FAR, "days": 1}, {"at": PAST})),
        *((f"{here}postpone/", {"days": 1, **more}, 400) for more in ({"reason": "#" * 300}, {"dry_run": "#"})),
        (f"{POLICY}late/", {"after_seconds": 1e9, "then": "#"}, 400),
        (f"{POLICY}brake/", {"most": 0, "per_seconds": 0}, 400),
        (f"{POLICY}shadow/", {"share": 101}, 400),
        ("/api/schedule/", {**services, "hours": 1, "payload": "\0"}, 400),
        ("/api/cancel/", {**services, "object": 999999}, 404),
        (f"{LIST}999999/cancel/", {}, 404),
    ]
    answers = {}
    for address, body, status in bodies:
        answers[f"{address} {body}"] = answer = operator.post(address, body, format="json")
        assert answer.status_code == status, (address, body)
    for query in (
        *("nonsense=1", "state=X", "cursor=X", "object=X", "due_from=X"),
        f"due_from={PAST}&settled_from={PAST}",
    ):
        answers[query] = operator.get(f"{LIST}?{query}")
        assert answers[query].status_code == 400, query
    fields = {"after", "seconds", "most", "per", "order"}  # names that a program knows, and the project's own
    left = {asked: {*english_in("\n".join(texts(answer.data)), DATA)} - fields for asked, answer in answers.items()}
    assert {asked: words for asked, words in left.items() if words} == {}


def test_what_helps_to_fill_in_a_field_is_translated(operator: APIClient) -> None:
    named = [
        found for module in (inputs, outputs, services) for found in vars(module).values() if isinstance(found, type)
    ]
    bodies = [found for found in (*named, *inputs.BODIES.values()) if issubclass(found, serializers.Serializer)]
    fields = [each for found in bodies if found is not inputs.OperationSerializer for each in found().fields.values()]
    helps = {str(field): str(field.help_text) for field in fields if field.help_text}
    assert len(helps) >= 20
    assert {field: text for field, text in helps.items() if english_in(text, NAMES_IN_HELP)} == {}


def test_an_answer_is_in_the_language_of_its_reader(client_with: ClientWith, schedule: Schedule, settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    client, row = client_with(*EVERYTHING), schedule()
    client.credentials(HTTP_ACCEPT_LANGUAGE="de")
    with translation.override(translation.get_language()):  # the middleware leaves its last visitor's behind
        wrong = act(client, row, "postpone")
        assert wrong.data == {"delay": ["Um wie viel oder auf wann? Bitte eines von beiden angeben."]}
        assert client.get(f"{LIST}?nonsense=1").data == {"nonsense": ["Einen solchen Filter gibt es nicht."]}
        assert act(client, row, "cancel").status_code == 200
        refusal = act(client, row, "cancel").data["refusal"]
    assert refusal == {"code": "settled", "detail": "schon abgeschlossen"}
