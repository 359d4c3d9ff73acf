"""Timeouts on the pages of other models: the inline, and the mixin's column, filter and actions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from tests.integration.admin.conftest import Staff, listed, queries, source
from tests.support.typed import Declare
from tests.testapp.models import Customer, Order

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.integration.admin.sites")]
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


def choose(client: Client, *chosen: Any, where: str = ORDERS, **more: Any) -> Any:
    """Choose an action for ticked objects."""
    ticked = {"action": "cancel_timeouts", "_selected_action": [each.pk for each in chosen], **more}
    return client.post(where, ticked)


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
    for words in ('<th class="column-object_shown">', f"order {another.pk}", f"customer {ada.pk}"):
        assert words in page
    assert save(admin_client, page_of(ada), 2, name="Ada B.").status_code == 302
    assert Customer.objects.get().name == "Ada B."
    assert "column-object_shown" not in source(admin_client, page_of(others))


def test_the_page_of_an_object_shows_its_newest_timeouts(admin_client: Client) -> None:
    (order,) = orders(1)
    for number in range(15):
        dq.schedule_timeout(order, "linger", hours=1, key=f"key-{number}")
    rows, page = list(order.timeouts.order_by("-id")), source(admin_client, page_of(order))
    linked = [row for row in rows if f"{TIMEOUTS}{row.pk}/change/" in page]
    assert linked == rows[:10] and f"?object=testapp.order%3A{order.pk}" in page
    assert listed(admin_client, f"{TIMEOUTS}?object=testapp.order:{order.pk}") == [row.pk for row in rows]


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
    asked = choose(admin_client, chosen)
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
