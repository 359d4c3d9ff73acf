"""A page that was opened before its row has changed: saving it would write what the row was then."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.utils.html import escape

from django_delayq.admin import mixins
from tests.integration.admin.conftest import Staff, source
from tests.support.purchases import Declare
from tests.testapp.market import Payment, Purchase
from tests.testapp.timeouts import LOSE_UNPAID, lose

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.integration.admin.sites")]


@pytest.fixture
def payment(declare: Declare) -> Payment:
    declare(Purchase, lose, name="lose_unpaid", **LOSE_UNPAID)
    return Payment.objects.create(purchase=Purchase.objects.create())


def page_of(obj: Any) -> str:
    return f"/admin/testapp/{obj._meta.model_name}/{obj.pk}/change/?_changelist_filters=q%3Dx"


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
    opened = admin_client.get(page_of(purchase))
    change(payment)
    before = list(Purchase.objects.values()), list(Payment.objects.values())
    answer = posted(admin_client, opened, **values)
    assert answer.status_code == (200 if is_refused else 302)
    if is_refused:
        assert escape(str(mixins.STALE)) in answer.content.decode()
        assert before == (list(Purchase.objects.values()), list(Payment.objects.values()))
        answer = posted(admin_client, admin_client.get(page_of(purchase)), **values)
    assert answer.status_code == 302
    assert answer["Location"] == "/admin/testapp/purchase/?q=x"
    assert Purchase.objects.get(pk=purchase.pk).status == "waiting"  # type: ignore[union-attr]


def test_the_page_of_a_watched_row_is_refused_too_and_reloaded_it_is_fresh(
    admin_client: Client, payment: Payment
) -> None:
    opened = admin_client.get(page_of(payment))
    Payment.objects.update(status="void")
    refused = posted(admin_client, opened, status="captured")
    assert refused.status_code == 200 and Payment.objects.get().status == "void"
    address = f"{refused.request['PATH_INFO']}?{refused.request['QUERY_STRING']}"
    assert posted(admin_client, admin_client.get(address), status="captured").status_code == 302
    without_version = admin_client.post(page_of(payment), {"status": "captured"})
    assert without_version.status_code == 302


def test_a_visitor_who_may_only_view_sees_no_version_and_locks_nothing(payment: Payment, staff: Staff) -> None:
    client = staff("view_payment", "view_purchase")
    for obj in (payment, payment.purchase):
        assert mixins.VERSION not in source(client, page_of(obj))
        assert client.post(page_of(obj), {"status": "captured"}).status_code == 403
    assert Payment.objects.get().status == "new"
