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

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.operations.registry import OPERATIONS, POLICY_OPERATIONS, TIMEOUT_OPERATIONS
from tests.integration.admin.conftest import source, words
from tests.integration.admin.places import DETAIL, LIST, OPERATE, OPERATION, POLICIES, SELECTED, UNPAID
from tests.testapp.models import Order, Parcel
from tools.messages import LANGUAGES

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db
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


def of_rows(operation: str, *rows: Timeout) -> str:
    return f"{reverse(OPERATION, args=[operation])}?ids={','.join(str(row.pk) for row in rows)}"


def of_policy(operation: str, label: str = UNPAID) -> str:
    return reverse(OPERATE, args=[label, operation])


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


def test_a_pair_of_which_both_may_mean_abort_is_noticed() -> None:
    for pair in (
        *(("Abbrechen", "Nein, bitte abbrechen"), ("Timeout aufheben", "Nein, bitte abbrechen"), ("Cancel", "Back")),
        *(("Отменить 1 таймаут", "Вернуться и отменить"), ("Volver a disparar el plazo", "Volver")),
    ):
        assert ambiguities(*pair), pair
    assert ambiguities("Cancel the timeout", "Back") == []


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_no_two_buttons_of_a_page_both_mean_abort(language: str) -> None:
    with translation.override(translation.to_language(language)):
        show, again, back = (translation.gettext(text) for text in ("Show the consequences", "Choose again", "Back"))
        acts = [operation.button_for(count) for operation in OPERATIONS.values() for count in (1, 3)]
        assert [found for act in (show, *acts) if (found := ambiguities(act, again, back))] == []


@pytest.mark.parametrize("language", ["de", "fr"])
def test_sentences_and_labels_end_as_they_do_in_the_language(
    browser: Client, rows: list[Timeout], language: str
) -> None:
    code = {"accept-language": language}
    addresses = [of_rows("cancel", *rows), *(of_rows(name, rows[0]) for name in TIMEOUT_OPERATIONS)]
    addresses += [of_policy(name) for name in POLICY_OPERATIONS]
    addresses += [f"{reverse(SELECTED, args=[name])}?all=1" for name in ("pause", "hold", "resume")]
    answers = {each: browser.get(each, headers=code) for each in addresses}
    asked = {"ids": rows[0].pk, "reason": "x", "amount": "5", "unit": "minutes", "mode": "keep"}
    for address, more in ((of_policy("delay"), asked), (of_rows("reschedule"), {**asked, "direction": "later"})):
        preview = answers[f"{address} preview"] = browser.post(address, more, headers=code)
        assert len(buttons(preview)) == 3
    for address, answer in answers.items():
        assert answer.status_code == 200 and answer.headers["content-language"] == language
        assert ".." not in words(answer), "an abbreviation at the end of a sentence"
        for label in re.findall(r'(?s)<label for="id_[^>]*>(.*?)</label>', answer.content.decode()):
            assert label.endswith(translation.gettext(":")), address


def test_a_preview_repeats_what_was_entered_and_mentions_no_next_page(browser: Client, rows: list[Timeout]) -> None:
    given = {"ids": str(rows[0].pk), "reason": "asked for"}
    address, delay = reverse(OPERATION, args=["reschedule"]), of_policy("delay")
    at = words(browser.post(address, given | {"at": "2099-01-01T00:00"}))
    earlier = words(browser.post(address, given | {"amount": "90", "unit": "minutes", "direction": "earlier"}))
    other = words(browser.post(delay, {"amount": "5", "unit": "minutes", "mode": "shift", "reason": "asked for"}))
    assert "Deadline2099-01-01 00:00:00Reasonasked for Consequences" in at
    assert "Deadline1 h 30 min, earlierReasonasked for Consequences" in earlier
    assert "Pending deadlinesshift: each moves by the differenceReasonasked for" in other
    assert not any("next page" in text for text in (at, earlier, other))
    assert "next page" in words(browser.get(delay))


def test_a_policy_is_quoted_as_the_language_quotes(browser: Client) -> None:
    for code, quoted in (("de", f"„{UNPAID}“"), ("ru", f"«{UNPAID}»"), ("zh-hant", f"「{UNPAID}」")):
        said = browser.post(of_policy("resume"), {"reason": "x"}, headers={"accept-language": code}, follow=True)
        assert quoted in words(said)


def test_a_button_names_its_action_and_object_and_required_fields_are_marked(
    browser: Client, rows: list[Timeout]
) -> None:
    selected = f"{reverse(SELECTED, args=['pause'])}?policy={UNPAID}&policy=testapp.order.remind"
    for address, said in (
        (of_rows("cancel", rows[0]), "Cancel the timeout"),
        (of_rows("cancel", *rows), "Cancel 3 timeouts"),
        (of_policy("pause"), "Pause the policy"),
        (selected, "Pause 2 policies"),
    ):
        assert buttons(browser.get(address)) == [said, "Back"]
    page = source(browser, reverse(DETAIL, args=[rows[0].pk]))
    assert ">Cancel the timeout</a>" in page and ">Cancel</a>" not in page
    labels = re.findall(r'(?s)<label for="id_(\w+)"[^>]*>(.*?)</label>', source(browser, of_rows("postpone", rows[0])))
    assert [name for name, text in labels if "(required)" in text] == ["reason"]
    assert {name for name, _ in labels} == {"amount", "unit", "at", "reason"}


def test_breadcrumbs_lead_to_the_list_the_timeout_and_the_policies(browser: Client, rows: list[Timeout]) -> None:
    app = reverse("admin:app_list", args=["django_delayq"])
    trails = {
        of_rows("cancel", rows[0]): [app, reverse(LIST), reverse(DETAIL, args=[rows[0].pk])],
        of_rows("cancel", *rows): [app, reverse(LIST)],
        of_policy("hold"): [app, reverse(POLICIES)],
    }
    for address, links in trails.items():
        (trail,) = re.findall(r'(?s)<div class="breadcrumbs">(.*?)</div>', source(browser, address))
        assert re.findall(r'href="([^"]*)"', trail) == [reverse("admin:index"), *links]
        assert all(browser.get(each).status_code == 200 for each in links)


@pytest.mark.parametrize(
    ("since", "after", "is_said"),
    [
        ("paid_at", timedelta(hours=-1), True),
        ("paid_at", lambda order: timedelta(0), False),
        (lambda order: order.paid_at, timedelta(0), False),
    ],
    ids=["before a column", "computed delay", "computed start"],
)
def test_where_a_deadline_follows_a_column_the_pages_that_move_it_say_so(
    browser: Client, declare: Any, since: Any, after: Any, is_said: bool
) -> None:
    label = declare(Order, name="pay", since=since, after=after).label
    order = Order.objects.create(paid_at=timezone.now() + timedelta(hours=5))
    row = dq.schedule_timeout(order, "pay", hours=5)
    other = dq.schedule_timeout(Parcel.objects.create(), "chase", hours=1)
    sentence = "testapp.order.pay follow the field “paid_at” of the object, which does not move with them."
    for address, has_sentence in (
        *((of_rows(name, row, other), is_said) for name in ("postpone", "reschedule")),
        *((of_rows("postpone", other), False), (of_rows("cancel", row, other), False)),
        *(
            (f"{reverse(SELECTED, args=[name])}?policy={label}", is_said and name == "hold")
            for name in ("hold", "pause")
        ),
        *((of_policy(name, label), is_said and name == "hold") for name in ("hold", "resume", "pause")),
    ):
        assert (sentence in words(browser.get(address))) is has_sentence, address
