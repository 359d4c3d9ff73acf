"""The admin in headless Chromium: actions, the countdown, the keyboard, axe-core, themes, and from right to left."""

from __future__ import annotations

import importlib.util
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from django_delayq.admin.render import until
from tests.e2e.admin.conftest import FIRST_PAGE, LIST, POLICIES, Admin, Stock, each_screen, served_as
from tests.shop.conftest import on_sqlite

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LABEL = "shop.order.cancel_unpaid"
DJANGOS_OWN = (".datetime",)
"""Fields whose labels axe-core does not accept."""
CONSEQUENCES = "Show the consequences"


def detail(timeout: int) -> str:
    return f"{LIST}{timeout}/change/"


def test_ticked_timeouts_are_postponed_after_a_look_at_what_it_means(admin: Admin, stock: Stock) -> None:
    """What each action does: `tests/integration/admin`."""
    taken, address = [stock.pending.pop()[1], stock.pending.pop()[1]], f"{LIST}?state__exact=pending"
    admin.open(address)
    admin.tick(*taken)
    admin.choose("action", "postpone_timeouts")
    for words in ("Go", "Back"):  # the first time, a person changes their mind
        admin.press(words)
    admin.tick(*taken)
    admin.choose("action", "postpone_timeouts")
    admin.press("Go")
    admin.type("amount", "2")
    admin.choose("unit", "days")
    admin.press(CONSEQUENCES)  # without a reason: the page comes back
    admin.wait_for("This field is required.")
    admin.type("reason", "the customer called")
    admin.press(CONSEQUENCES)
    admin.press("Postpone 2 timeouts")
    assert admin.message() == "2 timeouts were postponed."
    assert admin.browser.current_url.endswith(address)
    for pk in taken:
        admin.open(detail(pk))
        assert admin.state_shown().endswith("pending")
        admin.wait_for("the customer called", "by admin:boss")


def test_the_keyboard_is_enough(admin: Admin, stock: Stock) -> None:
    admin.open(f"{LIST}operate/cancel/?ids={stock.pending.pop()[1]}")
    for _ in range(60):
        if admin.browser.switch_to.active_element.get_attribute("name") == "reason":
            break
        admin.browser.switch_to.active_element.send_keys(Keys.TAB)
    field = admin.browser.switch_to.active_element
    assert field.get_attribute("name") == "reason"
    field.send_keys("no mouse at hand", Keys.ENTER)
    admin.wait_for("1 timeout was cancelled.")


def test_the_countdown_runs_by_the_servers_clock_and_in_pythons_words(admin: Admin, stock: Stock) -> None:
    wrong = "Date.now = () => 0; Date.prototype.getTime = () => 0;"
    added = admin.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": wrong})
    try:
        admin.open(detail(stock.pending[0][1]))
        assert admin.browser.execute_script("return Date.now()") == 0
        shown = admin.browser.find_element(By.CSS_SELECTOR, ".field-next_attempt .delayq-left")
        found = re.fullmatch(r"in (\d+) min", shown.text)  # an hour, less what the tests before this one took
        assert found and int(found[1]) <= 59, shown.text
        lengths = [-200_000, -7_300, -725, -65, -5, 0, 5, 65, 599, 601, 725, 3_700, 90_000, 200_000]
        admin.browser.execute_script(
            """
            const model = document.querySelector(".delayq-left");
            for (const seconds of arguments[0]) {
              const copy = model.cloneNode(true);
              copy.dataset.delayqDue = Number(model.dataset.delayqNow) + seconds * 1000 + 500;
              copy.className = "copy delayq-left";
              document.body.append(copy);
            }
            """,
            lengths,
        )
        admin.wait_for("2 d 7 h late")
        copies = [copy.text for copy in admin.browser.find_elements(By.CSS_SELECTOR, ".copy")]
        page_age = admin.browser.execute_script("return performance.now() / 1000")
    finally:
        admin.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for seconds, text in zip(lengths, copies, strict=True):
        possible = {until(now + timedelta(seconds=seconds + 0.5 - age), now) for age in range(int(page_age) + 3)}
        possible |= {until(now + timedelta(seconds=seconds - age), now) for age in range(int(page_age) + 3)}
        assert text in possible, (seconds, text, possible)


def test_a_double_click_on_a_confirmation_sends_it_once(admin: Admin, stock: Stock) -> None:
    """Otherwise both requests arrive, and the second one postpones a second time, or fires again a second time."""
    admin.open(f"{LIST}operate/postpone/?ids={stock.pending[0][1]}")
    event = 'new SubmitEvent("submit", {bubbles: true, cancelable: true})'
    submit = f'return document.querySelector("#content-main form").dispatchEvent({event})'
    assert [admin.browser.execute_script(submit) for _ in range(2)] == [True, False]


@each_screen
@pytest.mark.usefixtures("history")
def test_axe_finds_no_serious_fault_on_our_pages(admin: Admin, stock: Stock, width: int, dark: bool) -> None:
    admin.show_on(width, dark=dark)
    order, timeout, _ = stock.pending[0]
    pages = [  # of those with the same parts one
        LIST,
        f"{LIST}?due_at__gte=2026-01-01T00:00:00Z&state__exact=pending",
        f"{LIST}?q=nothing",
        detail(timeout),
        detail(stock.dead[0][1]),
        f"{LIST}operate/postpone/?ids={timeout}",
        POLICIES,
        FIRST_PAGE,
        *(f"{POLICIES}{LABEL}/{stop}/" for stop in ("pause", "late", "brake", "shadow")),
        f"{POLICIES}selected/hold/?all=1",
        "/admin/django_delayq/policychange/",
        *(f"{POLICIES}{LABEL}/report/{asked}" for asked in ("", "?by=month&days=365", "?by=field&field=nothing")),
    ]
    found = {page: admin.inspect(page) for page in pages}
    for page in ("/admin/shop/order/", f"/admin/shop/order/{order}/change/"):
        found[page] = admin.inspect(page, *DJANGOS_OWN)
    admin.open(FIRST_PAGE)
    admin.unfold()
    found["the first page with all that it has"] = admin.faults()
    admin.open(f"{POLICIES}{LABEL}/delay/")
    admin.press("Show the consequences")
    found["what is wrong with the form"] = admin.faults()
    admin.type("amount", "5")
    admin.type("reason", "to see it")
    admin.press("Show the consequences")
    found["what it means"] = admin.faults()
    assert {page: faults for page, faults in found.items() if faults} == {}


def test_axe_would_notice_a_fault(admin: Admin) -> None:
    admin.open(f"{POLICIES}{LABEL}/pause/")
    admin.browser.execute_script("document.querySelector('label[for=id_reason]').remove()")
    assert any("label" in fault for fault in admin.faults())


# With another theme, and in another language

STYLE = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
EXCESS = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
EDGE = "borderInlineStartColor"


@on_sqlite
@pytest.mark.parametrize("theme", ["unfold", "jazzmin"])
def test_an_action_is_confirmed_and_the_pages_have_their_buttons_and_colours(
    admin: Admin, stock: Stock, theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(theme) is None:
        pytest.skip(f"{theme} is not installed")
    pending, dead = stock.pending.pop()[1], stock.dead[0][1]
    with served_as(admin.shop, tmp_path, DELAYQ_TEST_THEME=theme) as url:
        monkeypatch.setattr(admin.shop, "url", url)
        admin.open(f"{LIST}?state__exact=pending")
        row = admin.browser.find_element(By.CSS_SELECTOR, f"input[name=_selected_action][value='{pending}']")
        admin.browser.execute_script("arguments[0].click()", row)  # a bar of the theme may cover it
        admin.browser.execute_script("document.querySelector('select[name=action]').value = 'cancel_timeouts'")
        admin.browser.find_element(By.CSS_SELECTOR, "button[name=index]").click()
        admin.wait_for("Cancel these timeouts?")
        admin.type("reason", "in another theme")
        admin.press("Cancel the timeout")
        admin.wait_for("1 timeout was cancelled.")
        admin.open(f"{LIST}?state__exact=cancelled")
        assert admin.browser.execute_script(STYLE, ".delayq-cancelled", EDGE) == "rgb(128, 128, 128)"
        admin.open(f"{LIST}{dead}/change/")
        for name in ("Cancel the timeout", "Retry the timeout", "Fire the timeout again"):
            button = admin.browser.find_element(By.XPATH, f"//a[normalize-space()='{name}']")
            assert button.is_displayed() and button.value_of_css_property("border-top-style") != "none"
        assert admin.browser.execute_script(STYLE, ".delayq-badge", EDGE) == "rgb(212, 63, 58)"
        admin.open(POLICIES)
        assert admin.browser.execute_script(STYLE, ".delayq-buttons a", "borderTopStyle") == "solid"
        assert admin.browser.execute_script(EXCESS) <= 0


READ_AS_WRITTEN = {
    f"{LIST}?state__exact=pending": ("#result_list time", "#result_list bdi", ".delayq-left"),
    LIST + "{dead}/change/": ("time", ".delayq-raw", ".delayq-failure summary bdi", ".delayq-story bdi"),
    f"{POLICIES}shop.order.cancel_unpaid/report/": (".delayq-chart svg text", "#content-main tbody th bdi"),
}
"""Pages, and what reads from left to right on them."""

# Where the first and the last character of an element's text are on the screen.
ENDS = """
const [selector] = arguments;
return [...document.querySelectorAll(selector)].filter((node) => node.textContent.trim()).map((node) => {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  const text = walker.nextNode();
  const at = (index) => {
    const range = document.createRange();
    range.setStart(text, index);
    range.setEnd(text, index + 1);
    return range.getBoundingClientRect();
  };
  const first = at(text.data.search(/\\S/)), last = at(text.data.trimEnd().length - 1);
  return {text: text.data.trim(), first: first.left, last: last.left, top: first.top, end: last.top};
});
"""


@pytest.mark.usefixtures("history")
def test_datetimes_labels_and_tracebacks_read_as_written(
    admin: Admin, stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Hebrew, for which Django has translations and we have none."""
    with served_as(admin.shop, tmp_path, DELAYQ_TEST_LANGUAGE="he") as url:
        monkeypatch.setattr(admin.shop, "url", url)
        for path, selectors in READ_AS_WRITTEN.items():
            admin.open(path.format(dead=stock.dead[0][1]))
            assert admin.browser.execute_script("return document.documentElement.dir") == "rtl"
            for selector in selectors:
                texts: list[dict[str, Any]] = admin.browser.execute_script(ENDS, selector)
                assert texts, f"nothing is {selector}"
                for text in texts:
                    assert text["first"] < text["last"] or text["top"] < text["end"] or len(text["text"]) == 1, text
