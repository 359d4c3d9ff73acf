"""Timeouts on the pages of other models: the inline, and the mixin's column, filter and actions."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone

import django_delayq as dq
from django_delayq.admin import PolicyControlAdmin, TimeoutAdmin, TimeoutAdminMixin, TimeoutInline, actions, mixins
from django_delayq.firing.rails import brake as brake_rail
from django_delayq.ledger.controls import Guards
from django_delayq.models import PolicyControl, Timeout
from tests.testapp.models import Customer, ExpressOrder, Order, Parcel, Plain, Voucher

site = admin.AdminSite(name="admin")


class OrderAdmin(TimeoutAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ("id", "next_deadline", "status")
    fields = ("status", "note")
    inlines = (TimeoutInline,)


class FewInline(TimeoutInline):
    shown = 2


class CustomerAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("name",)
    inlines = (FewInline,)


class ExpressAdmin(TimeoutAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ("status", "courier")
    inlines = (FewInline,)


class ParcelAdmin(TimeoutAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


class AdminWithoutDeletion(admin.ModelAdmin):  # type: ignore[type-arg]
    """As other apps and projects wrote it before Django 6.1, which passes where the actions are shown."""

    def get_actions(self, request: Any) -> Any:
        return {name: each for name, each in super().get_actions(request).items() if name != "delete_selected"}


class OldAdmin(TimeoutAdminMixin, AdminWithoutDeletion):
    pass


site.register(Timeout, TimeoutAdmin)
site.register(Order, OrderAdmin)
site.register(ExpressOrder, ExpressAdmin)
site.register(Customer, CustomerAdmin)
site.register([Parcel, Voucher], ParcelAdmin)
site.register(Plain, ParcelAdmin)

elsewhere = admin.AdminSite(name="elsewhere")
elsewhere.register(Timeout, TimeoutAdmin)
elsewhere.register(Order, OrderAdmin)
elsewhere.register(Parcel, OldAdmin)
without_timeouts = admin.AdminSite(name="without_timeouts")
without_timeouts.register(Order, OrderAdmin)
only_policies = admin.AdminSite(name="only_policies")
only_policies.register(PolicyControl, PolicyControlAdmin)
urlpatterns = [
    path("admin/", site.urls),
    path("elsewhere/", elsewhere.urls),
    path("without/", without_timeouts.urls),
    path("policies/", only_policies.urls),
]

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]
ORDERS = "/admin/testapp/order/"
EMPTY = {"initial": 0, "total": 0}


def page_of(obj: Any) -> str:
    return f"/admin/testapp/{obj._meta.model_name}/{obj.pk}/change/"


def orders(count: int, hours: float = 1) -> list[Order]:
    made = [Order.objects.create(status="new") for _ in range(count)]
    for order in made:
        dq.schedule_timeout(order, "remind", hours=hours)
    return made


def management(total: int) -> dict[str, Any]:
    prefix = "django_delayq-timeout-content_type-object_id"
    return {f"{prefix}-TOTAL_FORMS": total, f"{prefix}-INITIAL_FORMS": total}


@pytest.fixture
def clerk() -> Callable[..., Client]:
    def made(*permissions: str) -> Client:
        user = User.objects.create_user(f"clerk{User.objects.count()}", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client = Client()
        client.force_login(user)
        return client

    return made


def test_the_actions_of_a_class_for_an_older_django_are_kept(admin_client: Client) -> None:
    Parcel.objects.create()
    page = admin_client.get("/elsewhere/testapp/parcel/").content.decode()
    assert 'value="cancel_timeouts"' in page
    assert "delete_selected" not in page
    assert admin_client.get(f"/elsewhere/testapp/parcel/{Parcel.objects.get().pk}/change/").status_code == 200


def test_the_page_of_a_customer_shows_the_newest_timeouts_of_the_customers_orders(
    admin_client: Client, declare: Callable[..., Any]
) -> None:
    ada = Customer.objects.create(name="Ada")
    mine, another, others = orders(3)
    Order.objects.filter(pk__in=[mine.pk, another.pk]).update(customer=ada)
    assert not admin_client.get(page_of(ada)).context["inline_admin_formsets"][0].formset.get_queryset()
    declare(Order, name="by_hand", owner="customer")
    declare(Customer, name="greet")
    greeting = dq.schedule_timeout(ada, "greet", hours=1)
    page = admin_client.get(page_of(ada))
    shown = list(page.context["inline_admin_formsets"][0].formset.get_queryset())
    assert shown == [greeting, another.timeouts.get()]
    for words in ('<th class="column-object_shown">', f"order {another.pk}", f"customer {ada.pk}"):
        assert words in page.content.decode()
    assert admin_client.post(page_of(ada), {"name": "Ada B.", **management(2)}).status_code == 302
    assert Customer.objects.get().name == "Ada B."
    assert "column-object_shown" not in admin_client.get(page_of(others)).content.decode()


def test_the_page_of_an_object_shows_its_newest_timeouts(admin_client: Client) -> None:
    (order,) = orders(1)
    for number in range(15):
        dq.schedule_timeout(order, "linger", hours=1, key=f"key-{number}")
    page = admin_client.get(page_of(order)).content.decode()
    rows = list(order.timeouts.order_by("-id"))
    assert all(f"/admin/django_delayq/timeout/{row.pk}/change/" in page for row in rows[:10])
    assert not any(f"/admin/django_delayq/timeout/{row.pk}/change/" in page for row in rows[10:])
    assert f"?object=testapp.order%3A{order.pk}" in page
    listed = admin_client.get(f"/admin/django_delayq/timeout/?object=testapp.order:{order.pk}").context["cl"]
    assert [row.pk for row in listed.result_list] == [row.pk for row in rows]


def test_saving_an_object_works_while_its_timeouts_come_and_go(admin_client: Client) -> None:
    (order,) = orders(1)
    before = admin_client.get(page_of(order))
    assert before.status_code == 200
    dq.schedule_timeout(order, "linger", hours=1)
    dq.cancel_timeout(order, "remind")
    saved = admin_client.post(page_of(order), {"status": "paid", "note": "x", **management(1)})
    assert saved.status_code == 302, saved.content.decode()[:3000]
    assert Order.objects.get(pk=order.pk).status == "paid"
    assert Timeout.objects.count() == 2


def test_the_page_for_a_new_object_has_an_empty_inline(admin_client: Client) -> None:
    assert admin_client.get("/admin/testapp/order/add/").status_code == 200
    assert (
        admin_client.post("/admin/testapp/order/add/", {"status": "new", "note": "x", **management(0)}).status_code
        == 302
    )
    assert Order.objects.get().note == "x"


def test_nothing_can_be_written_through_the_inline(admin_client: Client) -> None:
    (order,) = orders(1)
    row = order.timeouts.get()
    prefix = "django_delayq-timeout-content_type-object_id-0"
    sent = {f"{prefix}-id": row.pk, f"{prefix}-reason": "forged", f"{prefix}-state": "fired", f"{prefix}-DELETE": "on"}
    admin_client.post(page_of(order), {"status": "paid", "note": "x", **management(1), **sent})
    after = Timeout.objects.get()
    assert (after.state, after.reason) == ("pending", "")


def test_a_child_shows_its_parents_timeouts_and_no_more_than_asked_for(admin_client: Client) -> None:
    child = ExpressOrder.objects.create(status="new")
    for number in range(3):
        dq.schedule_timeout(child, "remind", hours=1, key=str(number))
    page = admin_client.get(page_of(child)).content.decode()
    assert page.count('class="delayq-badge delayq-pending"') == 2
    listed = admin_client.get("/admin/testapp/expressorder/").content.decode()
    assert "remind" in listed and "data-delayq-due" in listed


def test_without_the_permission_neither_inline_nor_column_nor_filter_nor_actions(clerk: Callable[..., Client]) -> None:
    (order,) = orders(1)
    blind = clerk("view_order", "change_order")
    page, listed = blind.get(page_of(order)).content.decode(), blind.get(ORDERS).content.decode()
    assert "delayq-badge" not in page and "django_delayq/timeout" not in page
    assert "data-delayq-due" not in listed and "cancel_timeouts" not in listed and "timeouts=dead" not in listed
    seeing = clerk("view_order", "change_order", "view_timeout")
    page, listed = seeing.get(page_of(order)).content.decode(), seeing.get(ORDERS).content.decode()
    assert "delayq-badge" in page
    assert "data-delayq-due" in listed and "timeouts=dead" in listed and "cancel_timeouts" not in listed


def test_the_column_costs_no_query_for_each_object(admin_client: Client) -> None:
    orders(2)
    admin_client.get(ORDERS)  # the first page also fills caches
    with CaptureQueriesContext(connection) as two:
        admin_client.get(ORDERS)
    orders(20)
    with CaptureQueriesContext(connection) as many:
        page = admin_client.get(ORDERS).content.decode()
    assert page.count("data-delayq-due") == 22
    assert len(many) == len(two)


def test_the_column_shows_the_soonest_pending_deadline(admin_client: Client) -> None:
    (order,) = orders(1, hours=5)
    soon = dq.schedule_timeout(order, "linger", hours=2)
    over = dq.schedule_timeout(order, "linger", hours=1, key="over")
    dq.cancel_timeout(over)
    seen = admin_client.get(ORDERS).context["cl"].result_list[0]
    assert (seen.delayq_next_due, seen.delayq_next_policy) == (soon.due_at, "testapp.order.linger")


def test_a_snoozed_deadline_in_the_column_says_when_it_is_tried_again(admin_client: Client) -> None:
    dq.schedule_timeout(Order.objects.create(status="new"), "remind", minutes=5)
    now = timezone.now()
    Timeout.objects.update(due_at=now - timedelta(minutes=3), run_at=now + timedelta(minutes=20))
    page = admin_client.get(ORDERS).content.decode()
    assert re.search(r"next attempt <bdi[^>]*>in (20|19) min</bdi>", page) and "late</bdi>" not in page


def test_keys_of_any_kind_have_their_deadlines(admin_client: Client) -> None:
    parcel = Parcel.objects.create(status="open", sent_at=timezone.now())
    voucher = Voucher.objects.create(code="A-1", issued_at=timezone.now())
    for obj in (parcel, voucher):
        (seen,) = admin_client.get(f"/admin/testapp/{obj._meta.model_name}/").context["cl"].result_list
        assert seen.delayq_next_due == Timeout.objects.get(object_id=str(obj.pk)).due_at
        listed = admin_client.get(f"/admin/testapp/{obj._meta.model_name}/?timeouts=waiting").context["cl"]
        assert [row.pk for row in listed.result_list] == [obj.pk]


def test_objects_are_filtered_by_what_their_timeouts_do(admin_client: Client) -> None:
    late, soon, far, dead, quiet = *orders(4), Order.objects.create(status="new")
    now = timezone.now()
    moments = {late: now - timedelta(minutes=1), soon: now + timedelta(minutes=30), far: now + timedelta(days=1)}
    for order, moment in moments.items():
        order.timeouts.model.objects.filter(object_id=str(order.pk)).update(due_at=moment, run_at=moment)
    Timeout.objects.filter(object_id=str(dead.pk)).update(
        state="dead", cause="retries", settled_at=now, slot_taken=None
    )
    Timeout.objects.create(
        policy="x.y.z", content_type_id=late.timeouts.get().content_type_id, object_id="no key", slot="5" * 32,
        due_at=now, run_at=now, first_due_at=now, created_at=now,
    )  # fmt: skip

    def found(value: str) -> set[int]:
        return {order.pk for order in admin_client.get(f"{ORDERS}?timeouts={value}").context["cl"].result_list}

    assert found("overdue") == {late.pk}
    assert found("hour") == {soon.pk}
    assert found("waiting") == {late.pk, soon.pk, far.pk}
    assert found("dead") == {dead.pk}
    assert found("nonsense") == {late.pk, soon.pk, far.pk, dead.pk, quiet.pk}


def test_of_too_many_objects_the_most_urgent_ones_are_shown_whatever_their_policy(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (later,), soon, former = orders(1, hours=3), Order.objects.create(status="new"), Order.objects.create(status="new")
    dq.schedule_timeout(soon, "linger", hours=2)
    gone = dq.schedule_timeout(former, "linger", hours=1)
    Timeout.objects.filter(pk=gone.pk).update(policy="testapp.order.former")
    other = dq.schedule_timeout(Parcel.objects.create(status="new"), "chase", minutes=1)
    Timeout.objects.filter(pk=other.pk).update(policy="testapp.parcel.former")
    for most, shown in ((1, {former.pk}), (2, {former.pk, soon.pk}), (3, {former.pk, soon.pk, later.pk})):
        monkeypatch.setattr(mixins, "MAX_OBJECTS", most)
        found = admin_client.get(f"{ORDERS}?timeouts=waiting").context["cl"].result_list
        assert {order.pk for order in found} == shown
    now = timezone.now()
    died = {"state": "dead", "cause": "retries", "settled_at": now, "slot_taken": None}
    Timeout.objects.filter(object_id=str(later.pk)).update(**died, run_at=now - timedelta(minutes=2))
    Timeout.objects.filter(object_id=str(soon.pk)).update(**died, run_at=now - timedelta(minutes=1))
    monkeypatch.setattr(mixins, "MAX_OBJECTS", 1)
    assert [order.pk for order in admin_client.get(f"{ORDERS}?timeouts=dead").context["cl"].result_list] == [soon.pk]


@pytest.mark.parametrize("operation", ["cancel", "fire", "postpone"])
def test_an_action_on_objects_asks_about_their_timeouts_and_does_it(admin_client: Client, operation: str) -> None:
    chosen, other = orders(2)
    settled = dq.schedule_timeout(chosen, "linger", hours=1)
    dq.cancel_timeout(settled)
    sent = {"action": f"{operation}_timeouts", "_selected_action": [chosen.pk]}
    asked = admin_client.post(ORDERS, sent)
    assert asked.context["ids"] == str(chosen.timeouts.get(state="pending").pk)
    form = {"ids": asked.context["ids"], "confirmed": "yes", "reason": "asked", "amount": "3", "unit": "days"}
    done: Any = admin_client.post(asked.context["action"], {**form, "back": asked.context["back"]})
    assert done.status_code == 302 and done.url == ORDERS
    assert LogEntry.objects.count() == 1
    assert other.timeouts.get().due_at < timezone.now() + timedelta(hours=2) and other.timeouts.get().state == "pending"


def test_an_action_on_objects_without_timeouts_says_so(admin_client: Client) -> None:
    order = Order.objects.create(status="new")
    sent = {"action": "cancel_timeouts", "_selected_action": [order.pk]}
    page = admin_client.post(ORDERS, sent, follow=True).content.decode()
    assert "None of the selected objects has a timeout" in page


def test_an_action_on_very_many_objects_finds_the_few_with_timeouts(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "MAX_ROWS", 2)
    first, *others = orders(3)
    for order in others:
        dq.cancel_timeouts(order.timeouts.all())
    for _ in range(4):  # the list shows them first
        Order.objects.create(status="new")
    sent = {"action": "cancel_timeouts", "_selected_action": [first.pk], "select_across": "1"}
    asked = admin_client.post(ORDERS, sent)
    assert asked.context["ids"] == str(first.timeouts.get().pk)
    assert not list(get_messages(asked.wsgi_request))


def test_an_action_on_more_objects_with_timeouts_than_a_page_takes_says_so(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "MAX_ROWS", 2)
    chosen = orders(3)
    sent = {"action": "cancel_timeouts", "_selected_action": [order.pk for order in chosen]}
    asked = admin_client.post(ORDERS, sent)
    assert asked.context["count"] == 2
    assert "Only the first 2 are included" in str(next(iter(get_messages(asked.wsgi_request))))


def test_an_action_on_a_child_finds_the_timeouts_of_its_parent(admin_client: Client) -> None:
    child = ExpressOrder.objects.create(status="new")
    row = dq.schedule_timeout(Order.objects.get(pk=child.pk), "remind", hours=1)
    sent = {"action": "cancel_timeouts", "_selected_action": [child.pk]}
    assert admin_client.post("/admin/testapp/expressorder/", sent).context["ids"] == str(row.pk)


def test_a_site_without_the_pages_of_timeouts_offers_no_actions(admin_client: Client) -> None:
    (order,) = orders(1)
    listed = admin_client.get("/without/testapp/order/").content.decode()
    assert "data-delayq-due" in listed and "cancel_timeouts" not in listed
    sent = {"action": "cancel_timeouts", "_selected_action": [order.pk]}
    assert admin_client.post("/without/testapp/order/", sent).status_code == 302
    assert "cancel_timeouts" in admin_client.get("/elsewhere/testapp/order/").content.decode()


def test_a_site_with_timeouts_or_policies_alone_links_to_no_page_that_it_lacks(admin_client: Client) -> None:
    orders(1)
    policy = dq.get_policy("testapp.order.remind")
    brake_rail.pause_by_brake(policy, Guards(brake=dq.Brake(50, timedelta(minutes=10))), 51, "default")
    listed = admin_client.get("/elsewhere/django_delayq/timeout/").content.decode()
    assert "has paused it." in listed and ">Resume<" not in listed
    policies = admin_client.get("/policies/django_delayq/policycontrol/").content.decode()
    assert "has paused it." in policies and "/policycontrol/testapp.order.remind/resume/" in policies
    assert "<dd>1</dd>" in policies, "the number of pending timeouts is not a link"


def test_an_operation_without_a_place_to_return_to_stays_in_its_own_site(admin_client: Client) -> None:
    (order,) = orders(1)
    form = {"ids": order.timeouts.get().pk, "confirmed": "yes", "reason": "asked"}
    done: Any = admin_client.post("/elsewhere/django_delayq/timeout/operate/cancel/", form)
    assert done.url == "/elsewhere/django_delayq/timeout/"


def test_an_object_links_to_its_page_where_the_visitor_may_see_it(clerk: Callable[..., Client]) -> None:
    (order,) = orders(1)
    listed = "/admin/django_delayq/timeout/"
    assert page_of(order) in clerk("view_order", "view_timeout").get(listed).content.decode()
    assert page_of(order) not in clerk("view_timeout").get(listed).content.decode()


def test_a_model_without_policies_may_have_the_mixin_too(admin_client: Client) -> None:
    Plain.objects.create(name="x")
    assert admin_client.get("/admin/testapp/plain/").status_code == 200


@override_settings(USE_TZ=False)
def test_without_time_zones_the_pages_show_local_times_all_the_same(admin_client: Client) -> None:
    assert admin_client.get("/admin/django_delayq/timeout/?due_at__year=2026").status_code == 200
