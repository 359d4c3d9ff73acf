"""The admin in Hebrew, without a catalogue of the library: pages run from right to left, English reads as written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.admin.conftest import DESKTOP, FIRST_PAGE, LIST, PHONE, POLICIES, Admin, Stock, served_as
from tests.shop.conftest import Shop

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("history")]
REPORT = f"{POLICIES}shop.order.cancel_unpaid/report/"
PAGES = {
    f"{LIST}?state__exact=pending": ("#result_list time", "#result_list bdi", ".delayq-left"),
    LIST + "{dead}/change/": ("time", ".delayq-raw", ".delayq-failure summary bdi", ".delayq-story bdi"),
    REPORT: (".delayq-chart svg text", "#content-main tbody th bdi"),
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
BORDERS = """
const style = getComputedStyle(document.querySelector(arguments[0]));
return [style.borderLeftWidth, style.borderRightWidth];
"""


@pytest.fixture(scope="module")
def hebrew_address(calm_shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the same shop in Hebrew, for which Django has translations and we have none."""
    yield from served_as(calm_shop, tmp_path_factory.mktemp("hebrew"), DELAYQ_TEST_LANGUAGE="he")


@pytest.fixture
def hebrew(admin: Admin, hebrew_address: str, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> Admin:
    monkeypatch.setattr(admin.shop, "url", hebrew_address)
    admin.open(LIST)
    assert admin.browser.execute_script("return document.documentElement.dir") == "rtl"
    return admin


@pytest.mark.parametrize("path", PAGES, ids=["list", "timeout", "report"])
def test_datetimes_labels_and_tracebacks_read_as_written(hebrew: Admin, stock: Stock, path: str) -> None:
    hebrew.open(path.format(dead=stock.dead[0][1]))
    for selector in PAGES[path]:
        texts: list[dict[str, Any]] = hebrew.browser.execute_script(ENDS, selector)
        assert texts, f"nothing is {selector}"
        for text in texts:
            assert text["first"] < text["last"] or text["top"] < text["end"] or len(text["text"]) == 1, text
    assert hebrew.faults() == []


def test_coloured_edges_are_where_lines_begin(hebrew: Admin, stock: Stock) -> None:
    for path, selector, widths in (
        (LIST, ".delayq-badge", ["1px", "4px"]),
        (f"{LIST}{stock.dead[0][1]}/change/", ".delayq-story li", ["0px", "2px"]),
    ):
        hebrew.open(path)
        assert hebrew.browser.execute_script(BORDERS, selector) == widths


def test_on_a_phone_no_page_is_wider_than_the_screen(hebrew: Admin) -> None:
    hebrew.show_on(PHONE)
    for path in (POLICIES, REPORT, LIST, f"{FIRST_PAGE}policychange/"):
        assert hebrew.inspect(path) == [], path
    hebrew.show_on(DESKTOP)
