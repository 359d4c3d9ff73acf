"""The admin in Hebrew, without a catalogue of the library: pages run from right to left, English reads as written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.admin.conftest import DESKTOP, FIRST_PAGE, LABELS, LIST, PHONE, POLICIES, Admin, Stock, served_as
from tests.shop.conftest import Shop

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]

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
STYLES = """
const [selector, pseudo] = arguments;
const node = document.querySelector(selector), style = getComputedStyle(node, pseudo);
const box = node.getBoundingClientRect();
return {left: style.borderLeftWidth, right: style.borderRightWidth, insetRight: style.right, direction: style.direction,
        paddingRight: style.paddingRight, boxLeft: box.left, boxRight: box.right};
"""


@dataclass
class Page:
    """A page in the browser, and where things are on it."""

    admin: Admin

    def ends(self, selector: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.admin.browser.execute_script(ENDS, selector)
        assert found, f"nothing is {selector}"
        return found

    def reads_from_left_to_right(self, selector: str) -> None:
        for text in self.ends(selector):
            assert text["first"] < text["last"] or text["top"] < text["end"] or len(text["text"]) == 1, text

    def style(self, selector: str, pseudo: str | None = None) -> dict[str, Any]:
        found: dict[str, Any] = self.admin.browser.execute_script(STYLES, selector, pseudo)
        return found


@pytest.fixture(scope="module")
def hebrew_address(calm_shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the same shop in Hebrew, for which Django has translations and we have none."""
    yield from served_as(calm_shop, tmp_path_factory.mktemp("hebrew"), DELAYQ_TEST_LANGUAGE="he")


@pytest.fixture
def page(admin: Admin, hebrew_address: str, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(admin.shop, "url", hebrew_address)
    admin.open(LIST)
    assert admin.browser.execute_script("return document.documentElement.dir") == "rtl"
    return Page(admin)


def test_datetimes_labels_and_spans_of_the_list_read_as_written(page: Page) -> None:
    page.admin.open(f"{LIST}?state__exact=pending")  # the settled ones of another test would fill the first page
    for selector in ("#result_list time", "#result_list bdi", ".delayq-left"):
        page.reads_from_left_to_right(selector)
    badge = page.style(".delayq-badge")
    assert (badge["left"], badge["right"]) == ("1px", "4px"), "the coloured edge is where the line begins"
    assert page.admin.faults() == []


def test_the_story_and_the_tracebacks_of_a_timeout_read_as_written(page: Page, stock: Stock) -> None:
    page.admin.open(f"{LIST}{stock.dead[0][1]}/change/")
    for selector in ("time", ".delayq-raw", ".delayq-failure summary bdi", ".delayq-story bdi"):
        page.reads_from_left_to_right(selector)
    event = page.style(".delayq-story li")
    assert (event["left"], event["right"], event["paddingRight"]) == ("0px", "2px", "20px")
    assert page.style(".delayq-story li", "::before")["insetRight"] == "-6px", "the dot is on the line"
    assert page.style(".delayq-raw")["direction"] == "ltr"
    assert page.admin.faults() == []


def test_the_plot_of_a_report_keeps_its_labels_and_its_days_from_left_to_right(page: Page, history: None) -> None:
    page.admin.open(f"{POLICIES}shop.order.cancel_unpaid/report/")
    labels = page.admin.browser.execute_script(LABELS)
    assert all(left > -1 and right > -1 for _, left, right in labels), "none is cut off"
    days = labels[1:]
    assert len(days) == 4 and days == sorted(days), "by their names and their places"
    for selector in (".delayq-chart svg text", "#content-main tbody th bdi"):
        page.reads_from_left_to_right(selector)
    assert page.admin.faults() == []


@pytest.mark.usefixtures("history")
def test_on_a_phone_no_page_is_wider_than_the_screen(page: Page) -> None:
    page.admin.show_on(PHONE)
    for path in (POLICIES, f"{POLICIES}shop.order.cancel_unpaid/report/", LIST, f"{FIRST_PAGE}policychange/"):
        assert page.admin.inspect(path) == [], path
    page.admin.show_on(DESKTOP)
