"""Timeouts are found by what people know: a number that a policy names, and a customer."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection, models
from django.test import Client
from django.test.utils import CaptureQueriesContext, isolate_apps
from django.urls import reverse

import django_delayq as dq
from django_delayq import checks
from django_delayq.models import Timeout
from django_delayq.operations import selection
from django_delayq.policy.reads import unindexed
from tests.integration.operations.names import Declare
from tests.testapp import keys
from tests.testapp.models import Customer, ExpressOrder, Order, Parcel

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("admin_and_rest")]
LIST = "admin:django_delayq_timeout_changelist"


@pytest.fixture(autouse=True)
def policies(declare: Declare) -> None:
    declare(Order, name="by_note", search="note", owner="customer")
    declare(Order, name="by_id", search=("note", "id"))
    declare(Parcel, name="by_uuid", search="id")


def row(note: str = "", customer: Customer | None = None, policy: str = "remind", model: Any = Order) -> Timeout:
    return dq.schedule_timeout(model.objects.create(status="new", note=note, customer=customer), policy, hours=1)


def found(text: str) -> list[int]:
    return selection.find_ids(Timeout.objects.using("default"), text)


def listed(client: Client, **query: str) -> list[int]:
    answer = client.get(f"{reverse(LIST)}?{urlencode(query)}")
    assert answer.status_code == 200
    return [found.pk for found in answer.context["cl"].result_list]


def staff(*codenames: str) -> Client:
    client, user = Client(), User.objects.create_user(f"staff{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client.force_login(user)
    return client


def test_a_number_finds_all_timeouts_of_its_object_and_no_others(admin_client: Client) -> None:
    first, other, child = row("N-1"), row("N-12"), row("N-2", model=ExpressOrder)
    second = dq.schedule_timeout(Order.objects.get(note="N-1"), "linger", hours=1)
    assert found("N-1") == [second.pk, first.pk]
    assert (found("N-12"), found("N-2")) == ([other.pk], [child.pk])
    for text in ("", "N", "N-1\0", "9" * 30, "-1", "1.5", "x" * 5000, "😀", "%", "' OR 1=1"):
        assert found(text) == [], text
    page = admin_client.get(reverse(LIST)).content.decode()
    assert "key or webhook message message id, order note, order ID, parcel id." in page


def test_a_search_is_bounded_and_a_command_refuses_what_may_be_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_OBJECTS", 3)
    rows = [row("same").pk for _ in range(5)]
    found("warm")
    with CaptureQueriesContext(connection) as captured:
        assert len(found("same")) == 3 and set(found("same")) <= set(rows)
    assert len(captured) <= 2 * 12
    assert all("LIMIT" in query["sql"] for query in captured if "testapp_order" in query["sql"])
    monkeypatch.setattr("django_delayq.management.options.MAX_HITS", 2)
    with pytest.raises(CommandError, match="add --policy"):
        call_command("delayq_cancel", search="same")
    assert not Timeout.objects.filter(state="cancelled").exists()


def test_a_search_needs_the_permission_to_view_the_model_whose_field_it_compares(declare: Declare) -> None:
    declare(Order, name="by_customer", search=("customer__name", "note"))
    mine = row("N-14", Customer.objects.create(name="Ada"))
    api = reverse("django_delayq:timeout-list")
    for codenames in ((), ("view_order",), ("view_customer",), ("change_order", "view_customer")):
        client, models = staff("view_timeout", *codenames), {name.partition("_")[2] for name in codenames}
        for text, model, name in (("Ada", "customer", "customer name"), ("N-14", "order", "order note")):
            ids = [mine.pk] if model in models else []
            assert listed(client, q=text) == ids, (codenames, text)
            assert [each["id"] for each in client.get(api, {"search": text}).json()["results"]] == ids
            assert (name in client.get(reverse(LIST)).context["cl"].search_help_text) == bool(ids)
        assert listed(client, q=mine.object_id) == [mine.pk], "the ledger itself has the id"
    assert found("Ada") == found("N-14") == [mine.pk]  # of the commands


def test_one_page_shows_the_timeouts_of_a_customer_across_models_and_other_pages_link_to_it(
    declare: Declare, admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MAX_OBJECTS", 2)  # it shows all, however many
    declare(Customer, name="greet")
    ada, ben = Customer.objects.create(name="Ada"), Customer.objects.create(name="Ben")
    mine = [row("N-7", ada), row("N-8", ada), row("N-9", ada), dq.schedule_timeout(ada, "greet", hours=1)]
    alone, reference = row("N-10"), f"testapp.customer:{ada.pk}"
    row("N-11", ben)
    assert listed(admin_client, related=reference) == [each.pk for each in reversed(mine)]
    answer = admin_client.get(f"{reverse(LIST)}?related={reference}")
    assert f"<h1>Timeouts of customer {ada.pk}</h1>" in answer.content.decode()
    assert listed(admin_client, related="testapp.order:1000000000") == []

    def page_of(timeout: Timeout, client: Client = admin_client) -> str:
        return client.get(reverse("admin:django_delayq_timeout_change", args=[timeout.pk])).content.decode()

    assert f'?object=testapp.order%3A{mine[0].object_id}">All timeouts of this object</a>' in page_of(mine[0])
    assert f'?related=testapp.customer%3A{ada.pk}">All timeouts of customer {ada.pk}</a>' in page_of(mine[0])
    assert "?object=" in page_of(alone) and "?related=" not in page_of(alone)
    for codename, status in (("view_order", 403), ("view_customer", 200), ("change_customer", 200)):
        client = staff("view_timeout", codename)
        assert ("?related=" in page_of(mine[0], client)) == (status == 200)
        assert client.get(f"{reverse(LIST)}?related={reference}").status_code == status
    assert staff("view_customer").get(f"{reverse(LIST)}?related={reference}").status_code == 403


def test_an_owner_is_known_by_its_child_model_too(declare: Declare, admin_client: Client) -> None:
    declare(keys.Holder, name="hold", owner="child")
    owners = [keys.OwnGrandchild.objects.create(id=n, number=n + 1, code=str(n + 2)) for n in (1, 2, 3)]
    held = [keys.Holder.objects.create(child=owner.ownchild_ptr) for owner in owners]
    row = [dq.schedule_timeout(each, "hold", hours=1) for each in held][1]
    assert listed(admin_client, related=f"testapp.owngrandchild:{owners[1].pk}") == [row.pk]
    assert listed(admin_client, related="testapp.owngrandchild:99") == []


STRINGS = "is not a field of strings"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"search": "noet"}, f"search='noet' {STRINGS}, integers or UUIDs of Order. Did you mean 'note'?"),
        ({"search": "created_at"}, f"{STRINGS}, integers or UUIDs of Order. It has: "),
        ({"search": (1,)}, f"search=1 {STRINGS}"),
        ({"owner": "custmer"}, "owner='custmer' is not a path of foreign keys of Order. Did you mean 'customer'?"),
        ({"owner": 1}, "owner=1 is not a path of foreign keys"),
    ],
)
def test_a_wrong_field_is_refused_with_what_was_meant(declare: Declare, options: dict[str, Any], says: str) -> None:
    with pytest.raises(dq.PolicyError) as caught:
        declare(Order, name="wrong", **options)
    assert says in str(caught.value)


@isolate_apps("tests.testapp")
def test_a_field_without_an_index_is_warned_of() -> None:
    class Numbered(models.Model):
        indexed = models.CharField(max_length=9, db_index=True)
        first = models.IntegerField()
        second = models.IntegerField()
        constrained = models.IntegerField()
        partial = models.IntegerField()
        bare = models.CharField(max_length=9)
        other = models.ForeignKey("self", null=True, on_delete=models.CASCADE)

        class Meta:
            app_label = "testapp"
            indexes = [
                models.Index(fields=["-first", "second"], name="both"),
                models.Index(fields=["partial"], name="some", condition=models.Q(partial__gt=0)),
            ]
            constraints = [models.UniqueConstraint(fields=["constrained", "second"], name="once")]

    names = ("id", "indexed", "first", "second", "constrained", "partial", "bare", "other__bare")
    policy = dq.TimeoutPolicy(model=Numbered, name="x", handler=lambda obj, timeout: None, search=names)
    assert unindexed(policy) == ["second", "partial", "bare", "other__bare"]
    found = [message.msg for message in checks.check_policies() if message.id == "django_delayq.W016"]
    assert any("testapp.order.by_note names note, which has no index" in each for each in found)
