"""Every message of REST to people can be translated: each is requested in a pseudo-language."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import translation
from rest_framework import serializers
from rest_framework.test import APIClient

from django_delayq.contrib.rest_framework import inputs, outputs, services
from django_delayq.models import Timeout
from tests.integration.rest.conftest import ClientWith, Schedule, act
from tests.integration.rest.places import LIST, POLICY, REMIND
from tests.pseudo import english_in, speak_it
from tests.support.typed import Patch
from tests.testapp.models import Order

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
    r"rest:user-\d+",
    r"\b(weeks|permission_classes)\b",
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


def left_in_english(answer: Any, status: int) -> list[str]:
    assert answer.status_code == status, answer.data
    return english_in("\n".join(texts(answer.data)), DATA)


def test_wrong_input_is_refused_in_translated_words(operator: APIClient, schedule: Schedule) -> None:
    postpone = f"{LIST}{schedule().pk}/postpone/"
    bodies: list[tuple[str, dict[str, Any]]] = [
        *((postpone, {"minutes": value}) for value in (-1, "#")),
        *((postpone, body) for body in ({}, {"weeks": 1e9}, {"days": 1e6}, {"at": FAR, "days": 1})),
        *((postpone, {"at": at}) for at in (FAR, "9999-12-31T23:59Z", PAST, "#")),
        *((postpone, {"days": 1, **more}) for more in ({"reason": "#" * 300}, {"dry_run": "#"})),
        *((f"{POLICY}late/", body) for body in ({}, {"after_seconds": "nan"}, {"after_seconds": 1e9, "then": "#"})),
        *((f"{POLICY}brake/", body) for body in ({"most": 0, "per_seconds": 0}, {"most": 5})),
        *((f"{POLICY}shadow/", body) for body in ({"share": 101}, {"share": 10, "dry_run": True})),
        *((f"{POLICY}pause/", {"until": until}) for until in (FAR, PAST, "#")),
    ]
    answers = {f"{address} {body}": operator.post(address, body, format="json") for address, body in bodies}
    for asked in (
        *("nonsense=1", "state=X", "cursor=X", "page_size=X", "overdue=X", f"policy={'X' * 300}"),
        *("object=X", "object=a.b:1", "object=testapp.order:X", "due_from=X", "due_from=9999-01-01T00:00Z"),
        f"due_from={PAST}&settled_from={PAST}",
    ):
        answers[asked] = operator.get(f"{LIST}?{asked}")
    fields = {"after", "seconds", "most", "per"}  # names that a program knows
    left = {asked: {*left_in_english(answer, 400)} - fields for asked, answer in answers.items()}
    assert {asked: words for asked, words in left.items() if words} == {}
    assert all(list(texts(answer.data)) for answer in answers.values())


def test_who_may_not_is_told_so_in_translated_words(
    operator: APIClient, client_with: ClientWith, schedule: Schedule
) -> None:
    row = schedule()
    here, order = f"{LIST}{row.pk}/", Order.objects.get().pk
    answers = [
        (APIClient().get(here), 403),
        (client_with().get(here), 403),
        (operator.put(f"{here}cancel/"), 405),
        (operator.get(f"{LIST}999999/"), 404),
        (operator.post(f"{LIST}999999/cancel/"), 404),
        (operator.get("/api/policies/X/"), 404),
        (operator.get("/orders/999999/countdown/"), 404),
        (operator.get(f"/closed/{order}/countdown/"), 403),
    ]
    assert [left_in_english(*answer) for answer in answers] == [[]] * len(answers)


def test_what_is_in_force_and_the_story_are_told_in_translated_words(operator: APIClient, schedule: Schedule) -> None:
    here = f"{LIST}{schedule().pk}/"
    assert english_in(operator.post(f"{POLICY}resume/", {}, format="json").data["refusal"]["detail"], DATA) == []
    assert operator.post(f"{POLICY}hold/", {}, format="json").status_code == 200
    assert left_in_english(operator.post(f"{POLICY}pause/", {}, format="json"), 409) == []
    told = list(operator.get(here).data["story"].items())
    for verb, status in (("fire", 409), ("retry", 409), ("cancel", 200), ("cancel", 409)):
        answer = operator.post(f"{here}{verb}/", {}, format="json")
        assert answer.status_code == status
        told += list((answer.data["refusal"] or {}).items())
    told += list(operator.get(here).data["story"].items())
    words = [value for name, value in told if name in {"outlook", "detail"}]
    words += [event["text"] for name, value in told if name == "events" for event in value]
    assert len(words) >= 8
    assert english_in("\n".join(words), DATA) == []


SERVICES: list[tuple[str, dict[str, Any], int]] = [
    *(("schedule", body, 400) for body in ({}, {"hours": 1, "at": FAR}, {"hours": 1, "payload": "\0"}, {"days": 1e6})),
    ("schedule", {"hours": 1, "on_conflict": "error"}, 409),
    *(("cancel", {name: "#"}, 400) for name in ("policy", "search", "object")),
    ("cancel", {"object": 999999}, 404),
    ("guard", {"strict": True}, 409),
    ("guard", {"policy": "testapp.order.send_outside"}, 503),
]


def test_other_services_are_refused_in_translated_words(operator: APIClient, schedule: Schedule) -> None:
    row = schedule(minutes=0)
    other = schedule("send_outside", order=Order.objects.get())
    Timeout.objects.filter(pk=other.pk).update(state="firing", slot_taken=None)

    def ask(what: str, key: str, **body: Any) -> Any:
        sent = {"policy": REMIND, "object": row.object_id, **body}
        return operator.post(f"/api/{what}/", sent, format="json", headers={"Idempotency-Key": key})

    for number, (what, body, status) in enumerate(SERVICES):
        answer = ask(what, str(number), **body)
        assert answer.status_code == status, (what, body)
        words = answer.data["refusal"]["detail"] if "refusal" in answer.data else "\n".join(texts(answer.data))
        assert words and english_in(words, (*DATA, "order")) == [], (what, body)
    for key, body, status in (('"', {}, 400), ("k", {}, 200), ("k", {"reason": "#"}, 422)):
        answer = ask("cancel", key, **body)
        assert answer.status_code == status
        words = "" if status == 200 else "\n".join(texts(answer.data))
        assert english_in(words, (*DATA, "Idempotency-Key", "ASCII|UUID")) == []


def every_field() -> Iterator[serializers.Field[Any, Any, Any, Any]]:
    """The fields of all serializers of this package."""
    named = [
        found for module in (inputs, outputs, services) for found in vars(module).values() if isinstance(found, type)
    ]
    for found in [*named, *inputs.BODIES.values()]:
        if issubclass(found, serializers.Serializer) and found is not inputs.OperationSerializer:
            yield from found().fields.values()


def test_what_helps_to_fill_in_a_field_is_translated(operator: APIClient) -> None:
    helps = {str(field): str(field.help_text) for field in every_field() if field.help_text}
    assert len(helps) >= 20
    assert {field: text for field, text in helps.items() if english_in(text, NAMES_IN_HELP)} == {}


@pytest.mark.parametrize("body", [{}, {"minutes": 5, "at": FAR}], ids=["neither", "both"])
def test_an_answer_is_in_the_language_of_its_reader(
    client_with: ClientWith, schedule: Schedule, settings: Any, body: dict[str, Any]
) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    client, row = client_with(*EVERYTHING), schedule()
    client.credentials(HTTP_ACCEPT_LANGUAGE="de")
    with translation.override(translation.get_language()):  # the middleware leaves its last visitor's behind
        wrong = act(client, row, "postpone", **body)
        assert wrong.data == {"delay": ["Um wie viel oder auf wann? Bitte eines von beiden angeben."]}
        assert client.get(f"{LIST}?nonsense=1").data == {"nonsense": ["Einen solchen Filter gibt es nicht."]}
        assert act(client, row, "cancel").status_code == 200
        refusal = act(client, row, "cancel").data["refusal"]
    assert refusal == {"code": "settled", "detail": "schon abgeschlossen"}
