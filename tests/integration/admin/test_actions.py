"""The pages of timeouts: what they show, and operations with their confirmation, effect, log entries and messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

import django_delayq as dq
from django_delayq.admin import actions
from django_delayq.admin.pages import TimeoutAdmin
from django_delayq.models import Timeout
from django_delayq.operations.registry import TIMEOUT_OPERATIONS
from tests.integration.admin.conftest import Staff, source, stored, told, words
from tests.integration.admin.places import DETAIL, LIST, OPERATE, OPERATION, SELECTED, UNPAID
from tests.support.typed import Patch
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db
OPERATIONS = ["cancel", "fire", "postpone", "retry", "refire", "erase"]


def make(state: str = "pending", count: int = 1) -> list[Timeout]:
    """So many rows; dead ones have used up their attempts."""
    rows = [dq.schedule_timeout(Order.objects.create(status="new"), "remind", hours=1) for _ in range(count)]
    if state == "dead":
        died = {"state": "dead", "cause": "retries", "settled_at": timezone.now(), "slot_taken": None, "attempts": 3}
        Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(**died)
    return list(Timeout.objects.filter(pk__in=[row.pk for row in rows]).order_by("id"))


def ids_of(rows: list[Timeout]) -> str:
    return ",".join(str(row.pk) for row in rows)


def address(operation: str) -> str:
    return reverse(OPERATION, args=[operation])


def do(client: Client, operation: str, rows: list[Timeout], **fields: Any) -> Any:
    entered = {"reason": "a storm", "amount": "2", "unit": "hours", "confirmed": "yes", **fields}
    return client.post(address(operation), {"ids": ids_of(rows), **entered})


def ticked(client: Client, operation: str, *rows: Any, query: str = "", **fields: Any) -> Any:
    """Choose an operation for ticked rows of the list."""
    return client.post(
        f"{reverse(LIST)}{query}", {"action": f"{operation}_timeouts", "_selected_action": [*rows], **fields}
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_its_permission_an_operation_is_done_logged_and_told(staff: Staff, operation: str) -> None:
    (row,) = make("dead" if operation in {"retry", "refire", "erase"} else "pending")
    client, before = staff("view_timeout", f"{operation}_timeout"), stored(row.pk)
    answer = do(client, operation, [row])
    assert answer.status_code == 302 and answer.url == reverse(LIST)
    assert stored(row.pk) != before
    user = User.objects.get(pk=client.session["_auth_user_id"])
    history = str(Timeout.objects.get(pk=row.pk).history)
    assert f"admin:{user.username}" in history and "a storm" in history
    (entry,) = LogEntry.objects.all()
    assert (entry.object_id, entry.user, entry.is_change()) == (str(row.pk), user, True)
    assert "a storm" in entry.get_change_message()
    assert len(told(answer)) == 1 and told(answer)[0].startswith("1 timeout ")


def test_the_list_does_nothing_without_the_permission_of_the_operation(staff: Staff) -> None:
    (row,) = make("dead")
    before = stored(row.pk)
    permissions = {each.permission for each in TIMEOUT_OPERATIONS.values()}
    for name, operation in TIMEOUT_OPERATIONS.items():
        allowed = staff("view_timeout", operation.permission)
        others = staff("view_timeout", *permissions - {operation.permission})
        for client in (Client(), others, staff(operation.permission)):
            assert "confirmed" not in ticked(client, name, row.pk).content.decode()
            assert f'value="{name}_timeouts"' not in client.get(reverse(LIST)).content.decode()
        assert f'value="{name}_timeouts"' in source(allowed, LIST)
    assert stored(row.pk) == before and not LogEntry.objects.exists()


def test_rows_that_the_admin_leaves_out_are_not_changed(admin_client: Client, monkeypatch: Patch) -> None:
    hidden, own = make(count=2)
    shown = TimeoutAdmin.get_queryset
    monkeypatch.setattr(TimeoutAdmin, "get_queryset", lambda *args: shown(*args).exclude(pk=hidden.pk))
    page = admin_client.get(address("cancel"), {"ids": ids_of([hidden, own])})
    assert [each["row"].pk for each in page.context["rows"]] == [own.pk]
    do(admin_client, "cancel", [hidden, own]), do(admin_client, "cancel", [hidden])
    assert [*Timeout.objects.order_by("pk").values_list("state", flat=True)] == ["pending", "cancelled"]
    assert LogEntry.objects.count() == 1


def test_the_whole_list_is_chosen_as_filtered_and_no_more_than_the_most(
    admin_client: Client, monkeypatch: Patch
) -> None:
    rows = make(count=4)
    dq.cancel_timeout(rows[0])
    pending = {"query": "?state__exact=pending", "select_across": "1"}
    assert ticked(admin_client, "cancel", rows[1].pk, **pending).context["ids"] == ids_of(rows[1:])
    monkeypatch.setattr(actions, "MAX_ROWS", 2)
    answer = ticked(admin_client, "cancel", rows[1].pk, **pending)
    assert answer.context["count"] == 2
    assert "Only the first 2 are included" in told(answer)[0]


def test_ids_in_an_address_are_numbers_and_bounded(admin_client: Client, monkeypatch: Patch) -> None:
    (row,) = make()
    monkeypatch.setattr(actions, "MAX_ROWS", 3)
    for sent, ids in (("1,x,2,-3,4", "1,2"), ("1,2,3,4", "1,2,3"), (f"{'9' * 30},5", "5")):
        assert admin_client.get(address("cancel"), {"ids": sent}).context["ids"] == ids
    for sent in ("", "x", "1;DROP TABLE", "9" * 20):
        assert admin_client.get(address("cancel"), {"ids": sent}).status_code == 404
        assert do(admin_client, "cancel", [], ids=sent).status_code == 404
    assert admin_client.get(address("explode"), {"ids": "1"}).status_code == 404
    for selected in ("9" * 20, "-1", "0"):
        assert ticked(admin_client, "cancel", selected).status_code < 500
        assert str(row.pk) in ticked(admin_client, "cancel", selected, row.pk).context["ids"].split(",")
    assert Timeout.objects.get().state == "pending"


def test_what_was_left_alone_is_told_with_the_reason(admin_client: Client) -> None:
    pending, settled = make(count=2)
    dq.cancel_timeout(settled)
    page = admin_client.get(address("cancel"), {"ids": ids_of([pending, settled])}).content.decode()
    assert "1 of them will be left unchanged: already settled" in page
    assert told(do(admin_client, "cancel", [pending, settled, Timeout(pk=10**9)])) == [
        "1 timeout was cancelled.",
        f"1 timeout was left unchanged: already settled ({settled.pk})",
        "1 timeout was left unchanged: no longer in the database",
    ]
    assert LogEntry.objects.get().object_id == str(pending.pk)


def test_after_the_deed_the_visitor_is_back_where_he_came_from_but_never_elsewhere(admin_client: Client) -> None:
    rows = make(count=2)
    here = reverse(DETAIL, args=[rows[0].pk])
    assert do(admin_client, "cancel", rows[:1], back=here, reason="<script>alert(1)</script>").url == here
    assert "&lt;script&gt;alert(1)" in (page := source(admin_client, here)) and "<script>alert" not in page
    assert do(admin_client, "cancel", rows[1:], back="https://evil.example/").url == reverse(LIST)


@pytest.mark.parametrize(
    ("since", "after", "is_said"),
    [
        ("paid_at", timedelta(hours=-1), True),
        ("paid_at", lambda order: timedelta(0), False),
        (lambda order: order.paid_at, timedelta(0), False),
    ],
    ids=["before a column", "computed delay", "computed start"],
)
def test_where_a_deadline_follows_a_column_the_pages_that_move_it_say_so(
    admin_client: Client, declare: Any, since: Any, after: Any, is_said: bool
) -> None:
    label = declare(Order, name="pay", since=since, after=after).label
    row = dq.schedule_timeout(Order.objects.create(paid_at=timezone.now() + timedelta(hours=5)), "pay", hours=5)
    (other,) = make()
    sentence = "testapp.order.pay follow the field “paid_at” of the object, which does not move with them."
    for where, has_sentence in (
        (f"{address('postpone')}?ids={ids_of([row, other])}", is_said),
        (f"{address('postpone')}?ids={other.pk}", False),
        (f"{address('cancel')}?ids={row.pk}", False),
        (f"{reverse(SELECTED, args=['hold'])}?policy={label}", is_said),
        (reverse(OPERATE, args=[label, "hold"]), is_said),
        (reverse(OPERATE, args=[label, "pause"]), False),
    ):
        assert (sentence in words(admin_client.get(where))) is has_sentence, where


def detail(client: Client, row: Timeout) -> str:
    return source(client, reverse(DETAIL, args=[row.pk]))


def test_the_pages_show_policy_object_state_deadline_key_and_story(viewer: Client, row: Timeout) -> None:
    due = f"{timezone.localtime(row.due_at):%Y-%m-%d %H:%M:%S}"
    Timeout.objects.update(key="<b>7")
    page = source(viewer, LIST)
    for text in ("testapp.order.remind", f"order {row.object_id}", due, "&lt;b&gt;on request"):
        assert text in page
    assert '<span class="delayq-badge delayq-pending">' in page
    assert page.count("key: ") == 1 and "key: <bdi>&lt;b&gt;7</bdi>" in page
    page = detail(viewer, row)
    for text in ("scheduled", "extended", "asked for it", f"It is due at {due} unless", "&lt;b&gt;on request"):
        assert text in page
    assert f"order {row.object_id}" in page and "/testapp/order/" not in page, "no admin shows this project's orders"


def test_only_who_may_view_sees_the_pages_and_nobody_changes_rows(
    admin_client: Client, client: Client, row: Timeout
) -> None:
    for is_staff in (False, True):
        client.force_login(User.objects.create_user(f"other{is_staff}", is_staff=is_staff))
        for address in (reverse(LIST), reverse(DETAIL, args=[row.pk])):
            assert client.get(address).status_code in (302, 403)
    assert admin_client.get(reverse("admin:django_delayq_timeout_add")).status_code == 403
    assert admin_client.get(reverse("admin:django_delayq_timeout_delete", args=[row.pk])).status_code == 403
    changed = admin_client.post(reverse(DETAIL, args=[row.pk]), {"reason": "x", "state": "fired"})
    assert changed.status_code == 403
    admin_client.post(reverse(LIST), {"action": "delete_selected", "_selected_action": [row.pk]})
    assert Timeout.objects.get().state == "pending"


def test_a_round_that_its_condition_ended_shows_the_values_of_now_to_who_may_view_the_object(
    admin_client: Client, viewer: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    order.status = "paid by phone"
    order.save()
    row = Timeout.objects.get(policy=UNPAID)
    assert (row.state, row.cause) == ("cancelled", "condition")
    assert "The object has now: <code>status = &quot;paid by phone&quot;</code>" in detail(admin_client, row)
    assert "paid by phone" not in detail(viewer, row)
    call_command("delayq_explain", "testapp.order", str(order.pk), policy="cancel_unpaid")
    assert 'The object has now: status = "paid by phone"' in capsys.readouterr().out
    Order.objects.filter(pk=order.pk).delete()
    assert "The object has now" not in detail(admin_client, row)
