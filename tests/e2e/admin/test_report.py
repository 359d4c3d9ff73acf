"""The report of a policy in a real browser: its plot, on each screen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.e2e.admin.conftest import DESKTOP, LABELS, PHONE, POLICIES, Admin, each_screen

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("history")]
REPORT = f"{POLICIES}shop.order.cancel_unpaid/report/"
BARS = """
return [...document.querySelectorAll(".delayq-chart g")].map((bar) => {
  const [inTime, other] = [...bar.querySelectorAll("rect")].map((rect) => rect.getBoundingClientRect());
  return {title: bar.querySelector("title").textContent, other: other.height, inTime: inTime.height,
          isStacked: Math.abs(other.bottom - inTime.top) < 1, left: inTime.left, right: inTime.right};
});
"""


@each_screen
def test_the_report_has_no_faults_for_axe_and_no_screen_is_too_narrow(admin: Admin, width: int, dark: bool) -> None:
    admin.show_on(width, dark=dark)
    for asked in ("", "?days=7", "?by=month&days=365", "?by=field&field=customer__name", "?by=field&field=nothing"):
        assert admin.inspect(REPORT + asked) == [], asked


def test_the_bars_are_as_high_as_the_table_says_and_lie_within_a_phone(admin: Admin) -> None:
    admin.show_on(PHONE)
    admin.open(REPORT)
    bars: list[dict[str, Any]] = admin.browser.execute_script(BARS)
    assert len(bars) == 30
    assert all(bar["isStacked"] and 0 <= bar["left"] < bar["right"] <= PHONE for bar in bars)
    lines = [row.text.split() for row in admin.browser.find_elements(By.CSS_SELECTOR, "#content-main tbody tr")]
    shown = {bar["title"].partition(":")[0]: bar for bar in bars}
    highest = max(int(cells[1]) for cells in lines)
    full = max(bar["other"] + bar["inTime"] for bar in bars)
    assert full > 10
    assert len(lines) >= 29
    for day, rounds, in_time, *_ in lines:
        assert shown[day]["title"] == f"{day}: in time {in_time}, other rounds {int(rounds) - int(in_time)}"
        assert shown[day]["inTime"] == pytest.approx(full * int(in_time) / highest, abs=1)
        assert shown[day]["other"] == pytest.approx(full * (int(rounds) - int(in_time)) / highest, abs=1)


def test_no_label_of_the_plot_is_cut_off_or_lies_on_another(admin: Admin) -> None:
    for width, asked in ((DESKTOP, "days=30"), (PHONE, "days=90")):
        admin.show_on(width)
        admin.open(f"{REPORT}?{asked}")
        _, *labels = admin.browser.execute_script(LABELS)
        assert 1 <= len(labels) <= 4
        assert all(left > -1 and right > -1 for _, left, right in labels), labels
        assert all(before[2] > after[2] for before, after in itertools.pairwise(labels))
        drawn = admin.browser.execute_script("return document.querySelector('.delayq-chart svg').clientWidth")
        assert all(drawn - before[2] < after[1] for before, after in itertools.pairwise(labels)), labels
