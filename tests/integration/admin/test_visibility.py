"""The admin on pages of other models, too: it shows, finds and names what one may see, and saves no stale page."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from django.utils.html import escape

import django_delayq as dq
from django_delayq.admin import mixins
from django_delayq.models import Timeout
from django_delayq.operations import selection
from tests.integration.admin.conftest import Staff, listed, queries, source, words
from tests.integration.admin.places import DETAIL, LIST, OPERATION
from tests.integration.admin.sites import HIDDEN
from tests.support.typed import Declare, Patch
from tests.testapp.market import Payment, Purchase
from tests.testapp.models import Customer, Order, Voucher
from tests.testapp.timeouts import LOSE_UNPAID, lose

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.integration.admin.sites")]


@pytest.fixture
def order(declare: Declare, monkeypatch: Patch) -> Order:
    declare(Order, name="noted", search=("note", "id"), owner="customer")
    monkeypatch.setattr(Customer, "__str__", lambda self: self.name)
    return Order.objects.create(note="A-2026-0050", status="new", customer=Customer.objects.create(name="Ada"))


def rows_of_inline(client: Client, address: str) -> list[int]:
    (inline,) = client.get(address).context["inline_admin_formsets"]
    return [form.instance.pk for form in inline.formset.initial_forms]


def test_rows_that_the_project_or_an_inline_hides_are_on_no_page_of_their_object(
    admin_client: Client, order: Order
) -> None:
    seen = dq.schedule_timeout(order, "noted", hours=1)
    hidden = dq.schedule_timeout(order, "remind", hours=1, reason=HIDDEN)
    of_order = reverse("admin:testapp_order_change", args=[order.pk])
    of_customer = reverse("admin:testapp_customer_change", args=[order.customer_id])
    for address in (of_order, of_customer):
        assert rows_of_inline(admin_client, address) == [seen.pk]
        assert HIDDEN not in source(admin_client, address)
    # Without an admin for timeouts, the project hides none.
    assert rows_of_inline(admin_client, of_order.replace("/admin/", "/plain/")) == [hidden.pk, seen.pk]
    orders = reverse("admin:testapp_order_changelist")
    (shown,) = admin_client.get(orders).context["cl"].result_list
    assert (shown.delayq_next_due, shown.delayq_next_policy) == (seen.due_at, seen.policy)
    dq.schedule_timeout(order, "noted", hours=1, key="secret")
    assert rows_of_inline(admin_client, of_customer) == [seen.pk], "an inline of the project may hide more"


def test_a_look_up_that_no_filter_has_is_not_answered(admin_client: Client, order: Order) -> None:
    row = dq.schedule_timeout(order, "noted", hours=1, payload={"secret": "4111"})
    Timeout.objects.filter(pk=row.pk).update(reason="aaaaaaaaaaaaaaaaaaaaaa!")
    for query in (
        *("payload__contains=secret", "payload__card=4111", "history__icontains=x", "idempotency_key__startswith=a"),
        *("reason__regex=(a%2B)%2B%24", "id__in=x", "due_at__week_day=x", "due_at__gt=2020-01-01", "nosuchfield=1"),
    ):
        answer = admin_client.get(f"{reverse(LIST)}?{query}")
        assert answer.status_code in {302, 400}, query
        assert answer.status_code == 400 or answer.headers["Location"].endswith("?e=1"), query
    changes = reverse("admin:django_delayq_policychange_changelist")
    for query in ("details__icontains=x", "by__regex=(a%2B)%2B%24", "place=1"):
        assert admin_client.get(f"{changes}?{query}").headers["Location"].endswith("?e=1")


def read(client: Client, address: str, *query: Any) -> str:
    return words(client.get(f"{reverse(LIST)}{address}" if address.startswith("?") else reverse(address, args=query)))


def names(rows: Any, user: Any = None) -> dict[str, str]:
    return {key: name for (_kind, key), name in selection.names_of(rows, "default", user).items()}


def test_each_page_on_which_people_decide_names_the_object_and_its_owner(admin_client: Client, order: Order) -> None:
    row, customer = dq.schedule_timeout(order, "noted", hours=1), order.customer
    assert customer is not None
    operation = words(admin_client.get(f"{reverse(OPERATION, args=['cancel'])}?ids={row.pk}"))
    for shown in (read(admin_client, LIST), read(admin_client, DETAIL, row.pk), operation):
        assert f"order A-2026-0050 (ID {order.pk})" in shown
    owned = read(admin_client, "admin:testapp_customer_change", customer.pk)
    assert "order A-2026-0050" in owned and "All timeouts of customer Ada" in owned
    page = read(admin_client, DETAIL, row.pk)
    assert "noted of A-2026-0050: pending" in page and "All timeouts of customer Ada" in page
    Timeout.objects.filter(pk=row.pk).update(attempts=1)  # the badge is the same
    assert "noted of A-2026-0050: failing" in read(admin_client, DETAIL, row.pk)
    assert "Timeouts of customer Ada" in read(admin_client, f"?related=testapp.customer:{customer.pk}")
    assert "Timeouts of order A-2026-0050" in read(admin_client, f"?object=testapp.order:{order.pk}")


def test_only_who_may_view_the_model_sees_the_name(order: Order, staff: Staff) -> None:
    row = dq.schedule_timeout(order, "noted", hours=1)
    of_order = f"{reverse(LIST)}?object=testapp.order:{order.pk}"
    for codenames, is_named in (((), False), (("view_customer",), False), (("view_order",), True)):
        client = staff("view_timeout", *codenames)
        for address in (reverse(LIST), reverse(DETAIL, args=[row.pk]), of_order):
            shown = words(client.get(address))
            assert ("A-2026-0050" in shown) is is_named, (codenames, address)
            assert is_named or f"order {order.pk}" in shown


def test_a_path_over_a_relation_names_only_for_who_may_view_both_models(declare: Declare) -> None:
    declare(Order, name="of_customer", search="customer__name")
    order = Order.objects.create(customer=Customer.objects.create(name="Ada"))
    row = dq.schedule_timeout(order, "of_customer", hours=1)
    named = {row.object_id: "Ada"}
    for codenames, found in ((("view_order",), {}), (("view_customer",), {}), (("view_order", "view_customer"), named)):
        user = User.objects.create_user(f"user{User.objects.count()}")
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        assert names([row], user) == found
    assert names([row]) == named


@pytest.mark.parametrize(
    "fails", [lambda self: 5, lambda self: Customer.objects.get(pk=1).name, lambda self: "", lambda self: 1 / 0]
)
def test_an_str_that_fails_falls_back_to_the_key(admin_client: Client, monkeypatch: Patch, fails: Any) -> None:
    monkeypatch.setattr(Order, "__str__", fails)
    order = Order.objects.create(customer=Customer.objects.create(name="Ada"))
    row = dq.schedule_timeout(order, "remind", hours=1)
    assert f"order {order.pk}" in read(admin_client, LIST)
    assert f"order {order.pk}" in read(admin_client, DETAIL, row.pk)


@pytest.mark.usefixtures("own_kinds")
def test_rows_whose_object_or_its_table_is_gone_are_shown(
    admin_client: Client, order: Order, monkeypatch: Patch
) -> None:
    gone = dq.schedule_timeout(order, "noted", hours=1)
    voucher = dq.schedule_timeout(Voucher.objects.create(code="no number"), "expire", hours=1)
    Order.objects.filter(pk=order.pk).delete()
    kind = ContentType.objects.create(app_label="former", model="invoice")
    Timeout.objects.filter(pk=voucher.pk).update(content_type=kind, object_id="7")
    shown = read(admin_client, LIST)
    assert f"order {gone.object_id}" in shown and "invoice 7" in shown
    monkeypatch.setattr(Order._meta, "db_table", "no_such_table")
    assert f"order {gone.object_id}" in read(admin_client, LIST)


ORDERS, TIMEOUTS = "/admin/testapp/order/", "/admin/django_delayq/timeout/"
PREFIX = "django_delayq-timeout-content_type-object_id"


def page_of(obj: Any) -> str:
    return f"/admin/testapp/{obj._meta.model_name}/{obj.pk}/change/"


def orders(count: int, hours: float = 1) -> list[Order]:
    made = [Order.objects.create(status="new") for _ in range(count)]
    for order in made:
        dq.schedule_timeout(order, "remind", hours=hours)
    return made


def shown_for(client: Client, obj: Any) -> list[Timeout]:
    """Return the rows of the inline."""
    return list(client.get(page_of(obj)).context["inline_admin_formsets"][0].formset.get_queryset())


def save(client: Client, address: str, total: int, **values: Any) -> Any:
    return client.post(address, {f"{PREFIX}-TOTAL_FORMS": total, f"{PREFIX}-INITIAL_FORMS": total, **values})


def test_the_page_of_a_customer_shows_the_newest_timeouts_of_the_customers_orders(
    admin_client: Client, declare: Declare
) -> None:
    ada = Customer.objects.create(name="Ada")
    mine, another, others = orders(3)
    Order.objects.filter(pk__in=[mine.pk, another.pk]).update(customer=ada)
    assert not shown_for(admin_client, ada)
    declare(Order, name="by_hand", owner="customer")
    declare(Customer, name="greet")
    greeting = dq.schedule_timeout(ada, "greet", hours=1)
    assert shown_for(admin_client, ada) == [greeting, another.timeouts.get()]
    page = source(admin_client, page_of(ada))
    for text in ('<th class="column-object_shown">', f"order {another.pk}", f"customer {ada.pk}"):
        assert text in page
    assert save(admin_client, page_of(ada), 2, name="Ada B.").status_code == 302
    assert Customer.objects.get().name == "Ada B."
    assert "column-object_shown" not in source(admin_client, page_of(others))


def test_saving_an_object_works_while_its_timeouts_come_and_go_and_writes_none_of_them(admin_client: Client) -> None:
    source(admin_client, "/admin/testapp/order/add/")
    assert save(admin_client, "/admin/testapp/order/add/", 0, status="new", note="x").status_code == 302
    order = Order.objects.get()
    remind = dq.schedule_timeout(order, "remind", hours=1)
    assert shown_for(admin_client, order) == [remind]
    row = dq.schedule_timeout(order, "linger", hours=1)
    dq.cancel_timeout(order, "remind")
    forged = {f"{PREFIX}-0-{name}": value for name, value in {"id": row.pk, "state": "fired", "DELETE": "on"}.items()}
    saved = save(admin_client, page_of(order), 1, status="paid", note="x", **forged)
    assert saved.status_code == 302, saved.content.decode()[:3000]
    assert Order.objects.get(pk=order.pk).status == "paid"
    assert set(Timeout.objects.values_list("state", flat=True)) == {"pending", "cancelled"}


def test_without_the_permission_neither_inline_nor_column_nor_filter_nor_actions_nor_links(staff: Staff) -> None:
    (order,) = orders(1)
    blind, seeing = (staff("view_order", "change_order", *more) for more in ((), ("view_timeout",)))
    page, orders_listed = source(blind, page_of(order)), source(blind, ORDERS)
    assert "delayq-badge" not in page and "django_delayq/timeout" not in page
    assert not any(each in orders_listed for each in ("data-delayq-due", "cancel_timeouts", "timeouts=dead"))
    page, orders_listed = source(seeing, page_of(order)), source(seeing, ORDERS)
    assert "delayq-badge" in page and "cancel_timeouts" not in orders_listed
    assert "data-delayq-due" in orders_listed and "timeouts=dead" in orders_listed
    assert page_of(order) in source(seeing, TIMEOUTS)
    assert page_of(order) not in source(staff("view_timeout"), TIMEOUTS)


def test_the_column_shows_the_soonest_pending_deadline_and_costs_no_query_for_each_object(admin_client: Client) -> None:
    (order,) = orders(1, hours=5)
    soon = dq.schedule_timeout(order, "linger", hours=2)
    dq.cancel_timeout(dq.schedule_timeout(order, "linger", hours=1, key="over"))
    seen = admin_client.get(ORDERS).context["cl"].result_list[0]
    assert (seen.delayq_next_due, seen.delayq_next_policy) == (soon.due_at, "testapp.order.linger")
    few = queries(admin_client, ORDERS)
    orders(20)
    assert source(admin_client, ORDERS).count("data-delayq-due") == 21
    assert queries(admin_client, ORDERS) == few


def test_objects_are_filtered_by_what_their_timeouts_do(admin_client: Client) -> None:
    late, soon, far, dead, quiet = *orders(4), Order.objects.create(status="new")
    now = timezone.now()
    moments = {late: now - timedelta(minutes=1), soon: now + timedelta(minutes=30), far: now + timedelta(days=1)}
    for order, moment in moments.items():
        Timeout.objects.filter(object_id=str(order.pk)).update(due_at=moment, run_at=moment)
    died = {"state": "dead", "cause": "retries", "settled_at": now, "slot_taken": None}
    Timeout.objects.filter(object_id=str(dead.pk)).update(**died)
    kind = late.timeouts.get().content_type_id
    times = dict.fromkeys(("due_at", "run_at", "first_due_at", "created_at"), now)
    Timeout.objects.create(policy="x.y.z", content_type_id=kind, object_id="no key", slot="5" * 32, **times)
    found = {
        value: {*listed(admin_client, f"{ORDERS}?timeouts={value}")}
        for value in ("overdue", "hour", "waiting", "dead", "nonsense")
    }
    assert found == {
        "overdue": {late.pk},
        "hour": {soon.pk},
        "waiting": {late.pk, soon.pk, far.pk},
        "dead": {dead.pk},
        "nonsense": {late.pk, soon.pk, far.pk, dead.pk, quiet.pk},
    }


def test_an_action_on_objects_asks_about_their_timeouts_and_does_it(admin_client: Client) -> None:
    chosen, other = orders(2)
    dq.cancel_timeout(dq.schedule_timeout(chosen, "linger", hours=1))
    asked: Any = admin_client.post(ORDERS, {"action": "cancel_timeouts", "_selected_action": [chosen.pk]})
    assert asked.context["ids"] == str(chosen.timeouts.get(state="pending").pk)
    form = {"ids": asked.context["ids"], "confirmed": "yes", "reason": "asked", "back": asked.context["back"]}
    done: Any = admin_client.post(asked.context["action"], form)
    assert done.status_code == 302 and done.url == ORDERS
    assert (LogEntry.objects.count(), other.timeouts.get().state) == (1, "pending")
    page = source(admin_client, "/plain/testapp/order/")
    assert "data-delayq-due" in page and "cancel_timeouts" not in page, "a site without the pages offers no actions"
    elsewhere = "/elsewhere/django_delayq/timeout/"
    assert "cancel_timeouts" in source(admin_client, "/elsewhere/testapp/order/")
    done = admin_client.post(f"{elsewhere}operate/cancel/", {**form, "ids": other.timeouts.get().pk, "back": ""})
    assert done.url == elsewhere, "without a place to return to, it stays in its own site"


# A page that was opened before its row has changed: saving it would write what the row was then.


@pytest.fixture
def payment(declare: Declare) -> Payment:
    declare(Purchase, lose, name="lose_unpaid", **LOSE_UNPAID)
    return Payment.objects.create(purchase=Purchase.objects.create())


def filtered_page(obj: Any) -> str:
    return f"{page_of(obj)}?_changelist_filters=q%3Dx"


def posted(client: Client, opened: Any, **values: str) -> Any:
    """Send the form of a page as a browser does, with these values."""
    html = opened.content.decode()
    form = re.search(r'<form (?:[^>]*?action="([^"]*)")?', html[html.index('id="content"') :])
    inputs = dict(re.findall(r'<input type="hidden" name="([\w-]+)" (?:value="([^"]*)")?', html))
    address = opened.request["PATH_INFO"] + (form[1] if form and form[1] else f"?{opened.request['QUERY_STRING']}")
    return client.post(address.replace("&amp;", "&"), {**inputs, **values})


CHANGES: dict[str, tuple[bool, Callable[[Payment], Any]]] = {
    "the row": (True, lambda payment: Purchase.objects.update(status="expired")),
    "a row of the inline": (True, lambda payment: Payment.objects.update(status="void")),
    "a new row of the inline": (True, lambda payment: payment.purchase.payments.create()),  # type: ignore[union-attr]
    "another row": (False, lambda payment: Payment.objects.create(purchase=Purchase.objects.create())),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_page_is_refused_if_the_row_has_changed_since_then(admin_client: Client, payment: Payment, what: str) -> None:
    is_refused, change = CHANGES[what]
    purchase = payment.purchase
    values = {"status": "waiting", "payments-0-status": "captured", "payments-1-status": "new"}
    opened = admin_client.get(filtered_page(purchase))
    change(payment)
    before = list(Purchase.objects.values()), list(Payment.objects.values())
    answer = posted(admin_client, opened, **values)
    assert answer.status_code == (200 if is_refused else 302)
    if is_refused:
        assert escape(str(mixins.STALE)) in answer.content.decode()
        assert before == (list(Purchase.objects.values()), list(Payment.objects.values()))
        answer = posted(admin_client, admin_client.get(filtered_page(purchase)), **values)
    assert answer.status_code == 302
    assert answer["Location"] == "/admin/testapp/purchase/?q=x"
    assert Purchase.objects.get(pk=purchase.pk).status == "waiting"  # type: ignore[union-attr]


def test_the_page_of_a_watched_row_is_refused_too_and_reloaded_it_is_fresh(
    admin_client: Client, payment: Payment
) -> None:
    opened = admin_client.get(filtered_page(payment))
    Payment.objects.update(status="void")
    refused = posted(admin_client, opened, status="captured")
    assert refused.status_code == 200 and Payment.objects.get().status == "void"
    address = f"{refused.request['PATH_INFO']}?{refused.request['QUERY_STRING']}"
    assert posted(admin_client, admin_client.get(address), status="captured").status_code == 302
    without_version = admin_client.post(filtered_page(payment), {"status": "captured"})
    assert without_version.status_code == 302


def test_a_visitor_who_may_only_view_sees_no_version_and_locks_nothing(payment: Payment, staff: Staff) -> None:
    client = staff("view_payment", "view_purchase")
    for obj in (payment, payment.purchase):
        assert mixins.VERSION not in source(client, filtered_page(obj))
        assert client.post(filtered_page(obj), {"status": "captured"}).status_code == 403
    assert Payment.objects.get().status == "new"
