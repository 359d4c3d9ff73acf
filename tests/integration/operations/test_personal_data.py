"""What the ledger has about a person can be exported, and erased; the rows stay, and close their rounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.apps import apps
from django.core import serializers
from django.core.management import CommandError, call_command
from django.db.models import CharField, JSONField, Q, TextField
from django.utils import timezone
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq import Limits, Rate, Retry, operations
from django_delayq.admin import render
from django_delayq.arming.sync import sync_policy
from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.models import Timeout, slot_of
from django_delayq.operations import Refusal, related_timeouts
from django_delayq.testing import fire_due
from tests.integration.operations.conftest import BY, as_if, many, said
from tests.integration.operations.names import HOUR, Declare, PagesOf
from tests.support.waiting import wait_until
from tests.support.workers import RunningWorker
from tests.testapp.market import Channel, Merchant, Purchase
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "jane@example.com"
PERSONAL = {"payload", "reason", "history", "key", "share"}
"""The columns that are emptied."""
IMPERSONAL = {
    *("policy", "queue", "state", "cause", "step", "steps_over"),  # named by the project and by the library
    *("object_id", "slot", "idempotency_key"),  # without it the row would belong to nothing; a digest; a random number
    *("trace", "stops", "terms"),  # the id of a trace, and how the deadline is computed
}


def failing(order: Order, timeout: Timeout) -> None:
    raise ValueError(f"{timeout.key} bounced")


def rich(declare: Declare) -> Timeout:
    """Return a dead row that has the secret wherever a row may have one."""
    bounce = declare(Order, failing, name="bounce", retry=Retry([0]))
    order = Order.objects.create()
    row = dq.schedule_timeout(
        order, bounce, hours=1, key=f"mail:{SECRET}", payload={"to": [SECRET]}, reason=f"for {SECRET}"
    )
    operations.fire_now(row, by=BY, reason=f"{SECRET} called again")
    fire_due(raises=False)
    Timeout.objects.filter(pk=row.pk).update(share=SECRET)
    row.refresh_from_db()
    assert row.state == "dead"
    return row


def everything(row: Timeout) -> str:
    """Return every column of the row as text."""
    return str(serializers.serialize("json", Timeout.objects.filter(pk=row.pk))) + str(
        [render.failures(row), dq.explain_timeout(row)]
    )


def test_nothing_personal_is_left_and_the_row_stays_also_when_it_is_dumped_and_loaded(declare: Declare) -> None:
    row = rich(declare)
    assert everything(row).count(SECRET) > 5
    before = {event["at"]: event["what"] for event in row.history}
    result = operations.erase(row, by=BY, reason="request 4711")
    erased = Timeout.objects.get(pk=row.pk)
    assert (result.changed, result.unchanged) == (1, 0)
    assert SECRET not in everything(erased)
    assert (erased.payload, erased.reason, erased.share, erased.key) == (None, "", "", "(erased)")
    assert Timeout.objects.filter(pk=row.pk, payload__isnull=True).exists(), "NULL, and not the null of JSON"
    for column in ("state", "cause", "due_at", "run_at", "settled_at", "attempts", "slot", "object_id", "created_at"):
        assert getattr(erased, column) == getattr(row, column), column
    *kept, last = erased.history
    assert {event["at"]: event["what"] for event in kept} == before
    assert (last["what"], last["by"], last["reason"]) == ("erased", BY, "request 4711")
    assert {event["error"] for event in erased.errors} == {"ValueError"}
    assert "personal data erased" in str(dq.explain_timeout(erased))
    dumped = serializers.serialize("json", Timeout.objects.all())
    Timeout.objects.all().delete()
    for each in serializers.deserialize("json", dumped):
        each.save()
    assert Timeout.objects.get().slot == slot_of(row.policy, row.content_type_id, row.object_id, row.key)


def test_every_column_of_text_is_emptied_or_known_to_be_impersonal() -> None:
    texts = (CharField, TextField, JSONField)
    columns = {field.name for field in Timeout._meta.concrete_fields if isinstance(field, texts)}
    assert columns | {"slot", "idempotency_key"} == PERSONAL | IMPERSONAL


def everywhere() -> list[str]:
    """Return each row of each table of our apps as text."""
    models = (model for model in apps.get_models() if model.__module__.startswith("django_delayq."))
    return [f"{model.__name__} {row}" for model in models for row in model._base_manager.values()]


@pytest.mark.parametrize("is_needed", [False, True])
def test_no_table_has_the_person_afterwards_and_no_stored_answer(
    declare: Declare, settings: Any, admin_user: Any, without_redis: None, is_needed: bool
) -> None:
    """Of a value that an unsettled timeout has, too, the rate still counts."""
    settings.ROOT_URLCONF = "tests.integration.contrib.rest.urls"
    endpoint = {"url": "http://127.0.0.1:1/", "secret": "whsec_" + "MfKQ" * 8, "events": ["dead"], "payload": True}
    settings.DELAYQ_WEBHOOKS = {"billing": endpoint}
    limits = Limits(rate=Rate(60, per=HOUR, by="note"))
    policy = declare(Order, failing, name="bounce", retry=Retry.never(), limits=limits)
    client = APIClient()
    client.force_login(admin_user)

    def ask(name: str) -> Any:
        order, _ = Order.objects.get_or_create(status=name[:8], note=name)
        body = {"policy": policy.label, "object": order.pk, "key": name, "reason": name, "payload": {"to": name}}
        return client.post("/api/schedule/", {**body, "seconds": 0}, "json", headers={"Idempotency-Key": name})

    others = "bob@example.com"
    assert [ask(name).status_code for name in (SECRET, others)] == [200, 200]
    worker = RunningWorker(concurrency=1)
    wait_until(lambda: Timeout.objects.filter(policy=policy.label, state="dead").count() == 2)
    worker.stop()
    tables = {line.split()[0] for line in everywhere() if SECRET in line}
    assert tables == {"Timeout", "StoredAnswer", "RateShare", "Delivery"}
    kept = [line for line in everywhere() if others in line]
    if is_needed:
        dq.schedule_timeout(Order.objects.get(note=SECRET), policy, hours=1)
    operations.erase(Timeout.objects.filter(policy=policy.label, key=SECRET), by=BY)
    left = {line.split()[0] for line in everywhere() if SECRET in line}
    assert left == ({"Timeout", "RateShare"} if is_needed else set())
    assert [line for line in everywhere() if others in line] == kept
    again = ask(SECRET)
    assert again["Idempotent-Replayed"] == "true"
    shown = again.json()["timeout"]
    assert (shown["key"], shown["reason"], shown["state"]) == ("(erased)", "", "pending")
    assert json.loads(Delivery.objects.order_by("pk")[0].body)["data"]["payload"] is None


def test_a_pending_timeout_is_not_erased_and_an_erased_one_is_neither_retried_nor_repeated(declare: Declare) -> None:
    row = rich(declare)
    waiting = dq.schedule_timeout(Order.objects.create(), "remind", hours=1, payload={"to": [SECRET]})
    assert operations.erase([row, waiting], by=BY).refused == {Refusal.NOT_SETTLED: 1}
    row.refresh_from_db()
    for repeat in (operations.retry, operations.refire):
        assert repeat(row, by=BY).refused == {Refusal.ERASED: 1}
    assert operations.cancel(row, by=BY, reason=SECRET).changed == 1, "a dead one may still be cancelled"
    assert operations.erase(row, by=BY).changed == 1
    assert SECRET not in everything(Timeout.objects.get(pk=row.pk)), "what was added since is erased, too"
    assert [what for what, *_ in said(row)].count("erased") == 1


def test_a_round_that_was_erased_stays_closed(declare: Declare) -> None:
    """Also the one of a key, which does not close the round without a key."""
    policy = declare(Order, lambda *_: None, name="mail", after=HOUR, since="created_at", when=Q(status="waiting"))
    order = Order.objects.create(status="waiting", created_at=timezone.now() - 2 * HOUR)
    keyed = dq.schedule_timeout(order, policy, minutes=0, key=SECRET)
    assert fire_due() == 2
    other = Order.objects.create(status="waiting", created_at=timezone.now())
    keyed_only = dq.schedule_timeout(other, policy, key=SECRET)
    as_if(keyed_only, "fired", "due", since_at=other.created_at)
    dq.cancel_timeout(other, policy)
    Timeout.objects.filter(object_id=str(other.pk), key="").delete()
    operations.erase(Timeout.objects.all(), by=BY)
    order.save()
    assert not dq.pending_timeouts(order)
    assert not dq.cancel_timeout(order, policy, key=SECRET), "it has fired"
    assert dq.schedule_timeout(order, policy, at=keyed.due_at, key=SECRET, on_conflict="once").pk == keyed.pk
    assert sync_policy(policy, "default").armed == 1
    assert dq.pending_timeouts(other).count() == 1, "the round without a key was open"


def test_all_about_an_owner_is_exported(declare: Declare, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*options: str) -> Any:
        call_command("delayq_export", *options)
        return capsys.readouterr().out

    declare(Purchase, name="chase_owner", owner="channel__merchant")
    rows = []
    for name in ("bob", "ada"):
        channel = Channel.objects.create(merchant=Merchant.objects.create(name=name))
        for _ in range(2):
            purchase = Purchase.objects.create(channel=channel)
            rows.append(dq.schedule_timeout(purchase, "chase_owner", hours=1, payload={"name": name}, key=name))
    merchant, rows = Merchant.objects.get(name="ada"), [rows[2], as_if(rows[3], "fired", "due")]
    reference = f"testapp.merchant:{merchant.pk}"
    assert list(related_timeouts(merchant)) == rows[:1], "those that wait, unless settled ones are wanted"
    found = list(operations.export(related_timeouts(merchant, settled=True)))
    assert found == json.loads(json.dumps(found))
    assert [each["id"] for each in found] == [row.pk for row in rows]
    columns = {field.attname for field in Timeout._meta.concrete_fields}
    assert found[0].keys() == columns - {"content_type_id"} | {"model"}
    for each, row in zip(found, rows, strict=True):
        assert (each["payload"], each["key"], each["model"]) == ({"name": "ada"}, "ada", "testapp.purchase")
        assert each["due_at"] == row.due_at.isoformat()
    assert [json.loads(line) for line in told("--related", reference).splitlines()] == found
    assert json.loads(told("--related", reference, "--json")) == found
    assert json.loads(told("--related", reference, "--state", "fired"))["state"] == "fired"
    with pytest.raises(CommandError, match="Which timeouts"):
        told()
    with pytest.raises(CommandError, match="1 not found: 4711"):
        told("--id", "4711")


def test_an_export_of_many_reads_page_by_page(django_assert_max_num_queries: Any, pages_of: PagesOf) -> None:
    pages_of(10)
    many(25)
    with django_assert_max_num_queries(12):
        assert len(list(operations.export(Timeout.objects.all()))) == 25
