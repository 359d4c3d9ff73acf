"""Every word on the admin's pages can be translated: each page is read in a pseudo-language."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import path, reverse
from django.utils import timezone, translation

import django_delayq as dq
from django_delayq import operations
from django_delayq.admin import TimeoutAdmin, TimeoutAdminMixin, TimeoutInline
from django_delayq.admin.pages import PolicyChangeAdmin, PolicyControlAdmin
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations.registry import POLICY_OPERATIONS
from django_delayq.rounds.memory import BRAKED, SINCE_CHANGED
from django_delayq.scheduling.story import EVENT_LABELS
from tests.integration.admin.conftest import DETAIL, LIST, OPERATION
from tests.pseudo import english_in, speak_it, words_of
from tests.testapp.models import Order
from tests.testapp.timeouts import remind

pytestmark = [pytest.mark.slow, pytest.mark.django_db, pytest.mark.urls(__name__)]
POLICIES = "admin:django_delayq_policycontrol_changelist"
OPERATE = "admin:django_delayq_policycontrol_operate"
REPORT = "admin:django_delayq_policycontrol_report"
REMIND, UNPAID = "testapp.order.remind", "testapp.order.cancel_unpaid"
VERBS = ("cancel", "fire", "postpone", "retry")
ON = {"setting": "on", "most": "5", "share": "5"}
NUMBERS = BRAKED.format(count=51, per="10 min", most=50)
FAR = "2500-01-01T00:00"
DATA = (
    r"tests\.testapp\.timeouts\.\w+",  # handlers
    r"\b[Tt]estapp(\.\w+)*",  # the project's app, its models, and labels
    r"\b(gone\.model\.)?(cancel_unpaid|remind(_guarded)?|send_outside|forgotten)\b|\bgone\.model\b",
    r"(created|sent|issued)_at|status = \"\w+\"",  # what policies count from, and their conditions
    r"(?i)\b(express )?orders?( object)?\b",  # what the project calls its models
    r"\bdefault\b",  # a queue
    r"(admin:)?\b(STAFF|ALICE)\b",
    r"\b(django_delayq\.contrib\.webhooks|delayq_webhooks)(\.\w+)*|\bdelivered_at is None",  # of a policy as any other
    r"America/Sao_Paulo",
    r"(?m)^\s*Status:?\s*$",  # a field of the project's
    r"\b[0-9a-f]{32}\b",  # an idempotency key
    r"\bValueError\b",
    r"manage\.py \w+",
    r"\{(span|n)\}",  # the script puts it in
    r"\b10 min\b",  # a duration in a stored reason
    r"(?m)^\s*I[dD]\s*$",  # the head of the column of ids, as Django has it in every language
)
"""What is the project's own, and is shown as it is."""

site = admin.AdminSite(name="admin")


class OrderAdmin(TimeoutAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("status",)
    readonly_fields = ("status",)
    inlines = (TimeoutInline,)


site.register(Timeout, TimeoutAdmin)
site.register(PolicyControl, PolicyControlAdmin)
site.register(PolicyChange, PolicyChangeAdmin)
site.register(Order, OrderAdmin)
urlpatterns = [path("admin/", site.urls)]


def row_in(state: str, cause: str = "", **columns: Any) -> Timeout:
    """The row of an order of its own, in this state."""
    order = Order.objects.create(status="#")
    row = dq.schedule_timeout(order, "remind", minutes=5)
    if state != "pending":
        columns["slot_taken"] = None
    if state not in {"pending", "firing"}:
        columns["settled_at"] = timezone.now()
    Timeout.objects.filter(pk=row.pk).update(state=state, cause=cause, **columns)
    found: Timeout = Timeout.objects.get(pk=row.pk)
    return found


def history() -> list[dict[str, Any]]:
    """One event of each kind, by everybody who does something, and whatever reason the library gives."""
    now = timezone.now().isoformat()
    told: list[dict[str, Any]] = [{"at": now, "what": what, "to": now} for what in EVENT_LABELS]
    told += [{"at": now, "what": "extended", "by": by} for by in ("hand", "save", "admin:ALICE")]
    told += [{"at": now, "what": "rescheduled", "reason": reason} for reason in (SINCE_CHANGED, NUMBERS)]
    failed = {"at": now, "what": "failed", "error": "ValueError", "message": "#", "traceback": "#"}
    return [*told, failed, failed]


@pytest.fixture
def rows() -> list[Timeout]:
    """Rows in each state: the first with a full history, the last of a policy and a model that no longer exist."""
    ago, soon = timezone.now() - timedelta(days=2), timezone.now() + timedelta(minutes=20)
    return [
        row_in("cancelled", "superseded", reason=SINCE_CHANGED, history=history(), payload={}, attempts=2, due_at=ago),
        row_in("fired", "due", due_at=ago),
        row_in("skipped", "condition"),
        row_in("dead", "retries"),
        row_in("firing"),
        row_in("pending", run_at=ago, due_at=ago),
        row_in("pending", run_at=soon, attempts=3),
        row_in("pending", due_at=soon + timedelta(days=40), content_type_id=99999, policy="gone.model.forgotten"),
    ]


@pytest.fixture
def visitor(rows: list[Timeout]) -> Client:
    """Who may do everything."""
    user = User.objects.create_user("STAFF", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(content_type__app_label__in=["django_delayq", "testapp"]))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def nobodys_language(visitor: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    speak_it(monkeypatch)


def left_in_english(answer: Any) -> list[str]:
    """The words that were not translated, on the page or in the messages of who was sent elsewhere."""
    if answer.status_code == 302:
        told = [str(message) for message in get_messages(answer.wsgi_request)]
        assert told
        return english_in("\n".join(told), DATA)
    assert answer.status_code == 200
    own = answer.content.replace(b'alt="Search"', b"")  # Django's own, which it does not translate
    return english_in(words_of(own), DATA)


def addresses(rows: list[Timeout]) -> list[str]:
    listed, ids = reverse(LIST), ",".join(str(row.pk) for row in rows)
    filters = ("", "?due=overdue", f"?policy={REMIND}", "?q=1", "?state__exact=fired", "?due_at__year=2020")
    return [
        *(f"{listed}{asked}" for asked in filters),
        *(reverse(DETAIL, args=[row.pk]) for row in rows),
        *(f"{reverse(OPERATION, args=[verb])}?ids={ids}" for verb in VERBS),
        *(reverse(OPERATE, args=[UNPAID, name]) for name in POLICY_OPERATIONS),
        reverse(POLICIES),
        *(f"{reverse(REPORT, args=[REMIND])}?{asked}" for asked in ("", "by=month", "by=field", "by=field&field=x")),
        *(f"{reverse(f'{OPERATE}_selected', args=[name])}?all=1" for name in ("pause", "hold", "resume")),
        reverse("admin:django_delayq_policychange_changelist"),
        reverse("admin:testapp_order_changelist"),
        reverse("admin:testapp_order_change", args=[rows[0].object_id]),
    ]


@pytest.mark.usefixtures("nobodys_language")
def test_every_page_asks_for_a_translation_of_every_word(visitor: Client, rows: list[Timeout], declare: Any) -> None:
    operations.pause(REMIND, by="admin:ALICE", until=timezone.now() + timedelta(hours=5))
    operations.hold(UNPAID, by="admin:ALICE")
    operations.pause("testapp.order.send_outside", by="brake", reason=NUMBERS)
    operations.late(UNPAID, after=timedelta(hours=1), by="admin:ALICE")
    operations.brake(UNPAID, most=5, per=timedelta(hours=1), by="admin:ALICE")
    operations.shadow(UNPAID, share=5, by="admin:ALICE")
    operations.shadow(REMIND, share=0, by="admin:ALICE")
    limits = dq.Limits(run=timedelta(minutes=1), rate=dq.Rate(5), snoozes=5)
    declare(
        Order,
        name="remind_guarded",
        late=dq.Late(timedelta(hours=1), "fire"),
        shadow=True,
        limits=limits,
        handler=remind.handler,
    )
    found = {address: left_in_english(visitor.get(address)) for address in addresses(rows)}
    assert {address: words for address, words in found.items() if words} == {}


def test_where_nothing_is_translated_the_words_are_found(visitor: Client, rows: list[Timeout]) -> None:
    (told_in_full, *_) = rows
    for address in (reverse(LIST), reverse(DETAIL, args=[told_in_full.pk]), reverse(POLICIES)):
        words = left_in_english(visitor.get(address))
        assert {"Home", "Timeouts"} <= set(words)
        assert "remind" not in words


@pytest.mark.usefixtures("nobodys_language")
def test_every_refusal_of_a_form_asks_for_a_translation(visitor: Client, rows: list[Timeout]) -> None:
    operation, ids = reverse(OPERATION, args=["postpone"]), ",".join(str(row.pk) for row in rows)
    forms: list[dict[str, Any]] = [{}, {"at": FAR}, {"at": "#"}, {"at": "2020-01-01T00:00"}, {"amount": "0"}]
    asked = [(operation, {**form, "ids": ids}) for form in forms]
    operations.hold(UNPAID, by="admin:ALICE")
    asked += [(reverse(OPERATE, args=[REMIND, "pause"]), {"until": until}) for until in (FAR, "2020-01-01T00:00", "#")]
    asked += [(reverse(OPERATE, args=[UNPAID, "pause"]), {})]
    wrong: list[dict[str, Any]] = [{}, {"amount": "1", "declared": "on"}, {"amount": "100000", "unit": "days"}]
    asked += [(reverse(OPERATE, args=[UNPAID, "delay"]), {"mode": "keep", **form}) for form in wrong]
    asked += [(reverse(OPERATE, args=[REMIND, "delay"]), {"mode": "shift", "amount": "1"})]
    guards: list[dict[str, Any]] = [{}, {"setting": "on"}, {"setting": "on", "most": "0", "amount": "1e9"}]
    asked += [(reverse(OPERATE, args=[REMIND, name]), form) for name in ("late", "brake", "shadow") for form in guards]
    found = {}
    for address, form in asked:
        answer = visitor.post(address, {"reason": "#", "confirmed": "yes", **form})
        assert answer.status_code == 200 and b"errorlist" in answer.content, (address, form)
        found[address, str(form)] = left_in_english(answer)
    assert {form: words for form, words in found.items() if words} == {}


@pytest.mark.usefixtures("nobodys_language")
def test_every_answer_to_a_deed_asks_for_a_translation(visitor: Client, rows: list[Timeout]) -> None:
    ids = ",".join(str(row.pk) for row in rows)
    deeds = [(reverse(OPERATION, args=[verb]), {"ids": f"{ids},99999", "amount": "1"}) for verb in VERBS]
    operated = [("pause", ""), ("resume", ""), ("resume", "")]
    operated += [(name, "45") for name in ("late", "brake", "shadow", "shadow", "delay")]
    deeds += [(reverse(OPERATE, args=[UNPAID, name]), {**ON, "amount": n, "mode": "recompute"}) for name, n in operated]
    found = {}
    for place, (address, form) in enumerate(deeds):
        answer = visitor.post(address, {"reason": "#", "confirmed": "yes", "unit": "minutes", **form})
        assert answer.status_code == 302, (address, form)
        found[place, address] = left_in_english(answer)
    assert {deed: words for deed, words in found.items() if words} == {}
    logged = visitor.get(reverse("admin:django_delayq_timeout_history", args=[rows[-1].pk]))
    assert left_in_english(logged) == []


@pytest.mark.usefixtures("nobodys_language")
def test_a_story_asks_for_a_translation_from_its_title_on(rows: list[Timeout]) -> None:
    order = Order.objects.create(status="unpaid", created_at=timezone.now())
    Order.objects.filter(pk=order.pk).update(created_at=timezone.now() + timedelta(hours=1))
    dq.sync_timeouts(order)
    told = [dq.explain_timeout(order, "cancel_unpaid"), *(dq.explain_timeout(row) for row in rows)]
    assert len(told[0]) == 2  # scheduled, and moved by a save, for a reason that the library gave
    assert [english_in(str(story), DATA) for story in told] == [[]] * len(told)


def test_what_operators_do_is_logged_in_english_whatever_language_they_read(
    caplog: pytest.LogCaptureFixture, django_capture_on_commit_callbacks: Callable[..., Any]
) -> None:
    with (
        caplog.at_level(logging.INFO, "django_delayq.operations"),
        translation.override("de"),
        django_capture_on_commit_callbacks(execute=True),
    ):
        operations.hold(REMIND, by="admin:ALICE", reason="storm")
    assert f"{REMIND} by admin:ALICE: held storm" in caplog.messages
