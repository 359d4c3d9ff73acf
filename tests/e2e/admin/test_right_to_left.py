"""The admin in Hebrew, without a catalogue of the library: pages run from right to left, English reads as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.admin.conftest import LIST, POLICIES, Admin, Stock, served_as

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("history")]
PAGES = {
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


def test_datetimes_labels_and_tracebacks_read_as_written(
    admin: Admin, stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Hebrew, for which Django has translations and we have none."""
    for url in served_as(admin.shop, tmp_path, DELAYQ_TEST_LANGUAGE="he"):
        monkeypatch.setattr(admin.shop, "url", url)
        for path, selectors in PAGES.items():
            admin.open(path.format(dead=stock.dead[0][1]))
            assert admin.browser.execute_script("return document.documentElement.dir") == "rtl"
            for selector in selectors:
                texts: list[dict[str, Any]] = admin.browser.execute_script(ENDS, selector)
                assert texts, f"nothing is {selector}"
                for text in texts:
                    assert text["first"] < text["last"] or text["top"] < text["end"] or len(text["text"]) == 1, text
            assert admin.faults() == []
