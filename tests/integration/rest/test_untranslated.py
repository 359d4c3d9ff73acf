"""Every message of REST to people can be translated: each is requested in a pseudo-language."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rest_framework import serializers
from rest_framework.test import APIClient

from django_delayq.contrib.rest_framework import inputs, outputs, services
from django_delayq.models import Timeout
from tests.pseudo import english_in, speak_it
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
POLICY = "/api/policies/testapp.order.remind/"
LIST = "/api/timeouts/"
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
def operator(client_with: Callable[..., APIClient], monkeypatch: pytest.MonkeyPatch) -> APIClient:
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


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"minutes": -1},
        {"minutes": "#"},
        {"weeks": 1e9},
        {"days": 1e6},
        {"at": FAR},
        {"at": "9999-12-31T23:59Z"},
        {"at": PAST},
        {"at": "#"},
        {"at": FAR, "days": 1},
        {"days": 1, "reason": "#" * 300},
        {"days": 1, "dry_run": "#"},
    ],
    ids=str,
)
def test_a_wrong_delay_is_refused_in_translated_words(
    operator: APIClient, schedule: Callable[..., Timeout], body: dict[str, Any]
) -> None:
    row = schedule()
    answer = operator.post(f"{LIST}{row.pk}/postpone/", body, format="json")
    assert left_in_english(answer, 400) == []
    assert list(texts(answer.data)) != []


@pytest.mark.parametrize(
    "asked",
    [
        *("nonsense=1", "state=X", "cursor=X", "page_size=X", "overdue=X", f"policy={'X' * 300}"),
        *("object=X", "object=a.b:1", "object=testapp.order:X", "due_from=X", "due_from=9999-01-01T00:00Z"),
        f"due_from={PAST}&settled_from={PAST}",
    ],
)
def test_a_wrong_filter_is_refused_in_translated_words(operator: APIClient, asked: str) -> None:
    answer = operator.get(f"{LIST}?{asked}")
    assert left_in_english(answer, 400) == []
    assert list(texts(answer.data)) != []


def test_who_may_not_or_finds_nothing_is_told_so_in_translated_words(
    operator: APIClient, client_with: Callable[..., APIClient], schedule: Callable[..., Timeout]
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


def test_what_is_in_force_already_and_the_story_are_told_in_translated_words(
    operator: APIClient, schedule: Callable[..., Timeout]
) -> None:
    here = f"{LIST}{schedule().pk}/"
    for until in (FAR, PAST, "#"):
        assert left_in_english(operator.post(f"{POLICY}pause/", {"until": until}, format="json"), 400) == []
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


@pytest.mark.parametrize(
    ("guard", "body"),
    [
        ("late", {}),
        ("late", {"after_seconds": "nan"}),
        ("late", {"after_seconds": 1e9, "then": "#"}),
        ("brake", {"most": 0, "per_seconds": 0}),
        ("brake", {"most": 5}),
        ("shadow", {"share": 101}),
        ("shadow", {"share": 10, "dry_run": True}),
    ],
    ids=str,
)
def test_a_wrong_guard_is_refused_in_translated_words(operator: APIClient, guard: str, body: dict[str, Any]) -> None:
    answer = operator.post(f"{POLICY}{guard}/", body, format="json")
    assert [word for word in left_in_english(answer, 400) if word not in {"after", "seconds", "most", "per"}] == []
    assert list(texts(answer.data)) != []


@pytest.mark.parametrize(
    ("what", "body", "status"),
    [
        ("schedule", {}, 400),
        ("schedule", {"hours": 1, "at": FAR}, 400),
        ("schedule", {"hours": 1, "payload": "\0"}, 400),
        ("schedule", {"hours": 1, "on_conflict": "error"}, 409),
        ("schedule", {"days": 1e6}, 400),
        ("cancel", {"policy": "#"}, 400),
        ("cancel", {"search": "#"}, 400),
        ("cancel", {"object": "#"}, 400),
        ("cancel", {"object": 999999}, 404),
        ("guard", {"strict": True}, 409),
        ("guard", {"policy": "testapp.order.send_outside"}, 503),
    ],
    ids=str,
)
def test_other_services_are_refused_in_translated_words(
    operator: APIClient, schedule: Callable[..., Timeout], what: str, body: dict[str, Any], status: int
) -> None:
    row = schedule(minutes=0)
    other = schedule("send_outside", order=Order.objects.get())
    Timeout.objects.filter(pk=other.pk).update(state="firing", slot_taken=None)
    sent = {"policy": "testapp.order.remind", "object": row.object_id, **body}
    answer = operator.post(f"/api/{what}/", sent, format="json", headers={"Idempotency-Key": "k"})
    assert answer.status_code == status
    words = answer.data["refusal"]["detail"] if "refusal" in answer.data else list(texts(answer.data))
    assert words and english_in("\n".join([words] if isinstance(words, str) else words), (*DATA, "order")) == []


def test_wrong_keys_of_requests_are_refused_in_translated_words(
    operator: APIClient, schedule: Callable[..., Timeout]
) -> None:
    sent = {"policy": "testapp.order.remind", "object": schedule().object_id}
    for key, changed, status in (('"', {}, 400), ("k", {}, 200), ("k", {"reason": "#"}, 422)):
        answer = operator.post("/api/cancel/", {**sent, **changed}, format="json", headers={"Idempotency-Key": key})
        assert answer.status_code == status
        assert (
            status == 200 or english_in("\n".join(texts(answer.data)), (*DATA, "Idempotency-Key", "ASCII|UUID")) == []
        )


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
