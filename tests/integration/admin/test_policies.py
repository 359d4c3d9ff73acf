"""The policies page: what it shows, who may change what, and that it asks first."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse, reverse_lazy
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.admin import actions, changelist
from django_delayq.admin.reports import chart
from django_delayq.ledger import controls
from django_delayq.ledger.search import Count
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations import changes
from django_delayq.times.lengths import length_label
from tests.integration.admin.conftest import policy_shown, stored
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db
LIST = "admin:django_delayq_policycontrol_changelist"
LABEL = "testapp.order.cancel_unpaid"
OPERATIONS = {
    **dict.fromkeys(("pause", "hold", "resume"), "pause_policy"),
    "delay": "change_policy_delay",
    **dict.fromkeys(("late", "brake", "shadow"), "change_policy_guards"),
}
FIELDS = {
    "reason": "a storm",
    "confirmed": "yes",
    "amount": "45",
    "unit": "minutes",
    "mode": "recompute",
    "shift": "on",
    "setting": "on",
    "then": "dead",
    "most": "50",
    "share": "10",
}
Staff = Callable[..., Client]


def address(operation: str, label: str = LABEL) -> str:
    return reverse("admin:django_delayq_policycontrol_operate", args=[label, operation])


def state(label: str = LABEL) -> controls.PolicyState:
    return controls.policy_state(dq.get_policy(label), "default")


def ready(operation: str) -> None:
    if operation == "resume":
        operations.pause(LABEL, by="somebody")


def told(answer: Any) -> list[str]:
    return [str(message) for message in get_messages(answer.wsgi_request)]


@pytest.fixture
def order() -> Order:
    return Order.objects.create(status="unpaid", created_at=timezone.now())


def page(client: Client) -> str:
    answer = client.get(reverse(LIST))
    assert answer.status_code == 200
    return answer.content.decode()


def test_the_page_has_the_name_of_its_link(admin_client: Client) -> None:
    home = admin_client.get(reverse("admin:index")).content.decode()
    names = re.findall(rf'<a href="{reverse(LIST)}"[^>]*>([^<]+)</a>', home)
    assert "Policies" in names
    assert re.search(r"<h1[^>]*>Policies</h1>", page(admin_client))


def test_each_policy_is_told(admin_client: Client, order: Order) -> None:
    text = page(admin_client)
    for words in (
        LABEL,
        "testapp.Order",
        "30 min",
        "created_at",
        "status = &quot;unpaid&quot;",
        "tests.testapp.timeouts.cancel_unpaid",
    ):
        assert words in text, words
    shown = policy_shown(admin_client, LABEL)
    assert {count["name"]: str(count["count"]) for count in shown["numbers"]}["pending"] == "1"
    assert shown["chart"]["total"] == "1"
    assert "Due in the next 24 hours" in text and "<desc" in text and "<caption" in text


def test_the_numbers_lead_to_the_rows(admin_client: Client, order: Order) -> None:
    shown = policy_shown(admin_client, LABEL)["numbers"] + admin_client.get(reverse(LIST)).context["shown"]["numbers"]
    names = ["due", "failing", "dead", "pending", "held"]
    assert [counted["name"] for counted in shown] == [*names, "fired", "skipped", *names]
    for counted in shown:
        listed = admin_client.get(counted["address"]).context["cl"]
        assert listed.result_count == counted["count"].value, counted["name"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_its_permission_an_operation_is_done_logged_and_told(staff: Staff, order: Order, operation: str) -> None:
    ready(operation)
    client = staff("view_policycontrol", OPERATIONS[operation])
    others = staff("view_policycontrol", *{*OPERATIONS.values()} - {OPERATIONS[operation]})
    for visitor, is_offered in ((client, True), (others, False), (staff("view_policycontrol"), False)):
        assert (address(operation) in page(visitor)) is is_offered
    answer: Any = client.post(address(operation), FIELDS)
    assert answer.status_code == 302 and answer.url == reverse(LIST)
    user = User.objects.get(pk=client.session["_auth_user_id"])
    change = PolicyChange.objects.latest("id")
    assert (change.by, change.reason) == (f"admin:{user.username}", "a storm")
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id) == (
        user,
        str(PolicyControl.objects.get().pk),
    ) and "a storm" in entry.change_message
    assert told(answer)[0].startswith(f"“{LABEL}”")


def test_without_the_permission_to_view_policies_there_is_no_page(staff: Staff) -> None:
    visitor = Client()
    visitor.force_login(User.objects.create_user("visitor"))
    for client, code in ((Client(), 302), (visitor, 302), (staff(), 403), (staff(*{*OPERATIONS.values()}), 403)):
        assert client.get(reverse(LIST)).status_code == code


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_page_asks_first_and_changes_nothing(admin_client: Client, operation: str) -> None:
    ready(operation)
    before = list(PolicyControl.objects.values())
    text = admin_client.get(address(operation), FIELDS).content.decode()
    assert LABEL in text and "csrfmiddlewaretoken" in text
    assert list(PolicyControl.objects.values()) == before and not LogEntry.objects.exists()


def test_a_post_from_another_site_is_refused() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("boss"))
    assert client.post(address("pause"), FIELDS).status_code == 403
    assert state().stop == ""


@pytest.mark.django_db(transaction=True)  # rows are moved after the commit
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("keep", "1 deadline stays."),
        ("recompute", "1 is due and fires now."),
        ("shift", "1 is due and fires now."),
    ],
)
def test_the_delay_is_previewed_before_it_is_changed(admin_client: Client, order: Order, mode: str, words: str) -> None:
    fields = {"reason": "a new <provider>", "amount": "0", "unit": "seconds", "mode": mode}
    before = stored()
    preview = admin_client.post(address("delay"), fields)
    text = preview.content.decode()
    assert "Delay in force: 30 min." in text and "New delay: 0 s." in text and words in text
    assert f">{mode}: " in text and ">a new &lt;provider&gt;</dd>" in text  # what is about to be confirmed
    assert 'name="confirmed"' in text and state().after is None
    assert stored() == before
    back = admin_client.post(address("delay"), {**fields, "again": "Choose again"}).content.decode()
    assert 'name="amount" value="0"' in back and state().after is None
    admin_client.post(address("delay"), {**fields, "confirmed": "yes"})
    assert state().after == timedelta(0)
    assert (Timeout.objects.get().due_at == before["due_at"]) == (mode == "keep")


@pytest.mark.django_db(transaction=True)  # rows are moved after the commit
def test_the_declared_delay_holds_again(admin_client: Client, order: Order) -> None:
    operations.change_delay(LABEL, timedelta(hours=5), by="somebody", mode="recompute")
    assert "5 h (declared: 30 min)" in page(admin_client)
    admin_client.post(address("delay"), {"reason": "x", "declared": "on", "mode": "recompute", "confirmed": "yes"})
    assert state().after is None
    assert order.created_at and Timeout.objects.get().due_at == order.created_at + timedelta(minutes=30)


@pytest.mark.django_db(transaction=True)  # rows are moved after the commit
def test_a_hold_is_released_with_or_without_moving_the_deadlines(admin_client: Client, order: Order) -> None:
    before = Timeout.objects.get().due_at
    for shift, moves in (({"shift": "on"}, True), ({}, False)):
        admin_client.post(address("hold"), {"reason": "outage", "confirmed": "yes"})
        assert "On hold since" in page(admin_client)
        answer = admin_client.post(address("resume"), {"reason": "over", "confirmed": "yes", **shift})
        now = Timeout.objects.get().due_at
        assert (now > before) == moves
        assert ("1 deadline was moved." in told(answer)[-1]) == moves
        before = now


def test_the_page_shows_the_label_as_it_is_written_in_the_message_too(admin_client: Client) -> None:
    shown = admin_client.post(address("pause"), FIELDS, follow=True).content.decode()
    assert f"“{LABEL}”: paused." in shown and LABEL.capitalize() not in shown  # the admin capitalizes messages


def test_a_pause_until_a_moment_ends_by_itself_and_says_when(admin_client: Client) -> None:
    until = timezone.localtime() + timedelta(hours=3)
    admin_client.post(address("pause"), {"reason": "x", "until": f"{until:%Y-%m-%dT%H:%M}", "confirmed": "yes"})
    assert state().until == until.replace(second=0, microsecond=0)
    text = page(admin_client)
    assert "Paused since" in text and "Resumes automatically" in text and "By admin:admin: x" in text


@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        ("delay", {"amount": "5", "declared": "on"}),
        ("delay", {"amount": "1e30", "unit": "days"}),
        ("late", {"setting": ""}),
        ("brake", {"setting": "maybe"}),
    ],
    ids=str,
)
def test_a_form_that_says_nonsense_changes_nothing_and_comes_back(
    admin_client: Client, operation: str, fields: dict[str, str]
) -> None:
    answer = admin_client.post(address(operation), {**FIELDS, **fields})
    assert answer.status_code == 200 and "errorlist" in answer.content.decode()
    assert not PolicyChange.objects.exists() and not LogEntry.objects.exists()


@pytest.mark.django_db(transaction=True)  # rows are moved after the commit
def test_what_does_not_fit_what_is_in_force_is_told(admin_client: Client) -> None:
    operations.hold(LABEL, by="somebody")
    assert address("pause") not in page(admin_client) and address("hold") in page(admin_client)
    answer = admin_client.post(address("pause"), FIELDS)
    assert answer.status_code == 200 and "is on hold: resume it first" in answer.content.decode()
    assert state().stop == "held"
    operations.resume(LABEL, by="somebody")
    assert told(admin_client.post(address("resume"), FIELDS)) == [f"“{LABEL}” is not stopped."]
    shifted = admin_client.post(address("delay", "testapp.order.remind"), FIELDS)
    assert "declares no delay" in shifted.content.decode()


@pytest.mark.django_db(transaction=True)
def test_the_form_of_a_paused_policy_shows_what_is_in_force_and_keeps_what_is_left_alone(admin_client: Client) -> None:
    until = timezone.now() + timedelta(days=1, seconds=33)
    operations.pause(LABEL, by="support", reason="outage", until=until)
    shown = admin_client.get(address("pause")).context["form"]
    fields = {"reason": shown["reason"].value(), "until": timezone.localtime(until).strftime("%Y-%m-%dT%H:%M")}
    assert fields["reason"] == "outage"
    assert f'value="{fields["until"]}"' in str(shown["until"])
    assert told(admin_client.post(address("pause"), fields)) == ["Nothing was changed."]
    admin_client.post(address("pause"), {**fields, "reason": "still down"})
    assert (state().until, state().reason) == (until, "still down"), "the end is kept to the second"
    assert address("hold") in page(admin_client)
    assert admin_client.get(address("hold")).context["form"]["reason"].value() == "still down"
    admin_client.post(address("pause"), {**fields, "until": ""})
    assert (state().stop, state().until) == ("paused", None)
    admin_client.post(address("hold"), FIELDS)
    assert (state().stop, PolicyChange.objects.latest("id").details["was"]) == ("held", "paused")


def test_a_policy_or_operation_that_is_none_leads_nowhere(admin_client: Client) -> None:
    for where in (address("pause", "no.such.policy"), address("explode")):
        assert admin_client.get(where).status_code == 404 == admin_client.post(where, FIELDS).status_code


@pytest.mark.django_db(transaction=True)
def test_moving_for_too_long_is_left_to_a_worker(
    admin_client: Client, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "time_limit", lambda: changes.time_limit(-1.0))
    answer = admin_client.post(address("delay"), FIELDS)
    assert "Deadlines are still being moved" in told(answer)[0]
    assert PolicyChange.objects.get().finished_at is None
    text = page(admin_client)
    assert "An earlier change is still moving deadlines" in text and address("pause") not in text
    assert LogEntry.objects.count() == 1
    assert operations.continue_moves("default") == 1
    assert PolicyChange.objects.get().finished_at is not None
    assert order.created_at and Timeout.objects.get().due_at == order.created_at + timedelta(minutes=45)


@pytest.mark.parametrize("state", ["pending", "dead"])
def test_policies_that_are_gone_but_have_rows_are_shown(admin_client: Client, order: Order, state: str) -> None:
    Timeout.objects.update(policy="gone.order.old")
    if state == "dead":
        Timeout.objects.update(state="dead", cause="retries", settled_at=timezone.now(), slot_taken=None)
    text = page(admin_client)
    assert "gone.order.old" in text and "No longer declared" in text
    assert address("pause", "gone.order.old") not in text


def test_changes_are_listed_for_who_may_see_them(staff: Staff) -> None:
    operations.pause(LABEL, by="cli:root", reason="<i>storm</i>")
    answer = staff("view_policychange").get(reverse("admin:django_delayq_policychange_changelist"))
    text = answer.content.decode()
    assert LABEL in text and "cli:root" in text and "&lt;i&gt;storm" in text
    assert staff().get(reverse("admin:django_delayq_policychange_changelist")).status_code == 403
    change = PolicyChange.objects.get()
    detail = reverse("admin:django_delayq_policychange_change", args=[change.pk])
    assert staff("view_policychange").post(detail, {"reason": "forged"}).status_code == 403


def test_all_changes_are_listed_however_many_there_are(admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelist, "WINDOW", 50)
    now = timezone.now()
    changes = [PolicyChange(policy=LABEL, what="paused", at=now, touched_at=now) for _ in range(120)]
    ids = [change.pk for change in PolicyChange.objects.bulk_create(changes)]
    address = reverse("admin:django_delayq_policychange_changelist")
    pages = [admin_client.get(address, {"p": page}).context["cl"].result_list for page in (1, 2)]
    assert [change.pk for page in pages for change in page] == ids[::-1]
    assert not admin_client.get(address, {"what__exact": "held"}).context["cl"].result_list


@pytest.mark.parametrize(
    ("delay", "words"),
    [
        (timedelta(0), "0 s"),
        (timedelta(minutes=30), "30 min"),
        (timedelta(hours=1, minutes=30), "1 h 30 min"),
        (timedelta(days=3), "3 d"),
        (timedelta(days=1, seconds=1), "1 d 1 s"),
        (timedelta(seconds=1.5), "1.5 s"),
        (timedelta(minutes=12, seconds=5), "12 min 5 s"),
        (timedelta(minutes=2, seconds=5), "2 min 5 s"),
    ],
)
def test_delays_in_words_say_all_of_it(delay: timedelta, words: str) -> None:
    assert length_label(delay) == words


def test_the_chart_shows_small_numbers_beside_large_ones_and_says_when_there_are_more() -> None:
    counts = [Count(1), Count(10_000, True), Count(0), *[Count(5)] * 21]
    drawn = chart([str(hour) for hour in range(24)], {"due": ("due", counts), "none": ("none", [Count()] * 24)})
    assert [bar["parts"][0]["height"] for bar in drawn["bars"][:4]] == ["1.0", "96.0", "0.0", "1.0"]
    assert (drawn["highest"], drawn["total"]) == ("10000+", "10106+")
    assert [(kind["kind"], kind["total"]) for kind in drawn["kinds"]] == [("due", "10106+"), ("none", "0")]
    assert sum(bar["is_labelled"] for bar in drawn["bars"]) == 4


PAGES = {"first page": reverse_lazy("admin:app_list", args=["django_delayq"]), "policies": reverse_lazy(LIST)}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_few_queries_however_many_policies_and_timeouts_there_are(
    admin_client: Client, declare: Any, name: str
) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as made:
            assert admin_client.get(PAGES[name]).status_code == 200
        return len(made)

    dq.schedule_timeout(Order.objects.create(), "remind", minutes=0)
    queries()
    few = queries()
    for number in range(25):
        dq.schedule_timeout(Order.objects.create(), declare(Order, name=f"more_{number}"), minutes=number)
    assert few == queries() <= 22


def test_the_first_page_shows_burning_policies_first_to_those_who_may_see_them(staff: Staff, order: Order) -> None:
    first, later = "testapp.order.remind", timezone.now() - timedelta(hours=1)
    dq.schedule_timeout(order, "remind", minutes=5)
    Timeout.objects.filter(policy=first).update(due_at=later, run_at=later, created_at=later)
    for permissions, is_shown in (((), False), (("view_timeout",), True), (("view_policycontrol",), True)):
        answer = staff("view_policychange", *permissions).get(PAGES["first page"])
        assert ("data-delayq-refresh" in answer.content.decode()) is is_shown
        if is_shown:
            top = answer.context["shown"]["policies"][0]
            assert (top["status"].label, top["status"].urgency, top["waited_seconds"]) == (first, "overdue", "1 h")
            assert bool(top["numbers"][0]["address"]) is ("view_timeout" in permissions)


def test_the_plot_shows_what_has_ended_in_each_of_the_last_24_hours(admin_client: Client) -> None:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    for ago, state, cause, late in (
        (0, "fired", "due", 0),
        (1, "fired", "due", 90),
        (1, "dead", "retries", 0),
        (30, "fired", "due", 0),
    ):
        row = dq.schedule_timeout(Order.objects.create(), "remind", minutes=5)
        at = hour - timedelta(hours=ago)
        due_at = at - timedelta(seconds=late)
        values = {"due_at": due_at, "run_at": due_at, "created_at": due_at, "settled_at": at, "slot_taken": None}
        Timeout.objects.filter(pk=row.pk).update(state=state, cause=cause, **values)
    plot = admin_client.get(PAGES["first page"]).context["shown"]["plot"]
    assert [(kind["kind"], kind["total"]) for kind in plot["kinds"]] == [
        ("in_time", "0"), ("fired", "1"), ("late", "1"), ("dead", "1"),
    ]  # fmt: skip
    assert [[part["n"] for part in bar["parts"]] for bar in plot["bars"][-2:]] == [
        ["0", "0", "1", "1"],
        ["0", "1", "0", "0"],
    ]
