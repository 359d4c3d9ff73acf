"""The operations in the admin: permissions, confirmation, effect, log entries and messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse
from django.utils import timezone

import django_delayq as dq
from django_delayq.admin import actions
from django_delayq.admin.pages import TimeoutAdmin
from django_delayq.models import Timeout
from django_delayq.operations.registry import TIMEOUT_OPERATIONS
from tests.integration.admin.conftest import DETAIL, LIST, OPERATION, stored
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db
OPERATIONS = ["cancel", "fire", "postpone", "retry", "refire", "erase"]
Staff = Callable[..., Client]


def make(state: str = "pending", count: int = 1) -> list[Timeout]:
    """So many rows; dead ones have used up their attempts."""
    rows = [dq.schedule_timeout(Order.objects.create(status="new"), "remind", hours=1) for _ in range(count)]
    if state == "dead":
        died = {"state": "dead", "cause": "retries", "settled_at": timezone.now(), "slot_taken": None, "attempts": 3}
        Timeout.objects.filter(pk__in=[row.pk for row in rows]).update(**died)
    return list(Timeout.objects.filter(pk__in=[row.pk for row in rows]).order_by("id"))


def fitting(operation: str, count: int = 1) -> list[Timeout]:
    """Rows to which this can be done."""
    return make("dead" if operation in {"retry", "refire", "erase"} else "pending", count)


def form(rows: list[Timeout], **fields: Any) -> dict[str, Any]:
    ids = ",".join(str(row.pk) for row in rows)
    return {"ids": ids, "confirmed": "yes", "reason": "a storm", "amount": "2", "unit": "hours", **fields}


def address(operation: str) -> str:
    return reverse(OPERATION, args=[operation])


def told(answer: Any) -> list[str]:
    return [str(message) for message in get_messages(answer.wsgi_request)]


def is_done(operation: str, before: Timeout) -> bool:
    now = Timeout.objects.get(pk=before.pk)
    return {
        "cancel": now.state == "cancelled" and now.cause == "hand",
        "fire": now.state == "pending" and now.run_at <= timezone.now(),
        "postpone": now.state == "pending" and now.due_at == before.due_at + timedelta(hours=2),
        "retry": now.state == "pending" and now.attempts == 0,
        "refire": now.state == "dead" and Timeout.objects.filter(object_id=now.object_id, state="pending").exists(),
        "erase": now.state == "dead" and now.erased_at is not None,
    }[operation]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_its_permission_an_operation_is_done_logged_and_told(staff: Staff, operation: str) -> None:
    (row,) = fitting(operation)
    client = staff("view_timeout", f"{operation}_timeout")
    answer: Any = client.post(address(operation), form([row]))
    assert answer.status_code == 302 and answer.url == reverse(LIST)
    assert is_done(operation, row)
    after = Timeout.objects.get(pk=row.pk)
    user = User.objects.get(pk=client.session["_auth_user_id"])
    assert f"admin:{user.username}" in str(after.history) and "a storm" in str(after.history)
    (entry,) = LogEntry.objects.all()
    assert (entry.object_id, entry.user, entry.is_change()) == (str(row.pk), user, True)
    assert "a storm" in entry.get_change_message()
    assert len(told(answer)) == 1 and told(answer)[0].startswith("1 timeout ")


def is_offered(client: Client, operation: str) -> bool:
    return f'value="{operation}_timeouts"' in client.get(reverse(LIST)).content.decode()


def test_the_list_does_nothing_without_the_permission_of_the_operation(staff: Staff) -> None:
    (row,) = make("dead")
    before = stored(row.pk)
    visitor = Client()
    visitor.force_login(User.objects.create_user("visitor"))
    permissions = {each.permission for each in TIMEOUT_OPERATIONS.values()}
    for name, operation in TIMEOUT_OPERATIONS.items():
        others = staff("view_timeout", *permissions - {operation.permission})
        for client in (Client(), visitor, staff(), staff("view_timeout"), others, staff(operation.permission)):
            answer = client.post(reverse(LIST), {"action": f"{name}_timeouts", "_selected_action": [row.pk]})
            assert "confirmed" not in answer.content.decode()
            assert client.post(address(name), {"ids": row.pk}).status_code in (302, 403)
            assert not is_offered(client, name)
        assert is_offered(staff("view_timeout", operation.permission), name)
    assert stored(row.pk) == before
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_page_asks_first_and_changes_nothing(admin_client: Client, operation: str) -> None:
    (row,) = fitting(operation)
    before = stored()
    page = admin_client.get(address(operation), {"ids": row.pk}).content.decode()
    asked = "Show the consequences" if TIMEOUT_OPERATIONS[operation].has_preview else 'name="confirmed"'
    assert f"order {row.object_id}" in page and asked in page and "csrfmiddlewaretoken" in page
    # A link that claims to be confirmed is none: changes are made by POST.
    admin_client.get(address(operation), form([row]))
    assert stored() == before and not LogEntry.objects.exists()


def test_a_post_from_another_site_is_refused(row: Timeout) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("boss"))
    assert client.post(address("cancel"), form([row])).status_code == 403
    assert Timeout.objects.get().state == "pending"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_list_offers_the_operation_and_asks_for_what_was_ticked(admin_client: Client, operation: str) -> None:
    rows = fitting(operation, 3)
    chosen = {"action": f"{operation}_timeouts", "_selected_action": [rows[0].pk, rows[2].pk]}
    answer = admin_client.post(f"{reverse(LIST)}?q=", chosen)
    assert answer.status_code == 200
    assert answer.context["ids"] == f"{rows[0].pk},{rows[2].pk}"
    assert admin_client.post(address(operation), form([rows[0], rows[2]])).status_code == 302
    assert [is_done(operation, row) for row in rows] == [True, False, True]
    assert LogEntry.objects.count() == 2


def test_the_whole_list_is_chosen_as_it_is_filtered_and_no_more_than_the_most(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make(count=4)
    dq.cancel_timeout(Order.objects.get(pk=rows[0].object_id), "remind")
    everything = {"action": "cancel_timeouts", "_selected_action": [rows[1].pk], "select_across": "1"}
    answer = admin_client.post(f"{reverse(LIST)}?state__exact=pending", everything)
    assert answer.context["ids"] == ",".join(str(row.pk) for row in rows[1:])
    monkeypatch.setattr("django_delayq.admin.actions.MAX_ROWS", 2)
    answer = admin_client.post(f"{reverse(LIST)}?state__exact=pending", everything)
    assert answer.context["count"] == 2
    assert "Only the first 2 are included" in told(answer)[0]


def test_ids_in_an_address_are_bounded_and_numbers(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "MAX_ROWS", 3)
    for sent, ids in (("1,x,2,-3,4", "1,2"), ("1,2,3,4", "1,2,3"), (f"{'9' * 30},5", "5")):
        assert admin_client.get(address("cancel"), {"ids": sent}).context["ids"] == ids


@pytest.mark.parametrize("ids", ["", "x", "1;DROP TABLE", "99999999999999999999"])
def test_ids_that_are_none_lead_nowhere(admin_client: Client, ids: str) -> None:
    assert admin_client.get(address("cancel"), {"ids": ids}).status_code == 404
    assert admin_client.post(address("cancel"), form([], ids=ids)).status_code == 404
    assert admin_client.get(reverse(OPERATION, args=["explode"]), {"ids": "1"}).status_code == 404


@pytest.mark.parametrize("selected", ["99999999999999999999", "-1", "0"])
def test_an_action_on_ids_that_no_row_can_have_changes_nothing(admin_client: Client, selected: str) -> None:
    row = make()[0]
    answer = admin_client.post(reverse(LIST), {"action": "cancel_timeouts", "_selected_action": [selected]})
    assert answer.status_code < 500
    answer = admin_client.post(
        reverse(LIST), {"action": "cancel_timeouts", "_selected_action": [selected, str(row.pk)]}
    )
    assert str(row.pk) in answer.context["ids"].split(",")
    assert Timeout.objects.get().state == "pending"


def test_what_was_left_alone_is_told_with_the_reason(admin_client: Client) -> None:
    pending, settled = make(count=2)
    dq.cancel_timeout(settled)
    gone = Timeout(pk=10**9)
    page = admin_client.get(address("cancel"), {"ids": f"{pending.pk},{settled.pk}"}).content.decode()
    assert "1 of them will be left unchanged: already settled" in page
    answer = admin_client.post(address("cancel"), form([pending, settled, gone]))
    assert told(answer) == [
        "1 timeout was cancelled.",
        f"1 timeout was left unchanged: already settled ({settled.pk})",
        "1 timeout was left unchanged: no longer in the database",
    ]
    assert LogEntry.objects.get().object_id == str(pending.pk)


def test_a_form_that_says_nonsense_changes_nothing_and_comes_back(admin_client: Client) -> None:
    (row,) = make()
    before = stored()
    for fields in ({"reason": "x" * 256}, {"unit": "fortnights"}):
        answer = admin_client.post(address("postpone"), form([row], **fields))
        assert answer.status_code == 200
        assert "errorlist" in answer.content.decode()
    assert stored() == before and not LogEntry.objects.exists()


def test_what_was_fired_again_is_left_alone_while_its_new_round_is_pending(admin_client: Client) -> None:
    (row,) = make("dead")
    assert told(admin_client.post(address("refire"), form([row]))) == ["1 timeout is scheduled again."]
    answer = admin_client.post(address("refire"), form([row]))
    assert told(answer)[-1] == f"1 timeout was left unchanged: a newer round is pending ({row.pk})"


def test_a_deadline_farther_than_can_be_is_told_and_not_a_crash(admin_client: Client) -> None:
    (row,) = make()
    Timeout.objects.update(due_at="9999-12-20T00:00:00+00:00", run_at="9999-12-20T00:00:00+00:00")
    answer = admin_client.post(address("postpone"), form([row], amount="90000", unit="days"))
    assert told(answer) == [f"1 timeout was left unchanged: the new deadline is too far in the future ({row.pk})"]


def test_the_detail_page_has_buttons_for_what_may_be_done_now(staff: Staff) -> None:
    (pending,), (dead,) = make(), make("dead")
    every = staff("view_timeout", *(f"{operation}_timeout" for operation in OPERATIONS))

    def offered(client: Client, row: Timeout) -> set[str]:
        page = client.get(reverse(DETAIL, args=[row.pk])).content.decode()
        return {operation for operation in OPERATIONS if f"{address(operation)}?ids={row.pk}" in page}

    assert offered(every, pending) == {"cancel", "fire", "postpone"}
    assert offered(every, dead) == {"cancel", "retry", "refire", "erase"}
    assert offered(staff("view_timeout", "fire_timeout"), pending) == {"fire"}
    assert offered(staff("view_timeout"), pending) == set()


def test_after_the_deed_the_visitor_is_back_where_he_came_from_but_never_elsewhere(admin_client: Client) -> None:
    rows = make(count=2)
    here = reverse(DETAIL, args=[rows[0].pk])
    done: Any = admin_client.post(address("cancel"), form(rows[:1], back=here))
    assert done.url == here
    evil: Any = admin_client.post(address("cancel"), form(rows[1:], back="https://evil.example/"))
    assert evil.url == reverse(LIST)


def test_rows_whose_object_policy_or_kind_is_gone_can_still_be_cancelled(admin_client: Client) -> None:
    objectless, unknown, kindless = make(count=3)
    Order.objects.filter(pk=objectless.object_id)._raw_delete("default")
    Timeout.objects.filter(pk=unknown.pk).update(policy="gone.order.policy")
    Timeout.objects.filter(pk=kindless.pk).update(content_type_id=10**6)
    rows = [objectless, unknown, kindless]
    page = admin_client.get(address("cancel"), {"ids": ",".join(str(row.pk) for row in rows)})
    assert page.status_code == 200
    answer = admin_client.post(address("cancel"), form(rows))
    assert told(answer) == ["3 timeouts were cancelled."]
    alone = make()[0]
    Timeout.objects.filter(pk=alone.pk).update(content_type_id=10**6)
    assert told(admin_client.post(address("cancel"), form([alone])))[-1] == "1 timeout was cancelled."


def test_markup_in_a_reason_stays_text(admin_client: Client) -> None:
    (row,) = make()
    admin_client.post(address("cancel"), form([row], reason="<script>alert(1)</script>"))
    page = admin_client.get(reverse(DETAIL, args=[row.pk])).content.decode()
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_that_the_admin_leaves_out_are_not_changed(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    hidden, own = fitting(operation, 2)
    shown = TimeoutAdmin.get_queryset
    monkeypatch.setattr(TimeoutAdmin, "get_queryset", lambda *args: shown(*args).exclude(pk=hidden.pk))
    before = stored(hidden.pk)
    page = admin_client.get(address(operation), {"ids": f"{hidden.pk},{own.pk}"})
    assert [each["row"].pk for each in page.context["rows"]] == [own.pk]
    for rows in ([hidden, own], [hidden]):
        assert admin_client.post(address(operation), form(rows)).status_code == 302
    assert stored(hidden.pk) == before
    assert is_done(operation, own)
    assert LogEntry.objects.count() == 1
