"""Every word on the admin's pages can be translated: each is read in a pseudo-language, and some in a real one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import Timeout
from django_delayq.operations.registry import POLICY_OPERATIONS
from django_delayq.rounds.memory import BRAKED, SINCE_CHANGED
from django_delayq.scheduling.story import EVENT_LABELS
from tests.integration.admin.conftest import Staff
from tests.integration.admin.places import DETAIL, LIST, OPERATE, OPERATION, POLICIES, REMIND, SELECTED, UNPAID
from tests.pseudo import english_in, speak_it, words_of
from tests.support.typed import Patch
from tests.testapp.models import Order
from tests.testapp.timeouts import remind

pytestmark = [pytest.mark.slow, pytest.mark.django_db, pytest.mark.urls("tests.integration.admin.sites")]
REPORT = "admin:django_delayq_policycontrol_report"
VERBS = ("cancel", "fire", "postpone", "retry")
NUMBERS = BRAKED.format(count=51, per="10 min", most=50)
NAMES = "|".join(policy.label.rpartition(".")[2] for policy in dq.get_policies())
DATA = (
    r"tests\.testapp\.timeouts\.\w+",  # handlers
    r"\b[Tt]estapp(\.\w+)*",  # the project's app, its models, and labels
    rf"\b(gone\.model\.)?({NAMES}|remind_guarded|forgotten)\b|\bgone\.model\b",
    r"(created|sent|issued)_at|status = \"\w+\"",  # what policies count from, and their conditions
    r"(?i)\b(express )?orders?( object)?\b",  # what the project calls its models
    r"\bdefault\b",  # a queue
    r"(admin:)?\b(STAFF|ALICE)\b",
    r"\b(django_delayq\.contrib\.webhooks|delayq_webhooks)(\.\w+)*|\bdelivered_at is None",  # of a policy as any other
    r"America/Sao_Paulo",
    r"(?m)^\s*(Status|Note):?\s*$",  # fields of the project's
    r"\b[0-9a-f]{32}\b",  # an idempotency key
    r"\bValueError\b",
    r"manage\.py \w+",
    r"\{(span|n)\}",  # the script puts it in
    r"\b10 min\b",  # a duration in a stored reason
    r"(?m)^\s*I[dD]\s*$",  # the head of the column of ids, as Django has it in every language
)
"""What is the project's own, and is shown as it is."""


def row_in(state: str, cause: str = "", **columns: Any) -> Timeout:
    """The row of an order of its own, in this state."""
    row = dq.schedule_timeout(Order.objects.create(status="#"), "remind", minutes=5)
    settled = None if state in {"pending", "firing"} else timezone.now()
    slot = 1 if state == "pending" else None
    Timeout.objects.filter(pk=row.pk).update(state=state, cause=cause, settled_at=settled, slot_taken=slot, **columns)
    found: Timeout = Timeout.objects.get(pk=row.pk)
    return found


def history() -> list[dict[str, Any]]:
    """One event of each kind, by everybody who does something, and whatever reason the library gives."""
    events: list[dict[str, Any]] = [
        *({"what": what} for what in EVENT_LABELS),
        *({"what": "extended", "by": by} for by in ("hand", "save", "admin:ALICE")),
        *({"what": "rescheduled", "reason": reason} for reason in (SINCE_CHANGED, NUMBERS)),
        *[{"what": "failed", "error": "ValueError", "message": "#", "traceback": "#"}] * 2,
    ]
    now = timezone.now().isoformat()
    return [{"at": now, "to": now, **event} for event in events]


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
def visitor(rows: list[Timeout], staff: Staff) -> Client:
    """Who may do everything."""
    ours = Permission.objects.filter(content_type__app_label="django_delayq")
    client = staff("view_order", "change_order", *ours.values_list("codename", flat=True))
    User.objects.update(username="STAFF")
    return client


def left_in_english(answer: Any) -> list[str]:
    """The words on a page that were not translated."""
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
        *(f"{reverse(SELECTED, args=[name])}?all=1" for name in ("pause", "hold", "resume")),
        reverse("admin:django_delayq_policychange_changelist"),
        reverse("admin:testapp_order_changelist"),
        reverse("admin:testapp_order_change", args=[rows[0].object_id]),
    ]


def test_every_page_asks_for_a_translation_of_every_word(
    visitor: Client, rows: list[Timeout], declare: Any, monkeypatch: Patch
) -> None:
    speak_it(monkeypatch)
    operations.pause(REMIND, by="admin:ALICE", until=timezone.now() + timedelta(hours=5))
    operations.hold(UNPAID, by="admin:ALICE")
    operations.pause("testapp.order.send_outside", by="brake", reason=NUMBERS)
    operations.late(UNPAID, after=timedelta(hours=1), by="admin:ALICE")
    operations.brake(UNPAID, most=5, per=timedelta(hours=1), by="admin:ALICE")
    operations.shadow(UNPAID, share=5, by="admin:ALICE")
    operations.shadow(REMIND, share=0, by="admin:ALICE")
    limits = dq.Limits(run=timedelta(minutes=1), rate=dq.Rate(5), snoozes=5)
    guards = {"late": dq.Late(timedelta(hours=1), "fire"), "shadow": True, "limits": limits}
    declare(Order, name="remind_guarded", handler=remind.handler, **guards)
    found = {address: left_in_english(visitor.get(address)) for address in addresses(rows)}
    assert {address: left for address, left in found.items() if left} == {}


def test_where_nothing_is_translated_the_words_are_found(visitor: Client, rows: list[Timeout]) -> None:
    for address in (reverse(LIST), reverse(DETAIL, args=[rows[0].pk]), reverse(POLICIES)):
        found = left_in_english(visitor.get(address))
        assert {"Home", "Timeouts"} <= set(found) and "remind" not in found, (address, found)
