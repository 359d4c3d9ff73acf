"""The pages that ask for confirmation: in each language two buttons, of which one acts and one goes back."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone, translation
from django.utils.html import strip_tags

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.operations.registry import POLICY_OPERATIONS, TIMEOUT_OPERATIONS
from tests.integration.admin.conftest import DETAIL, LIST, OPERATION
from tests.testapp.models import Order, Parcel
from tools.messages import LANGUAGES

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db
OPERATE = "admin:django_delayq_policycontrol_operate"
SELECTED = "admin:django_delayq_policycontrol_operate_selected"
POLICIES = "admin:django_delayq_policycontrol_changelist"
LABEL = "testapp.order.cancel_unpaid"
ABORT = {
    *("cancel", "abort", "abbrechen", "nein", "cancelar", "no", "annuler", "non", "não", "отмена", "отменить", "нет"),
    *("取消", "إلغاء", "لا"),
}
"""What buttons of dialogs say in order to do nothing. The button of an operation must not read like that."""


@pytest.fixture
def browser(admin_client: Client, settings: Settings) -> Iterator[Client]:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    with translation.override(translation.get_language()):
        yield admin_client


@pytest.fixture
def rows() -> list[Timeout]:
    orders = [Order.objects.create(status="new") for _ in range(3)]
    return [dq.schedule_timeout(order, "remind", hours=1) for order in orders]


def buttons(answer: Any) -> list[str]:
    """Return what the buttons of a page say, and the link beside them."""
    (row,) = re.findall(r'(?s)<div class="submit-row">(.*?)</div>', answer.content.decode())
    found = re.findall(r'(?s)<input type="submit"[^>]*?value="([^"]*)"|<a [^>]*>(.*?)</a>', row)
    return [html.unescape(value or text).strip() for value, text in found]


def ambiguities(act: str, *others: str) -> list[str]:
    """Return what makes a reader ask which button does it. The last of `others` goes back."""
    *choose_again, back = (each.casefold() for each in others)
    acting = [act.casefold(), *choose_again]
    found = [f"{each} reads like leaving" for each in acting if each.strip(".!") in ABORT]
    if not ABORT.isdisjoint(re.split(r"[\s,]+", back)):
        found.append(f"{back} reads like the operation")
    found += [f"{each} begins like {back}" for each in acting if each.startswith(back)]
    return found + ["two are the same"] * (len({*acting, back}) < len(acting) + 1)


@pytest.mark.parametrize(
    "said",
    [
        ("Abbrechen", "Nein, bitte abbrechen"),
        ("Timeout aufheben", "Nein, bitte abbrechen"),
        ("Отменить", "Нет, отменить и вернуться к выбору"),
        ("Отменить 1 таймаут", "Вернуться и отменить"),
        ("Volver a disparar el plazo", "Volver"),
        ("Cancel", "Back"),
    ],
)
def test_a_pair_of_which_both_may_mean_abort_is_noticed(said: tuple[str, str]) -> None:
    assert ambiguities(*said)
    assert ambiguities("Cancel the timeout", "Back") == []


def words(answer: Any) -> str:
    return " ".join(html.unescape(strip_tags(answer.content.decode())).split())


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_no_page_has_two_buttons_that_both_mean_abort(browser: Client, rows: list[Timeout], language: str) -> None:
    code, ids = translation.to_language(language), ",".join(str(row.pk) for row in rows)
    addresses = [f"{reverse(OPERATION, args=[name])}?ids={ids}" for name in TIMEOUT_OPERATIONS]
    addresses += [f"{reverse(OPERATION, args=[name])}?ids={rows[0].pk}" for name in TIMEOUT_OPERATIONS]
    addresses += [reverse(OPERATE, args=[LABEL, name]) for name in POLICY_OPERATIONS]
    addresses += [f"{reverse(SELECTED, args=[name])}?all=1" for name in ("pause", "hold", "resume")]
    answers = {each: browser.get(each, headers={"accept-language": code}) for each in addresses}
    preview = {"amount": "5", "unit": "minutes", "mode": "keep", "reason": "x"}
    delay = reverse(OPERATE, args=[LABEL, "delay"])
    answers[f"{delay} preview"] = browser.post(delay, preview, headers={"accept-language": code})
    later = {"ids": ids, "at": "2099-01-01T00:00", "reason": "x"}
    other = reverse(OPERATION, args=["reschedule"])
    answers[f"{other} preview"] = browser.post(other, later, headers={"accept-language": code})
    for address, answer in answers.items():
        assert answer.status_code == 200 and answer.headers["content-language"] == code
        *acting, back = buttons(answer)  # without one that acts where nothing would change
        assert not address.endswith("preview") or len(acting) == 2, address
        assert not acting or ambiguities(*acting, back) == [], address
        assert ".." not in words(answer), "an abbreviation at the end of a sentence"
        for label in re.findall(r'(?s)<label for="id_[^>]*>(.*?)</label>', answer.content.decode()):
            assert label.endswith(translation.gettext(":")), "the colon of the language"


def test_a_preview_repeats_what_was_entered_and_mentions_no_next_page(browser: Client, rows: list[Timeout]) -> None:
    given = {"ids": str(rows[0].pk), "reason": "asked for"}
    address = reverse(OPERATION, args=["reschedule"])
    at = words(browser.post(address, given | {"at": "2099-01-01T00:00"}))
    earlier = words(browser.post(address, given | {"amount": "90", "unit": "minutes", "direction": "earlier"}))
    delay = reverse(OPERATE, args=[LABEL, "delay"])
    other = words(browser.post(delay, {"amount": "5", "unit": "minutes", "mode": "shift", "reason": "asked for"}))
    assert "Deadline2099-01-01 00:00:00Reasonasked for Consequences" in at
    assert "Deadline1 h 30 min, earlierReasonasked for Consequences" in earlier
    assert "Pending deadlinesshift: each moves by the differenceReasonasked for" in other
    assert not any("next page" in text for text in (at, earlier, other))
    assert "next page" in words(browser.get(delay))


def test_a_policy_is_quoted_as_the_language_quotes(browser: Client) -> None:
    resume = reverse(OPERATE, args=[LABEL, "resume"])
    for code, quoted in (("de", f"„{LABEL}“"), ("ru", f"«{LABEL}»"), ("zh-hant", f"「{LABEL}」")):
        said = browser.post(resume, {"reason": "x"}, headers={"accept-language": code}, follow=True)
        assert quoted in words(said)


def test_a_button_names_its_action_and_its_object(browser: Client, rows: list[Timeout]) -> None:
    one, three = str(rows[0].pk), ",".join(str(row.pk) for row in rows)
    cancel = reverse(OPERATION, args=["cancel"])
    assert buttons(browser.get(f"{cancel}?ids={one}")) == ["Cancel the timeout", "Back"]
    assert buttons(browser.get(f"{cancel}?ids={three}")) == ["Cancel 3 timeouts", "Back"]
    assert buttons(browser.get(reverse(OPERATE, args=[LABEL, "pause"]))) == ["Pause the policy", "Back"]
    selected = f"{reverse(SELECTED, args=['pause'])}?policy={LABEL}&policy=testapp.order.remind"
    assert buttons(browser.get(selected)) == ["Pause 2 policies", "Back"]
    page = browser.get(reverse(DETAIL, args=[one])).content.decode()
    assert ">Cancel the timeout</a>" in page and ">Cancel</a>" not in page


def test_breadcrumbs_lead_to_the_list_the_timeout_and_the_policies(browser: Client, rows: list[Timeout]) -> None:
    one, many = str(rows[0].pk), ",".join(str(row.pk) for row in rows)
    app = reverse("admin:app_list", args=["django_delayq"])
    trails = {
        f"{reverse(OPERATION, args=['cancel'])}?ids={one}": [app, reverse(LIST), reverse(DETAIL, args=[one])],
        f"{reverse(OPERATION, args=['cancel'])}?ids={many}": [app, reverse(LIST)],
        reverse(OPERATE, args=[LABEL, "hold"]): [app, reverse(POLICIES)],
    }
    for address, links in trails.items():
        (trail,) = re.findall(r'(?s)<div class="breadcrumbs">(.*?)</div>', browser.get(address).content.decode())
        assert re.findall(r'href="([^"]*)"', trail) == [reverse("admin:index"), *links]
        assert all(browser.get(each).status_code == 200 for each in links)


def test_required_fields_are_marked_and_optional_ones_are_not(browser: Client, rows: list[Timeout]) -> None:
    page = browser.get(f"{reverse(OPERATION, args=['postpone'])}?ids={rows[0].pk}").content.decode()
    labels = dict(re.findall(r'(?s)<label for="id_(\w+)"[^>]*>(.*?)</label>', page))
    assert {name: "(required)" in text for name, text in labels.items()} == {
        **dict.fromkeys(("amount", "unit", "at"), False),
        "reason": True,
    }


@pytest.mark.parametrize(
    ("since", "after", "is_said"),
    [
        ("paid_at", timedelta(0), True),
        ("paid_at", timedelta(hours=-1), True),
        ("paid_at", lambda order: timedelta(0), False),
        (lambda order: order.paid_at, timedelta(0), False),
    ],
    ids=["column", "before a column", "computed delay", "computed start"],
)
def test_where_a_deadline_follows_a_column_the_pages_that_move_it_say_so(
    browser: Client, declare: Any, since: Any, after: Any, is_said: bool
) -> None:
    declare(Order, name="pay", since=since, after=after)
    order = Order.objects.create(paid_at=timezone.now() + timedelta(hours=5))
    row = dq.schedule_timeout(order, "pay", hours=5)
    other = dq.schedule_timeout(Parcel.objects.create(), "chase", hours=1)
    sentence = "testapp.order.pay follow the field “paid_at” of the object, which does not move with them."
    ids = f"{row.pk},{other.pk}"
    for address, has_sentence in (
        (f"{reverse(OPERATION, args=['postpone'])}?ids={ids}", is_said),
        (f"{reverse(OPERATION, args=['reschedule'])}?ids={ids}", is_said),
        (f"{reverse(OPERATION, args=['postpone'])}?ids={other.pk}", False),
        (f"{reverse(SELECTED, args=['hold'])}?policy=testapp.order.pay", is_said),
        (f"{reverse(SELECTED, args=['pause'])}?policy=testapp.order.pay", False),
        (f"{reverse(OPERATION, args=['cancel'])}?ids={ids}", False),
        (reverse(OPERATE, args=["testapp.order.pay", "hold"]), is_said),
        (reverse(OPERATE, args=["testapp.order.pay", "resume"]), False),  # it is not on hold
        (reverse(OPERATE, args=["testapp.order.pay", "pause"]), False),
    ):
        assert (sentence in words(browser.get(address))) is has_sentence, address
