"""Timeouts are found by what people know: a number that a policy names, and a customer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection, models
from django.db.models import F, Q
from django.test import Client
from django.test.utils import CaptureQueriesContext, isolate_apps
from django.urls import reverse
from django.utils import timezone

import django_delayq as dq
from django_delayq import Wall, checks, clock, operations, pending_timeouts
from django_delayq.contrib.rest_framework.inputs import Selection
from django_delayq.management.options import SELECTING
from django_delayq.models import Timeout
from django_delayq.operations import related_timeouts, selection
from django_delayq.operations.selection import CONDITIONS
from django_delayq.policy.reads import related_paths, unindexed
from tests.integration.operations.conftest import as_if, pending
from tests.integration.operations.names import HOUR, MINUTE, Declare
from tests.support.purchases import UNPAID, at, bought
from tests.testapp import keys
from tests.testapp.market import Channel, Merchant, Purchase
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


# A parameter of a selection means the same by command, by REST and in the admin. The tests go through every parameter
# and every edge that offers it, so that a new one is tested when it is declared and has an example here.

ALONE, LINGER = "testapp.order.alone", "testapp.order.linger"
EVERY_STATE = list(Timeout.State.values)
Rows = dict[str, Timeout]
EXAMPLES: dict[str, tuple[Callable[[Rows], Any], str]] = {
    "policy": (lambda rows: LINGER, "later dead"),
    "object": (lambda rows: f"testapp.order:{rows['soon'].object_id}", "soon"),
    "related": (lambda rows: f"testapp.customer:{Customer.objects.get().pk}", "soon dead"),
    "where": (lambda rows: "note=N-1", "soon late"),
    "key": (lambda rows: "k", "later dead"),
    "search": (lambda rows: "N-1", "soon late"),
    "queue": (lambda rows: "slow", "later fired"),
    "state": (lambda rows: "dead", "dead"),
    "due_until": (lambda rows: timezone.now() + HOUR, "soon late"),
    "due_from": (lambda rows: timezone.now() + HOUR, "later computed"),
    "overdue": (lambda rows: True, "late"),
    "failing": (lambda rows: True, "late"),
    "settled_from": (lambda rows: timezone.now() - 4 * HOUR, "dead"),
    "settled_until": (lambda rows: timezone.now() - 4 * HOUR, "fired"),
    "set_by": (lambda rows: "policy", "computed"),
}
"""A value of each parameter, and the rows that it selects."""
OF_WAITING = {"due_until", "due_from"}
"""They select among the rows that wait, unless commands are asked for another state."""
BAD: dict[str, list[str]] = {
    "policy": ["testapp.order.nothing"],
    "object": ["17", ":", "no.thing:1", "testapp.order", "testapp.order:x", "testapp.order:\0"],
    "related": ["17", ":", "no.thing:1", "testapp.order:x", "a.b:\0", "contenttypes.contenttype:1"],
    "where": ["nothing=1", "id=x", "note"],
    "state": ["dying"],
    "due_until": ["soon"],
    "due_from": ["soon"],
}
IN_COMMANDS = {"due_until": "due_before", "due_from": "due_after"}
IN_ADMIN: dict[str, str | tuple[str, str]] = {
    **{name: name for name in ("policy", "object", "related", "queue", "set_by")},
    "state": "state__exact",
    "search": "q",
    "overdue": ("due", "overdue"),
    "failing": ("due", "failing"),
}


@pytest.fixture
def rows(declare: Callable[..., Any]) -> Rows:
    """One row of each kind that the parameters distinguish."""
    declare(Order, name="alone", search="note", owner="customer")
    declare(Order, name="counted", after=5 * HOUR, since="created_at", when=None)
    now, ada = timezone.now(), Customer.objects.create(name="Ada")
    first, second = (Order.objects.create(status="new", note="N-1", customer=owner) for owner in (ada, None))
    third = Order.objects.create(status="new", customer=ada)
    others = [Order.objects.create(created_at=now) for _ in "ab"]
    found = {
        "soon": dq.schedule_timeout(first, "alone", hours=0.5),
        "late": dq.schedule_timeout(second, "alone", hours=1),
        "later": dq.schedule_timeout(others[0], "linger", key="k", hours=5),
        "computed": dq.schedule_timeout(others[0], "counted"),
        "dead": as_if(pending(third, "linger", key="k", hours=1), "dead", "retries", settled_at=now - 3 * HOUR),
        "fired": as_if(dq.schedule_timeout(others[1], "remind", hours=1), "fired", "due", settled_at=now - 5 * HOUR),
    }
    Timeout.objects.filter(pk__in=[found["later"].pk, found["fired"].pk]).update(queue="slow")
    Timeout.objects.filter(pk=found["late"].pk).update(run_at=now - MINUTE, created_at=now - HOUR, attempts=2)
    return found


def by_command(**asked: Any) -> list[int]:
    given = {IN_COMMANDS.get(name, name): value for name, value in asked.items()}
    if "object" in given:
        given["model"], _colon, given["object"] = given["object"].rpartition(":")
    if OF_WAITING.isdisjoint(asked):
        given.setdefault("state", EVERY_STATE)
    call_command("delayq_list", json=True, limit=99, stdout=(out := io.StringIO()), **given)
    return [row["id"] for row in json.loads(out.getvalue())]


def boss() -> Client:
    client = Client()
    client.force_login(User.objects.get_or_create(username="boss", is_superuser=True, is_staff=True)[0])
    return client


def by_rest(**asked: Any) -> list[int]:
    query = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asked.items()}
    answer = boss().get("/api/timeouts/", query)
    if answer.status_code == 400:
        assert set(answer.json()) & {*asked, "non_field_errors"}
        raise ValueError(answer.json())
    return [row["id"] for row in answer.json()["results"]]


def in_admin(**asked: Any) -> list[int]:
    names = {name: IN_ADMIN[name] for name in asked}
    query = {name: value for name, value in asked.items() if isinstance(names[name], str)}
    query = {str(names[name]): value for name, value in query.items()}
    query |= dict(shown for shown in names.values() if isinstance(shown, tuple))
    return listed(boss(), **query)


EDGES: dict[str, tuple[Callable[..., list[int]], set[str]]] = {
    "command": (by_command, {name for name in EXAMPLES if IN_COMMANDS.get(name, name) in {*SELECTING, "failing"}}),
    "rest": (by_rest, set(Selection().fields)),
    "admin": (in_admin, set(IN_ADMIN)),
}
each_edge = pytest.mark.parametrize("edge", EDGES)


def value_of(name: str, rows: Rows) -> dict[str, Any]:
    more = {"policy": ALONE} if name == "where" else {}
    return {name: EXAMPLES[name][0](rows), **more}


def test_each_parameter_has_an_example_and_an_edge() -> None:
    assert set(EXAMPLES) == {*CONDITIONS, "search", "where"}
    assert set().union(*(names for _call, names in EDGES.values())) == set(EXAMPLES)


@each_edge
def test_a_parameter_selects_the_same_rows_everywhere(rows: Rows, edge: str) -> None:
    call, names = EDGES[edge]
    for name in sorted(names):
        expected = {rows[each].pk for each in EXAMPLES[name][1].split()}
        assert set(call(**value_of(name, rows))) & {row.pk for row in rows.values()} == expected, name


@each_edge
def test_a_value_that_makes_no_sense_selects_nothing(rows: Rows, edge: str) -> None:
    call, names = EDGES[edge]
    for name, value in ((each, value) for each in BAD if each in names for value in BAD[each]):
        try:
            found = call(**{**value_of(name, rows), name: value})
        except (CommandError, ValueError):
            assert edge != "admin"
        else:
            assert edge == "admin" and found == [], (name, value)


PAY = "testapp.purchase.pay"

# Along the paths of foreign keys that policies name: a merchant, and its channels, of which each has purchases.


def ids(rows: Any) -> list[int]:
    return sorted(int(row.object_id) for row in rows)


def asked(client: Client, **query: Any) -> Any:
    """Return the keys of the objects that REST lists, or the status of its refusal."""
    answer = client.get("/api/timeouts/", query)
    if answer.status_code != 200:
        return answer.status_code
    return sorted(int(row["object"]["id"]) for row in answer.json()["results"])


@pytest.fixture
def market(declare: Declare) -> Iterator[list[Purchase]]:
    """Four purchases: two of one merchant, over two channels, one of another, and one of none."""
    declare(Purchase, name="pay", after="channel__pay_within", **UNPAID)
    by_merchant = Q(status="unpaid", channel__merchant__name="x")
    declare(Purchase, name="warn", after=MINUTE, since="created_at", when=by_merchant)
    merchants = [Merchant.objects.create(name="x") for _ in range(2)]
    channels = [Channel.objects.create(merchant=merchants[n], pay_within=30 * MINUTE) for n in (0, 0, 1)]
    with clock.set_to(at()):
        yield [*(bought(channel=channel) for channel in channels), bought()]


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


@pytest.mark.dialect
def test_where_selects_by_columns_over_foreign_keys(market: list[Purchase]) -> None:
    assert market[0].channel is not None
    channel = market[0].channel
    expected = {
        f"channel={channel.pk}": [market[0].pk],
        f"channel__merchant_id={channel.merchant_id}": [market[0].pk, market[1].pk],
        "channel__merchant__name=x": [purchase.pk for purchase in market[:3]],
        "status=paid": [],
    }
    for condition, pks in expected.items():
        rows = Timeout.objects.filter(selection.where(Purchase, [condition], "default"), policy=PAY)
        assert ids(rows) == pks, condition
    both = ["status=unpaid", f"channel__merchant={channel.merchant_id}"]
    assert asked(boss(), policy=PAY, where=both) == [market[0].pk, market[1].pk]
    call_command("delayq_cancel", "--policy", PAY, "--where", *both, f"channel={channel.pk}")
    assert ids(pending_timeouts(Purchase, "pay")) == [market[1].pk, market[2].pk]
    call_command("delayq_cancel", model="testapp.Purchase", where=[f"channel__merchant={channel.merchant_id}"])
    assert ids(pending_timeouts(Purchase)) == [market[2].pk] * 2


def test_rest_refuses_what_the_visitor_may_not_view(market: list[Purchase]) -> None:
    related, where = "testapp.merchant:1", "channel__merchant__name=x"
    nothing, purchases, merchants = (
        staff("view_timeout", *codenames) for codenames in ((), ("view_purchase",), ("view_merchant",))
    )
    every = sorted(purchase.pk for purchase in market[:3])
    assert asked(purchases, related=related) == asked(purchases, policy=PAY, where=where) == 403
    assert asked(nothing, policy=PAY, where="status=unpaid") == 403
    assert asked(purchases, policy=PAY, where="status=unpaid") == asked(merchants, policy=PAY, where=where) == every
    assert asked(purchases, where="status=unpaid") == asked(purchases, related="testapp.merchant") == 400


@pytest.mark.dialect
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
        rows = related_timeouts(merchant).filter(policy=PAY)
        assert ids(rows) == every
    assert len(seen[-1]["sql"].split("SELECT")) > 2, "the keys are a subquery"
    found = Timeout.objects.filter(selection.where(Purchase, [f"channel__merchant={merchant.pk}"], "default"))
    assert ids(found) == sorted(every * 2)
    assert operations.cancel(rows, by="admin:alice").changed == len(every)
    assert ids(pending_timeouts(Purchase, "pay")) == [market[2].pk]
    queryset = Purchase.objects.filter(channel__merchant=merchant)
    assert operations.cancel(pending_timeouts(queryset, "warn"), by="admin:alice").changed == len(every)
