"""Timeouts are selected by any object to which policies lead, and by columns of their objects: all of them.

And people see which deadlines their policy has computed, with which values, and which were set by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.db.models import F, Q
from django.test.utils import CaptureQueriesContext
from django.urls import include, path
from rest_framework.test import APIClient

import django_delayq as dq
from django_delayq import Wall, Working, explain_timeout, operations, pending_timeouts
from django_delayq.models import Timeout
from django_delayq.operations import related_timeouts, selection
from django_delayq.policy.policies import registry
from django_delayq.policy.reads import related_paths
from tests.integration.arming.test_paths import ALWAYS
from tests.support.purchases import MINUTE, UNPAID, Declare, bought, its_channel, noon  # noqa: F401 - fixtures
from tests.testapp.market import Channel, Merchant, Purchase

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]
urlpatterns = [path("", include("tests.urls")), path("", include("tests.integration.contrib.rest.urls"))]
LABEL = "testapp.purchase.pay"


def staff(*permissions: str) -> User:
    user = User.objects.create_user(f"staff{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=("view_timeout", *permissions)))
    return user


def ids(rows: Any) -> list[int]:
    return sorted(int(row.object_id) for row in rows)


def listed(user: User, **query: Any) -> Any:
    client = APIClient()
    client.force_login(user)
    answer = client.get("/api/timeouts/", query)
    if answer.status_code != 200:
        return answer.status_code, answer.json()
    return sorted(int(row["object"]["id"]) for row in answer.json()["results"])


@pytest.fixture
def market(declare: Declare) -> list[Purchase]:
    """Four purchases: two of one merchant, over two channels, one of another, and one of none."""
    declare(Purchase, name="pay", after="channel__pay_within", **UNPAID)
    by_merchant = Q(status="unpaid", channel__merchant__name="x")
    declare(Purchase, name="warn", after=MINUTE, since="created_at", when=by_merchant)
    merchants = [Merchant.objects.create(name="x") for _ in range(2)]
    channels = [Channel.objects.create(merchant=merchants[n], pay_within=30 * MINUTE) for n in (0, 0, 1)]
    return [*(bought(channel=channel) for channel in channels), bought()]


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({"owner": "channel__merchant"}, ("channel", "channel__merchant")),
        ({"after": Wall(days=1, at="12:00", zone="channel__merchant__zone")}, ("channel", "channel__merchant")),
        ({"when": ~Q(Q(first__status="paid") | Q(channel__in=[1]))}, ("first", "channel")),
        ({"when": Q(channel_id=1, first__isnull=True)}, ("channel", "first")),
        ({"hold_when": Q(first__grace=F("channel__pay_within"))}, ("first", "channel")),
        ({"when": Q(payments__status="new", labels__name="x", status="unpaid")}, ()),
        ({"since": lambda obj: None, "after": lambda obj: None}, ()),
    ],
)
def test_a_policy_leads_to_the_objects_on_all_its_paths(declare: Declare, options: Any, paths: tuple[str, ...]) -> None:
    given = {"after": MINUTE, "since": "created_at", "when": Q(status="unpaid"), **options}
    policy = declare(Purchase, name="leads", silenced_checks=("W001",), **given)
    assert related_paths(policy) == paths


def test_all_timeouts_of_a_merchant_and_of_a_channel(market: list[Purchase]) -> None:
    first, second, other, none = (purchase.pk for purchase in market)
    assert market[0].channel is not None and market[0].channel.merchant is not None
    channel, merchant = market[0].channel, market[0].channel.merchant
    for obj, pks in ((merchant, [first, second]), (channel, [first])):
        assert ids(related_timeouts(obj)) == sorted(pks * 2)
        reference = f"{obj._meta.label_lower}:{obj.pk}"
        assert listed(staff("view_merchant", "view_channel"), related=reference) == sorted(pks * 2)
    call_command("delayq_cancel", f"--related=testapp.merchant:{merchant.pk}", "--policy", LABEL)
    assert ids(pending_timeouts(Purchase, "pay")) == [other]
    assert ids(pending_timeouts(Purchase, "warn")) == [first, second, other]
    assert none not in ids(Timeout.objects.all())


def test_where_selects_by_columns_over_foreign_keys(market: list[Purchase]) -> None:
    assert market[0].channel is not None
    channel = market[0].channel
    boss = User.objects.create_superuser("boss")
    expected = {
        f"channel={channel.pk}": [market[0].pk],
        f"channel__merchant_id={channel.merchant_id}": [market[0].pk, market[1].pk],
        "channel__merchant__name=x": [purchase.pk for purchase in market[:3]],
        "status=paid": [],
    }
    for condition, pks in expected.items():
        rows = Timeout.objects.filter(selection.where(Purchase, [condition], "default"), policy=LABEL)
        assert ids(rows) == pks, condition
    both = ["status=unpaid", f"channel__merchant={channel.merchant_id}"]
    assert listed(boss, policy=LABEL, where=both) == [market[0].pk, market[1].pk]
    call_command("delayq_cancel", "--policy", LABEL, "--where", *both, f"channel={channel.pk}")
    assert ids(pending_timeouts(Purchase, "pay")) == [market[1].pk, market[2].pk]
    call_command("delayq_cancel", model="testapp.Purchase", where=[f"channel__merchant={channel.merchant_id}"])
    assert ids(pending_timeouts(Purchase)) == [market[2].pk] * 2


def test_rest_refuses_what_the_visitor_may_not_view(market: list[Purchase]) -> None:
    related, where = "testapp.merchant:1", "channel__merchant__name=x"
    assert listed(staff("view_purchase"), related=related)[0] == 403
    assert listed(staff("view_purchase"), policy=LABEL, where=where)[0] == 403
    assert listed(staff(), policy=LABEL, where="status=unpaid")[0] == 403
    assert listed(staff("view_purchase"), policy=LABEL, where="status=unpaid") == sorted(p.pk for p in market[:3])
    assert listed(staff("view_merchant"), policy=LABEL, where=where) == sorted(p.pk for p in market[:3])
    assert listed(staff("view_purchase"), where="status=unpaid")[0] == 400
    assert listed(staff("view_purchase"), related="testapp.merchant")[0] == 400


def test_very_many_objects_are_selected_by_a_subquery(market: list[Purchase], monkeypatch: pytest.MonkeyPatch) -> None:
    """A merchant may have 100,000: neither are some left out, nor is each key a parameter."""
    monkeypatch.setattr("django_delayq.operations.selection.MAX_OBJECTS", 2)
    monkeypatch.setattr("django_delayq.sql.statements.CHUNK", 3)
    monkeypatch.setattr("django_delayq.ledger.subjects.MAX_IDS", 2)
    assert market[0].channel is not None and market[0].channel.merchant is not None
    merchant = market[0].channel.merchant
    more = [bought(channel=market[0].channel) for _ in range(8)]
    every = sorted(purchase.pk for purchase in (*market[:2], *more))
    with CaptureQueriesContext(connection) as seen:
        rows = related_timeouts(merchant).filter(policy=LABEL)
        assert ids(rows) == every
    assert len(seen[-1]["sql"].split("SELECT")) > 2, "the keys are a subquery"
    found = Timeout.objects.filter(selection.where(Purchase, [f"channel__merchant={merchant.pk}"], "default"))
    assert ids(found) == sorted(every * 2)
    assert operations.cancel(rows, by="admin:alice").changed == len(every)
    assert ids(pending_timeouts(Purchase, "pay")) == [market[2].pk]
    queryset = Purchase.objects.filter(channel__merchant=merchant)
    assert operations.cancel(pending_timeouts(queryset, "warn"), by="admin:alice").changed == len(every)


BY_POLICY, BY_HAND = "Its deadline was computed by its policy", "Its deadline was set by hand"


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("channel__pay_within", f"{BY_POLICY} with channel__pay_within = 30 min."),
        (Working(hours="channel__hours", calendar=ALWAYS), f"{BY_POLICY} with channel__hours = 1.5."),
        (Working(hours=1, calendar=lambda obj: ALWAYS), f"{BY_POLICY}."),
        (5 * MINUTE, f"{BY_POLICY}."),
    ],
)
def test_a_story_says_how_it_was_computed(declare: Declare, channel: Channel, after: Any, words: str) -> None:
    Channel.objects.update(hours="1.5")
    declare(Purchase, name="pay", after=after, **UNPAID)
    obj = bought(channel=channel)
    story = explain_timeout(obj, "pay")
    assert story.deadline == words
    assert str(story).splitlines()[-2].strip() == words
    dq.extend_timeout(obj, "pay", minutes=5)
    assert explain_timeout(obj, "pay").deadline.startswith(BY_HAND)
    dq.cancel_timeout(obj, "pay")
    assert explain_timeout(obj, "pay").deadline == ""


def test_the_values_of_a_former_declaration_are_not_taken_for_those_of_the_present_one(declare: Declare) -> None:
    policy = declare(Purchase, name="pay", after="grace", **UNPAID)
    obj = bought(grace=20 * MINUTE)
    registry.remove(policy)
    declare(Purchase, name="pay", after="channel__pay_within", **UNPAID)
    assert explain_timeout(obj, "pay").deadline == f"{BY_POLICY}."
