"""Timeouts are selected by any object to which policies lead, and by columns of their objects: all of them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import F, Q
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import include, path, reverse
from rest_framework.test import APIClient

from django_delayq import Wall, operations, pending_timeouts
from django_delayq.models import Timeout
from django_delayq.operations import related_timeouts, selection
from django_delayq.policy.reads import related_paths
from tests.integration.data.conftest import MINUTE, UNPAID, Declare, bought
from tests.testapp.market import Channel, Merchant, Purchase

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]
urlpatterns = [path("", include("tests.urls")), path("", include("tests.integration.rest.urls"))]
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
        ({"since": "channel__opens_at"}, ("channel",)),
        ({"after": "channel__pay_within"}, ("channel",)),
        ({"after": Wall(days=1, at="12:00", zone="channel__merchant__zone")}, ("channel", "channel__merchant")),
        ({"when": Q(channel__merchant__is_open=True)}, ("channel", "channel__merchant")),
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


def test_all_timeouts_of_a_merchant_and_a_channel_in_python_by_command_by_rest_and_in_the_admin(
    market: list[Purchase], admin_client: Client
) -> None:
    first, second, other, none = (purchase.pk for purchase in market)
    assert market[0].channel is not None and market[0].channel.merchant is not None
    channel, merchant = market[0].channel, market[0].channel.merchant
    for obj, pks in ((merchant, [first, second]), (channel, [first])):
        reference = f"{obj._meta.label_lower}:{obj.pk}"
        both = sorted(pks * 2)
        assert ids(related_timeouts(obj)) == both
        assert listed(staff("view_merchant", "view_channel"), related=reference) == both
        page = admin_client.get(reverse("admin:django_delayq_timeout_changelist"), {"related": reference})
        assert ids(page.context["cl"].result_list) == both
        seen = call_command("delayq_postpone", "--related", reference, "--by=1h", "--policy", LABEL, "--dry-run")
        assert seen is None
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
        f"channel_id={channel.pk}": [market[0].pk],
        f"channel__merchant={channel.merchant_id}": [market[0].pk, market[1].pk],
        f"channel__merchant_id={channel.merchant_id}": [market[0].pk, market[1].pk],
        "channel__merchant__name=x": [purchase.pk for purchase in market[:3]],
        "status=paid": [],
    }
    for condition, pks in expected.items():
        rows = Timeout.objects.filter(selection.where(Purchase, [condition], "default"), policy=LABEL)
        assert ids(rows) == pks, condition
        assert listed(boss, policy=LABEL, where=condition) == pks, condition
    both = ["status=unpaid", f"channel__merchant={channel.merchant_id}"]
    assert listed(boss, policy=LABEL, where=both) == [market[0].pk, market[1].pk]
    call_command("delayq_cancel", "--policy", LABEL, "--where", *both, f"channel={channel.pk}")
    assert ids(pending_timeouts(Purchase, "pay")) == [market[1].pk, market[2].pk]
    call_command("delayq_cancel", model="testapp.Purchase", where=[f"channel__merchant={channel.merchant_id}"])
    assert ids(pending_timeouts(Purchase)) == [market[2].pk] * 2


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("tenant=1", "testapp.Purchase has no column 'tenant'"),
        ("payments__status=new", "no column 'payments__status'"),
        ("channel__nothing=1", "no column 'channel__nothing'"),
        ("labels=1", "no column 'labels'"),
        ("status", "no column 'status'"),
        ("channel=x", "'x' is not a value of channel"),
        ("channel__pay_within=x", "'x' is not a value of channel__pay_within"),
        ("status=\0", "is not a value of status"),
    ],
)
def test_a_wrong_path_or_value_is_refused_everywhere(market: list[Purchase], condition: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("'", ".")):
        selection.where(Purchase, [condition], "default")
    status, said = listed(User.objects.create_superuser("boss"), policy=LABEL, where=condition)
    assert status == 400 and "where" in said
    with pytest.raises(CommandError):
        call_command("delayq_cancel", policy=LABEL, where=condition)
    assert pending_timeouts(Purchase, "pay").count() == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"where": ["status=unpaid"]}, "--where needs --model"),
        ({"related": "testapp.merchant"}, "is not an object"),
        ({"related": "testapp.merchant:x"}, "is not an object"),
        ({"related": "testapp.nothing:1"}, "There is no model"),
        ({"related": "testapp.label:1"}, "No policy leads to testapp.Label"),
    ],
)
def test_a_wrong_selection_by_command_is_refused(market: list[Purchase], options: Any, words: str) -> None:
    with pytest.raises(CommandError, match=words):
        call_command("delayq_cancel", **options)
    assert pending_timeouts(Purchase, "pay").count() == 3


def test_an_empty_list_of_conditions_selects_nothing(market: list[Purchase]) -> None:
    call_command("delayq_cancel", policy=LABEL, where=[])
    assert pending_timeouts(Purchase, "pay").count() == 3


def test_rest_refuses_what_the_visitor_may_not_view(market: list[Purchase]) -> None:
    related, where = "testapp.merchant:1", "channel__merchant__name=x"
    assert listed(staff("view_purchase"), related=related)[0] == 403
    assert listed(staff("view_purchase"), policy=LABEL, where=where)[0] == 403
    assert listed(staff(), policy=LABEL, where="status=unpaid")[0] == 403
    assert listed(staff("view_purchase"), policy=LABEL, where="status=unpaid") == sorted(p.pk for p in market[:3])
    assert listed(staff("view_merchant"), policy=LABEL, where=where) == sorted(p.pk for p in market[:3])
    assert listed(staff("view_purchase"), where="status=unpaid")[0] == 400
    assert listed(staff("view_purchase"), related="testapp.merchant")[0] == 400


def test_more_objects_than_a_list_may_have_are_selected_by_a_subquery(
    market: list[Purchase], monkeypatch: pytest.MonkeyPatch
) -> None:
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
