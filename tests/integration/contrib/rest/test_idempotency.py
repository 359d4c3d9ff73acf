"""A request with an `Idempotency-Key` has its effect once, whatever is repeated, and its answer is the same."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.utils import timezone
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq import clock
from django_delayq.ledger.answers import forget_old_answers
from django_delayq.models import StoredAnswer, Timeout
from django_delayq.signals import timeout_scheduled
from django_delayq.testing import fire_due
from django_delayq.worker.sweep import prune
from tests.integration.contrib.rest.conftest import ClientWith
from tests.integration.contrib.rest.places import REMIND
from tests.support.threads import in_threads, start_threads
from tests.support.waiting import wait_until
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]
LONG = "x" * 255


@pytest.fixture
def service(client_with: ClientWith) -> APIClient:
    return client_with("schedule_timeout", "cancel_timeout")


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="new")


def ask(client: APIClient, what: str, given: str, order: Order, **body: Any) -> Any:
    body = {"policy": REMIND, "object": order.pk, **body}
    return client.post(f"/api/{what}/", body, format="json", headers={"Idempotency-Key": given})


def test_a_repeated_request_gets_the_stored_answer_and_has_no_effect(service: APIClient, order: Order) -> None:
    fields = {"hours": 1, "payload": {"a": 1, "b": 2}}
    first = ask(service, "schedule", '"k-1"', order, **fields)
    row = Timeout.objects.get()
    dq.reschedule_timeout(order, REMIND, hours=9)
    again = ask(service, "schedule", '"k-1"', order, **fields)
    assert (again.status_code, again.content) == (first.status_code, first.content) == (200, first.content)
    assert (first.headers.get("Idempotent-Replayed"), again["Idempotent-Replayed"]) == (None, "true")
    assert Timeout.objects.get().due_at > row.due_at
    turned = {"payload": {"b": 2, "a": 1}, "hours": 1, "object": order.pk, "policy": REMIND}
    headers = {"Idempotency-Key": "k-1"}
    in_order = service.post("/api/schedule/", json.dumps(turned), content_type="application/json", headers=headers)
    assert in_order.content == first.content, "the order of fields does not matter, and quotes are not part of the key"
    assert ask(service, "schedule", '"k-2"', order, hours=1).json()["timeout"]["due_at"] != row.due_at
    assert Timeout.objects.get().due_at < timezone.now() + timedelta(hours=2)
    cancelled = ask(service, "cancel", "k", order)
    Order.objects.all().delete()
    assert ask(service, "cancel", "k", order).content == cancelled.content, "a stored answer outlives its object"
    User.objects.get().user_permissions.clear()
    assert ask(service, "cancel", "k", order).status_code == 403, "without a permission it is not shown"


@pytest.mark.parametrize("what", ["cancel", "guard"])
def test_a_decision_stays_the_same(service: APIClient, order: Order, what: str) -> None:
    """The first answer was too late. A retry must not be in time because a new round has begun."""
    dq.schedule_timeout(order, REMIND, seconds=0)
    assert fire_due(REMIND) == 1
    first = ask(service, what, "k", order)
    dq.schedule_timeout(order, REMIND, hours=1)
    again = ask(service, what, "k", order)
    assert again.content == first.content
    assert again.status_code == first.status_code == (409 if what == "guard" else 200)
    assert Timeout.objects.filter(state="pending").count() == 1


def test_a_key_belongs_to_one_request_of_one_user(service: APIClient, client_with: ClientWith, order: Order) -> None:
    assert ask(service, "schedule", "k", order, hours=1).status_code == 200
    before = Timeout.objects.values_list("due_at", "reason", "key").get()
    for change in ({"hours": 2}, {"reason": "other"}, {"key": "a"}):
        assert ask(service, "schedule", "k", order, **{"hours": 1, **change}).status_code == 422
    assert ask(service, "cancel", "k", order).status_code == 422
    assert Timeout.objects.values_list("due_at", "reason", "key").get() == before
    assert ask(service, "schedule", "k", order, hours=1).status_code == 200
    other = ask(client_with("schedule_timeout"), "schedule", "k", order, hours=3)
    assert (other.status_code, other.headers.get("Idempotent-Replayed")) == (200, None)
    assert Timeout.objects.get().due_at > timezone.now() + timedelta(hours=2)
    assert ask(service, "cancel", "c", order).status_code == 200
    assert ask(service, "guard", "c", order).status_code == 422, "of the same fields"


def test_a_key_is_a_string_of_ascii_in_quotes_or_without(service: APIClient, order: Order) -> None:
    for key in ("", '""', LONG + "x", '"open', 'a"b', "a b", '"a";b=1', "ä", "a\tb"):
        answer = ask(service, "schedule", key, order, hours=1)
        assert (answer.status_code, [*answer.json()]) == (400, ["Idempotency-Key"]), key
    assert not Timeout.objects.exists()
    assert ask(service, "schedule", LONG, order, hours=1).status_code == 200
    assert ask(service, "schedule", f'"{LONG}"', order, hours=1)["Idempotent-Replayed"] == "true"
    assert ask(service, "cancel", "k", order).status_code == 200
    assert "Idempotent-Replayed" not in ask(service, "cancel", r'"\"k\""', order).headers


def test_what_was_not_done_is_not_stored_and_does_not_bind_its_key(service: APIClient, order: Order) -> None:
    """After 404 and 503 the same request is repeated, with the same key, and may succeed."""
    missing = Order(pk=order.pk + 1000, status="new")
    assert ask(service, "cancel", "k", missing).status_code == 404
    missing.save(force_insert=True)
    assert ask(service, "cancel", "k", missing).status_code == 200
    row = dq.schedule_timeout(order, "send_outside", hours=1)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    outside = {"policy": "testapp.order.send_outside"}
    undecided = ask(service, "guard", "g", order, **outside)
    assert (undecided.status_code, undecided["Retry-After"]) == (503, "5")
    Timeout.objects.filter(pk=row.pk).update(state="fired", cause="due", settled_at=timezone.now())
    assert ask(service, "guard", "g", order, **outside).status_code == 409
    refused: list[tuple[dict[str, Any], int]] = [({"hours": -1}, 400), ({"object": 98765}, 404), ({"policy": "x"}, 400)]
    for change, status in (*refused, ({}, 400)):  # at last: the policy computes no deadline, which the object shows
        StoredAnswer.objects.all().delete()
        assert ask(service, "schedule", "s", order, **change).status_code == status
        assert not StoredAnswer.objects.exclude(status=None).exists()
        assert StoredAnswer.objects.exists() is (change == {})
        assert ask(service, "schedule", "s", order, hours=1).status_code == 200


def test_an_answer_is_kept_for_a_day_and_then_deleted(service: APIClient, order: Order) -> None:
    now = clock.now()
    for age in (23, 25):
        with clock.set_to(now - timedelta(hours=age)):
            assert ask(service, "cancel", f"{age}", order).status_code == 200
    assert ask(service, "cancel", "23", order)["Idempotent-Replayed"] == "true"
    renewed = ask(service, "schedule", "25", order, hours=1)
    assert (renewed.status_code, Timeout.objects.filter(state="pending").count()) == (200, 1)
    assert ask(service, "schedule", "25", order, hours=1)["Idempotent-Replayed"] == "true"
    with clock.set_to(now + timedelta(hours=2)):
        forget_old_answers("default")
    assert StoredAnswer.objects.count() == 1
    StoredAnswer.objects.update(at=now - timedelta(days=2))
    prune("default")
    assert not StoredAnswer.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("redis_url")
@pytest.mark.parametrize("bodies", ["same", "different"])
def test_of_many_requests_at_once_one_has_its_effect(
    client_with: ClientWith, service: APIClient, order: Order, bodies: str
) -> None:
    client_with()  # connects
    seen, answers, numbers = list[Any](), list[Any](), [0] * 6 if bodies == "same" else [*range(6)]

    def note(**_: Any) -> None:
        seen.append(1)

    def send(number: int) -> None:
        answers.append(ask(same_user(), "schedule", "k", order, hours=1 + number))

    timeout_scheduled.connect(note)
    try:
        in_threads(*(lambda number=each: send(number) for each in numbers))
    finally:
        timeout_scheduled.disconnect(note)
    done = [answer for answer in answers if answer.status_code == 200]
    assert len(answers) == 6
    assert {answer.status_code for answer in answers} <= {200, 409, 422}
    assert all("Idempotency-Key" in answer.json()["detail"] for answer in answers if answer not in done)
    assert len({answer.content for answer in done}) == 1
    assert len(done) == 1 or bodies == "same"
    assert sum("Idempotent-Replayed" not in answer.headers for answer in done) == len(seen) == 1
    assert Timeout.objects.count() == 1
    repeated = [ask(service, "schedule", "k", order, hours=1 + number) for number in {*numbers}]
    assert [each.content for each in repeated if each.status_code == 200] == [done[0].content]


def same_user() -> APIClient:
    """Another client of the user of `service`."""
    client = APIClient()
    client.force_login(User.objects.get(username="user-0"))
    return client


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("atomic_requests", [False, True])
def test_a_duplicate_of_a_running_request_gets_409(service: APIClient, order: Order, atomic_requests: bool) -> None:
    """The first one waits for the lock of the order. On SQLite all would wait, as one transaction runs at a time."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no locks of rows")
    answers, is_locked, may_end = list[int](), threading.Event(), threading.Event()

    def hold_lock() -> None:
        with transaction.atomic():
            Order.objects.select_for_update().get(pk=order.pk)
            is_locked.set()
            assert may_end.wait(60)

    def send() -> None:
        connection.settings_dict["ATOMIC_REQUESTS"] = atomic_requests
        assert is_locked.wait(60)
        answers.append(ask(same_user(), "cancel", "k", order).status_code)

    def is_running() -> bool:
        return StoredAnswer.objects.exists() and ask(service, "cancel", "k", order).status_code == 409

    threads = start_threads(hold_lock, send)
    try:
        wait_until(is_running, "the first request runs")
        assert answers == []
    finally:
        may_end.set()
        for thread in threads:
            thread.join(60)
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert answers == [200]
    assert ask(service, "cancel", "k", order)["Idempotent-Replayed"] == "true"


DOOMED = """
import os, signal
from django.contrib.auth.models import User
from django.db import connection
from rest_framework.test import APIClient
from django_delayq.signals import timeout_scheduled

def end(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def before_commit(execute, sql, *rest):
    done = execute(sql, *rest)
    if "storedanswer" in sql and sql.startswith("UPDATE"):
        end()
    return done

client = APIClient()
client.force_login(User.objects.get(username="user-0"))
if {committed}:
    timeout_scheduled.connect(end)
else:
    connection.execute_wrappers.append(before_commit)
body = {{"policy": "testapp.order.remind", "object": {pk}, "hours": 1}}
client.post("/api/schedule/", body, format="json", headers={{"Idempotency-Key": "k"}})
"""


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("committed", [True, False])
def test_killed_between_the_effect_and_its_answer_a_retry_finds_both_or_none(
    service: APIClient, order: Order, start_command: Callable[..., subprocess.Popen[bytes]], committed: bool
) -> None:
    script = DOOMED.format(committed=committed, pk=order.pk)
    variables = {"DELAYQ_TEST_URLS": "tests.integration.contrib.rest.urls"}
    doomed = start_command("shell", "--no-imports", "-c", script, env=variables)
    assert doomed.wait(60) == -signal.SIGKILL
    assert Timeout.objects.count() == (1 if committed else 0)
    answer = ask(service, "schedule", "k", order, hours=1)
    assert (answer.status_code, "Idempotent-Replayed" in answer.headers) == (200, committed)
    assert Timeout.objects.get().pk == answer.json()["timeout"]["id"]
