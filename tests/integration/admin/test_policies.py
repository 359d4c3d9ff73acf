"""The page and the report of policies: what they show, who may change what, that it asks first, and what it logs."""

from __future__ import annotations

import csv
import io
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse, reverse_lazy
from django.utils import timezone

import django_delayq as dq
from django_delayq import Brake, Late, Limits, Rate, clock, operations
from django_delayq.admin import actions, reports
from django_delayq.ledger import controls
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import changes
from tests.integration.admin.conftest import Staff, policy_shown, queries, source, stored, told
from tests.integration.admin.places import LINGER, OPERATE, POLICIES, REMIND, SELECTED, UNPAID
from tests.integration.monitoring.rounds import settled_row
from tests.support.typed import Patch
from tests.testapp.models import Customer, Order

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("controls_are_read_again")]
committed = pytest.mark.django_db(transaction=True)
"""For tests in which rows are moved, which follows the commit."""
HOUR = timedelta(hours=1)
GUARDED = "testapp.order.guarded"
CHANGES = "admin:django_delayq_policychange_changelist"
OPERATIONS = {
    **dict.fromkeys(("pause", "hold", "resume"), "pause_policy"),
    "delay": "change_policy_delay",
    **dict.fromkeys(("late", "brake", "shadow"), "change_policy_guards"),
}
FIELDS = {"reason": "a storm", "confirmed": "yes", "amount": "45", "unit": "minutes", "mode": "recompute"}
FIELDS |= {"shift": "on", "setting": "on", "then": "dead", "most": "50", "share": "10"}


def address(operation: str, label: str = UNPAID) -> str:
    return reverse(OPERATE, args=[label, operation])


def of_several(operation: str, query: str = "") -> str:
    return reverse(SELECTED, args=[operation]) + query


def state(label: str = UNPAID) -> controls.PolicyState:
    return controls.policy_state(dq.get_policy(label), "default")


def stops() -> dict[str, str]:
    return {each.label: each.stop for each in controls.policy_states("default") if each.stop}


def in_form(moment: Any) -> str:
    """Return a datetime as it is entered in a form."""
    return timezone.localtime(moment).strftime("%Y-%m-%dT%H:%M")


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="unpaid", created_at=timezone.now())


def test_each_policy_is_told_and_its_numbers_lead_to_the_rows(admin_client: Client, order: Order) -> None:
    text = source(admin_client, POLICIES)
    told_of_it = ("testapp.Order", "30 min", "created_at", "status = &quot;unpaid&quot;", "timeouts.cancel_unpaid")
    assert [each for each in (UNPAID, *told_of_it) if each not in text] == []
    shown = policy_shown(admin_client, UNPAID)
    assert {count["name"]: str(count["count"]) for count in shown["numbers"]}["pending"] == "1"
    assert shown["chart"]["total"] == "1"
    numbers = shown["numbers"] + admin_client.get(reverse(POLICIES)).context["shown"]["numbers"]
    names = ["due", "failing", "dead", "pending", "held"]
    assert [each["name"] for each in numbers] == [*names, "fired", "skipped", *names]
    for each in numbers:
        assert admin_client.get(each["address"]).context["cl"].result_count == each["count"].value, each["name"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_its_permission_an_operation_is_done_logged_and_told(staff: Staff, order: Order, operation: str) -> None:
    if operation == "resume":
        operations.pause(UNPAID, by="admin:ann")
    before = list(PolicyControl.objects.values())
    client = staff("view_policycontrol", OPERATIONS[operation])
    others = staff("view_policycontrol", *{*OPERATIONS.values()} - {OPERATIONS[operation]})
    for visitor, is_offered in ((client, True), (others, False)):
        assert (address(operation) in source(visitor, POLICIES)) is is_offered
    asked = client.get(address(operation), FIELDS).content.decode()  # a link that claims to be confirmed
    assert UNPAID in asked and "csrfmiddlewaretoken" in asked
    assert list(PolicyControl.objects.values()) == before and not LogEntry.objects.exists()
    answer: Any = client.post(address(operation), FIELDS)
    assert answer.status_code == 302 and answer.url == reverse(POLICIES)
    user = User.objects.get(pk=client.session["_auth_user_id"])
    change, entry = PolicyChange.objects.latest("id"), LogEntry.objects.get()
    assert (change.by, change.reason) == (f"admin:{user.username}", "a storm")
    assert (entry.user, entry.object_id) == (user, str(PolicyControl.objects.get().pk))
    assert "a storm" in entry.change_message and told(answer)[0].startswith(f"“{UNPAID}”")


def test_nobody_sees_the_page_without_its_permission_nor_one_of_nothing(staff: Staff, admin_client: Client) -> None:
    visitor = Client()
    visitor.force_login(User.objects.create_user("visitor"))
    for client, code in ((Client(), 302), (visitor, 302), (staff(), 403), (staff(*{*OPERATIONS.values()}), 403)):
        assert client.get(reverse(POLICIES)).status_code == code
    for where in (address("pause", "no.such.policy"), address("explode")):
        assert admin_client.get(where).status_code == 404 == admin_client.post(where, FIELDS).status_code


@committed
def test_the_delay_is_previewed_before_it_is_changed(admin_client: Client, order: Order) -> None:
    fields = {"reason": "a new <provider>", "amount": "0", "unit": "seconds", "mode": "shift"}
    before = stored()
    text = admin_client.post(address("delay"), fields).content.decode()
    assert "Delay in force: 30 min." in text and "New delay: 0 s." in text and "1 is due and fires now." in text
    assert ">shift: " in text and ">a new &lt;provider&gt;</dd>" in text  # what is about to be confirmed
    assert 'name="confirmed"' in text
    back = admin_client.post(address("delay"), {**fields, "again": "Choose again"}).content.decode()
    assert 'name="amount" value="0"' in back and state().after is None and stored() == before
    admin_client.post(address("delay"), {**fields, "confirmed": "yes"})
    assert state().after == timedelta(0) and Timeout.objects.get().due_at != before["due_at"]
    assert "0 s (declared: 30 min)" in source(admin_client, POLICIES)


@committed
def test_a_stop_is_shown_with_its_end_its_actor_and_the_label_as_it_is_written(admin_client: Client) -> None:
    fields = {**FIELDS, "until": in_form(timezone.now() + timedelta(hours=3))}
    shown = admin_client.post(address("pause"), fields, follow=True).content.decode()
    assert f"“{UNPAID}”: paused." in shown and UNPAID.capitalize() not in shown  # the admin capitalizes messages
    assert "Paused since" in shown and "Resumes automatically" in shown and "By admin:admin: a storm" in shown
    admin_client.post(address("hold"), FIELDS)
    assert address("pause") not in source(admin_client, POLICIES)
    refused = admin_client.post(address("pause"), FIELDS)
    assert refused.status_code == 200 and b"is on hold: resume it first" in refused.content
    admin_client.post(address("resume"), FIELDS)
    assert told(admin_client.post(address("resume"), FIELDS))[-1] == f"“{UNPAID}” is not stopped."
    assert b"declares no delay" in admin_client.post(address("delay", REMIND), FIELDS).content
    for wrong in ({"declared": "on"}, {"amount": "1e30", "unit": "days"}):
        assert b"errorlist" in admin_client.post(address("delay"), {**FIELDS, **wrong}).content


@committed
def test_the_form_of_a_paused_policy_shows_what_is_in_force_and_keeps_what_is_left_alone(admin_client: Client) -> None:
    until = timezone.now() + timedelta(days=1, seconds=33)
    operations.pause(UNPAID, by="support", reason="outage", until=until)
    shown = admin_client.get(address("pause")).context["form"]
    fields = {"reason": shown["reason"].value(), "until": in_form(until)}
    assert fields["reason"] == "outage" == admin_client.get(address("hold")).context["form"]["reason"].value()
    assert f'value="{fields["until"]}"' in str(shown["until"])
    assert told(admin_client.post(address("pause"), fields)) == ["Nothing was changed."]
    admin_client.post(address("pause"), {**fields, "reason": "still down"})
    assert (state().until, state().reason) == (until, "still down"), "the end is kept to the second"
    admin_client.post(address("pause"), {**fields, "until": ""})
    assert (state().stop, state().until) == ("paused", None)


@committed
def test_moving_for_too_long_is_left_to_a_worker(admin_client: Client, order: Order, monkeypatch: Patch) -> None:
    monkeypatch.setattr(actions, "time_limit", lambda: changes.time_limit(-1.0))
    answer = admin_client.post(address("delay"), FIELDS)
    assert "Deadlines are still being moved" in told(answer)[0]
    assert PolicyChange.objects.get().finished_at is None
    text = source(admin_client, POLICIES)
    assert "An earlier change is still moving deadlines" in text and address("pause") not in text
    assert LogEntry.objects.count() == 1
    assert operations.continue_moves("default") == 1
    assert PolicyChange.objects.get().finished_at is not None
    assert order.created_at and Timeout.objects.get().due_at == order.created_at + timedelta(minutes=45)


def test_all_changes_are_listed_for_who_may_see_them(staff: Staff) -> None:
    operations.pause(UNPAID, by="cli:root", reason="<i>storm</i>")
    client, change = staff("view_policychange"), PolicyChange.objects.get()
    text = source(client, CHANGES)
    assert UNPAID in text and "cli:root" in text and "&lt;i&gt;storm" in text
    assert staff().get(reverse(CHANGES)).status_code == 403
    detail = reverse("admin:django_delayq_policychange_change", args=[change.pk])
    assert client.post(detail, {"reason": "forged"}).status_code == 403


PAGES = {"first page": reverse_lazy("admin:app_list", args=["django_delayq"]), "policies": reverse_lazy(POLICIES)}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_few_queries_for_many_policies_and_timeouts(admin_client: Client, declare: Any, name: str) -> None:
    dq.schedule_timeout(Order.objects.create(), "remind", minutes=0)
    _, few = (queries(admin_client, str(PAGES[name])) for _ in range(2))
    for number in range(25):
        dq.schedule_timeout(Order.objects.create(), declare(Order, name=f"more_{number}"), minutes=number)
    assert few == queries(admin_client, str(PAGES[name])) <= 22


def test_the_first_page_shows_burning_policies_first_to_those_who_may_see_them(staff: Staff, order: Order) -> None:
    later = timezone.now() - timedelta(hours=1)
    dq.schedule_timeout(order, "remind", minutes=5)
    Timeout.objects.filter(policy=REMIND).update(due_at=later, run_at=later, created_at=later)
    for permissions, is_shown in (((), False), (("view_timeout",), True), (("view_policycontrol",), True)):
        answer = staff("view_policychange", *permissions).get(PAGES["first page"])
        assert ("data-delayq-refresh" in answer.content.decode()) is is_shown
        if is_shown:
            top = answer.context["shown"]["policies"][0]
            assert (top["status"].label, top["status"].urgency, top["waited_seconds"]) == (REMIND, "overdue", "1 h")
            assert bool(top["numbers"][0]["address"]) is ("view_timeout" in permissions)


@committed
def test_all_policies_stop_but_what_is_stopped_for_longer_is_left_alone(admin_client: Client) -> None:
    operations.pause(REMIND, by="admin:alice", reason="wrong price list")
    operations.hold(LINGER, by="admin:alice", until=timezone.now() + timedelta(minutes=5))
    labels = [each["label"] for each in admin_client.get(of_several("pause", "?all=1")).context["policies"]]
    assert labels == sorted(policy.label for policy in dq.get_policies())
    fields = {**FIELDS, "policy": labels, "until": in_form(timezone.now() + timedelta(hours=1))}
    answer = admin_client.post(of_several("pause"), fields)
    assert PolicyControl.objects.get(policy=REMIND).reason == "wrong price list"
    assert f"“{REMIND}” is left as it is, because it is stopped for longer." in told(answer)
    assert f"{LINGER} is on hold: resume it first." in told(answer)
    assert len(stops()) == len(labels)
    admin_client.post(of_several("resume"), {**FIELDS, "policy": [UNPAID, REMIND]})
    assert len(stops()) == len(labels) - 2


def test_of_several_none_changes_without_permission_confirmation_or_policy(admin_client: Client, staff: Staff) -> None:
    for operation in ("pause", "hold", "resume"):
        for client in (staff("view_policycontrol", "change_policy_guards"), staff("pause_policy")):
            assert client.get(of_several(operation, "?all=1")).status_code == 403
            assert client.post(of_several(operation), {**FIELDS, "policy": REMIND}).status_code == 403
        assert of_several(operation) not in source(staff("view_policycontrol"), POLICIES)
        assert of_several(operation) in source(staff("view_policycontrol", "pause_policy"), POLICIES)
    assert told(admin_client.get(of_several("pause"))) == ["Select policies first."]
    assert told(admin_client.post(of_several("pause"), {**FIELDS, "policy": "no.such.policy"}))
    for fields in ({"policy": REMIND}, {"policy": REMIND, "reason": "x", "until": "2020-01-01T10:00"}):
        answer = admin_client.post(of_several("pause"), fields)
        assert answer.status_code == 200 and b"errorlist" in answer.content
        assert f'name="policy" value="{REMIND}"' in answer.content.decode()
    for operation in ("delay", "brake", "explode"):
        assert admin_client.get(of_several(operation, "?all=1")).status_code == 404
    assert not PolicyChange.objects.exists()


def test_the_guard_rails_in_force_are_shown_with_who_set_them(admin_client: Client, declare: Any) -> None:
    limits = Limits(run=HOUR / 60, rate=Rate(20, by="status"), snoozes=3, total=HOUR)
    declare(Order, name="guarded", late=Late(HOUR), brake=Brake(500, HOUR / 6), shadow=True, limits=limits)
    assert policy_shown(admin_client, UNPAID)["guards"] == [], "a policy without guard rails shows none"
    assert dict(policy_shown(admin_client, GUARDED)["guards"]) == {
        "Late": "skipped if it would fire more than 1 h late (declared)",
        "Brake": "pauses after more than 500 firings in 10 min (declared)",
        "Shadow mode": "100% of the objects are skipped, and nothing fires for them (declared)",
        "Longest call": "1 min",
        "Highest rate": "20 attempts in 1 s, for each value of status",
        "Most snoozes": "3",
        "Furthest move": "1 h",
    }
    operations.late(GUARDED, after=2 * HOUR, then="fire", by="cli:ann")
    operations.brake(GUARDED, off=True, by="cli:<b>ob")
    operations.shadow(GUARDED, share=0, by="rest:eve")
    shown = dict(policy_shown(admin_client, GUARDED)["guards"])
    assert shown["Late"] == "fires also if it is more than 2 h late (set by cli:ann)"
    assert (shown["Brake"], shown["Shadow mode"]) == ("off (set by cli:<b>ob)", "off (set by rest:eve)")
    assert "cli:&lt;b&gt;ob" in source(admin_client, POLICIES)
    form = admin_client.get(address("late", GUARDED)).context["form"]
    assert form.initial == {"amount": 2, "unit": "hours", "then": "fire"}, "what is in force"


ADDRESS = reverse("admin:django_delayq_policycontrol_report", args=[UNPAID])


@pytest.fixture
def settled() -> None:
    """Two rounds in time and one that fired, three days ago."""
    at = clock.now() - timedelta(days=3)
    columns = {"due_at": at + timedelta(minutes=5), "since_at": at - timedelta(minutes=25)}
    rows = [settled_row(at, "cancelled", "condition", label=UNPAID, **columns) for _ in range(2)]
    Timeout.objects.bulk_create([*rows, settled_row(at, label=UNPAID)])


@pytest.mark.usefixtures("settled")
def test_the_page_has_a_plot_a_table_and_a_file(viewer: Client, monkeypatch: Patch) -> None:
    text = source(viewer, ADDRESS)
    assert "66.7%" in text and "24 min" in text
    assert text.count("<rect") == 60
    assert "in time 2, other rounds 1</title>" in text
    file = viewer.get(ADDRESS, {"format": "csv", "by": "month"})
    assert file["Content-Disposition"].startswith(f'attachment; filename="{UNPAID}-')
    rows = list(csv.DictReader(io.StringIO(file.content.decode("utf-8-sig"))))
    assert rows[-1]["month"] == "total" and rows[-1]["in_time"] == "2"
    monkeypatch.setattr(reports, "MAX_READ", 2)
    assert "Counted until:" in source(viewer, ADDRESS), "it would read too many rows"


def test_only_who_may_view_timeouts_sees_it_and_only_of_what_has_a_policy_or_rows(staff: Staff, viewer: Client) -> None:
    assert staff("view_policycontrol").get(ADDRESS).status_code == 403
    assert Client().get(ADDRESS).status_code == 302
    assert ADDRESS in source(staff("view_timeout", "view_policycontrol"), POLICIES)
    assert ADDRESS not in source(staff("view_policycontrol"), POLICIES)
    never = ADDRESS.replace("cancel_unpaid", "never")
    assert viewer.get(never).status_code == 404
    Timeout.objects.bulk_create([settled_row(clock.now(), label="testapp.order.never")])
    assert viewer.get(never).status_code == 200
    for asked in ("by=year", "days=1000000", "days=x", "by=%00", "field=%00&by=field", "by=field&field=id__year"):
        assert viewer.get(f"{ADDRESS}?{asked}").status_code in {200, 403}, asked


def test_a_field_is_shown_to_those_who_may_view_its_model(viewer: Client) -> None:
    order = Order.objects.create(status="s", customer=Customer.objects.create(name="<b>Ann</b>"))
    Timeout.objects.bulk_create([settled_row(clock.now(), label=UNPAID, object_id=str(order.pk))])
    by = f"{ADDRESS}?by=field&field="
    assert viewer.get(f"{by}customer__name").status_code == 403
    user = User.objects.get()
    user.user_permissions.add(Permission.objects.get(codename="view_customer"))
    text = source(viewer, f"{by}customer__name")
    assert "&lt;b&gt;Ann&lt;/b&gt;" in text and "<b>Ann" not in text
    assert viewer.get(f"{by}customer__password").status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_order"))
    assert "no such field" in source(viewer, f"{by}nothing")
    assert "Enter a field" in source(viewer, by)
