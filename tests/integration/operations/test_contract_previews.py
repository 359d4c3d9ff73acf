"""Each confirmation names how many timeouts change, how many fire at once, the first of them, and nothing else."""

from __future__ import annotations

import html
import io
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from django.utils.html import strip_tags
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq import Brake, operations
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations.previews import DEADLINES_CHANGE
from django_delayq.operations.registry import OPERATIONS, TIMEOUT_OPERATIONS, Operation
from tests.integration.operations import test_contract as contract
from tests.integration.operations.conftest import BY, as_if
from tests.integration.operations.names import HOUR, MINUTE, Declare
from tests.integration.operations.test_contract import (
    GOOD,
    address_in_admin,
    command_of,
    each_operation,
    entered,
    target_of,
)
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("admin_and_rest")]
ready = contract.ready

POLICY = "testapp.order.braked"
OPERATE = "admin:django_delayq_policycontrol_operate"
DUE = "25 are due and fire now. The first: A-00, A-01, A-02."
AGAIN = "The brake of testapp.order.braked allows 20 in 10 min: it will stop it again. Change it first."


def due_now() -> int:
    return Timeout.objects.filter(state="pending", run_at__lte=timezone.now()).count()


def words(client: Client, address: str, sent: Any = None) -> str:
    answer: Any = client.get(address) if sent is None else client.post(address, sent)
    assert answer.status_code == 200
    return " ".join(html.unescape(strip_tags(answer.content.decode().replace("<li", " <li"))).split())


def address_of(operation: Operation) -> str:
    """Return the address of its confirmation."""
    has_ids = operation.name in TIMEOUT_OPERATIONS and not operation.has_preview
    return address_in_admin(operation) + (f"?ids={target_of(operation).pk}" if has_ids else "")


def dry_run(*command: str) -> str:
    call_command(*command, "--dry-run", stdout=(out := io.StringIO()))
    return " ".join(out.getvalue().split())


@each_operation
@pytest.mark.usefixtures("ready")
def test_each_edge_shows_what_then_happens(operation: Operation, admin_client: Client) -> None:
    values = GOOD[operation.name][-1]
    rows, target, address = list(Timeout.objects.values("pk", "due_at")), target_of(operation), address_of(operation)
    preview, before = operation.preview(target, **values), due_now()
    asked = preview if operation.has_preview else operation.preview(target)  # before the values are known
    sent = entered(operation, values) if operation.has_preview else None
    assert preview.sentences() and " ".join(asked.sentences()) in words(admin_client, address, sent)
    assert " ".join(preview.sentences()) in dry_run(*command_of(operation, values))
    operation.call(target, by=BY, **values)
    if operation.name in TIMEOUT_OPERATIONS:
        assert preview.changed.value == 1 and preview.names()
    elif preview.will is DEADLINES_CHANGE:
        moved = [row for row in rows if Timeout.objects.get(pk=row["pk"]).due_at != row["due_at"]]
        assert preview.changed.value == len(moved)
    assert (preview.due.value if preview.due else 0) == due_now() - (before if not preview.due else 0)


@pytest.fixture
def braked(declare: Declare) -> None:
    """Twenty-five due timeouts of a policy that its brake has paused, which allows twenty in ten minutes."""
    brake = Brake(20, per=10 * MINUTE)
    policy = declare(Order, name="braked", since="created_at", after=MINUTE, search="note", brake=brake)
    for number in range(25):
        order, at = Order.objects.create(status="new", note=f"A-{number:02}"), timezone.now() - HOUR
        as_if(dq.schedule_timeout(order, policy, minutes=1), "pending", due_at=at, run_at=at)
    operations.pause(policy, by="brake", reason="21 timeouts fired within 10 min; the brake allows 20.")


@pytest.mark.usefixtures("braked")
def test_resuming_after_a_brake_says_what_fires_and_that_it_will_stop_again(admin_client: Client) -> None:
    address, brake = (reverse(OPERATE, args=[POLICY, name]) for name in ("resume", "brake"))
    page, text = admin_client.get(address).content.decode(), words(admin_client, address)
    assert f"{DUE} {AGAIN}" in text and "hold" not in text
    assert f'href="{brake}"' in page
    line = dry_run("delayq_resume", POLICY)
    assert f"{DUE} {AGAIN}" in line and ".;" not in line
    shown = APIClient()
    shown.force_login(User.objects.get())
    preview = shown.get(f"/api/policies/{POLICY}/").data["preview"]
    assert preview == {"due": 25, "text": f"{DUE} {AGAIN}"}
    operations.resume(POLICY, by=BY)
    assert shown.get(f"/api/policies/{POLICY}/").data["preview"] is None


@pytest.mark.usefixtures("braked")
def test_what_a_hold_or_a_limit_of_lateness_keeps_from_firing_is_not_said_to_fire(declare: Any) -> None:
    PolicyControl.objects.update(stop="held", stopped_at=timezone.now() - 2 * HOUR)
    Timeout.objects.update(created_at=timezone.now() - 3 * HOUR, restarted_at=None)
    resume = OPERATIONS["resume"]
    assert resume.preview(POLICY).sentences() == [
        "25 deadlines will change.", "None is due now.", "If deadlines are not moved, 25 fire.",
    ]  # fmt: skip
    assert resume.preview(POLICY, shift=False).due == (25, False)
    PolicyControl.objects.update(stop="paused")
    operations.late(POLICY, after=HOUR / 2, by=BY)
    assert resume.preview(POLICY).sentences() == ["None is due now.", "25 are too late, and become: skipped"]
