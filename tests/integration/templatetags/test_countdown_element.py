"""`<delayq-countdown>` in a real browser: right by the server's clock, quiet, and content with a strict policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from tests.testapp.models import Order

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver import Chrome  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.django_db(transaction=True)]
PATIENCE_SECONDS = 60
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "window-size=900,700"),
)
# What a page sees when the visitor's clock is wrong; `shiftClock(ms)` sets it while the page is open.
WRONG_CLOCK = """
{
  const Real = Date;
  let shift = %d;
  window.shiftClock = (ms) => { shift = ms; };
  window.Date = class extends Real {
    constructor(...given) { given.length ? super(...given) : super(Real.now() + shift); }
    static now() { return Real.now() + shift; }
  };
}
"""
LISTEN = """
window.heard = [];
for (const name of ["delayq:due", "delayq:settled"])
  addEventListener(name, (event) => heard.push([name, event.detail && event.detail.state]));
addEventListener("DOMContentLoaded", () => {
  new MutationObserver(() => {
    const spoken = document.querySelector("[aria-live]");
    if (spoken && spoken.textContent && spoken.textContent !== heard.at(-1)) heard.push(spoken.textContent);
  }).observe(document.body, {subtree: true, childList: true, characterData: true});
});
"""


@pytest.fixture(scope="module")
def chrome(chromium: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser for all tests of this file; each opens a page of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location, driver = chromium
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


class Visit:
    """A page with the countdown of one order."""

    def __init__(self, chrome: Chrome, url: str, order: Order) -> None:
        self.chrome, self.url, self.order = chrome, url, order

    def open(self, query: str = "", clock_is_off_by: timedelta | None = None, script: bool = True) -> None:
        sources = [LISTEN, *([WRONG_CLOCK % (clock_is_off_by / timedelta(milliseconds=1))] if clock_is_off_by else [])]
        self.forget()
        self.injected = [
            self.cdp("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"] for source in sources
        ]
        self.cdp("Emulation.setScriptExecutionDisabled", value=not script)
        self.chrome.get(f"{self.url}/orders/{self.order.pk}/{query}")

    def forget(self) -> None:
        """Inject nothing any more into the next page."""
        for identifier in getattr(self, "injected", []):
            self.cdp("Page.removeScriptToEvaluateOnNewDocument", identifier=identifier)

    def close(self) -> None:
        self.forget()
        self.cdp("Emulation.setEmulatedMedia", features=[])
        self.cdp("Emulation.setScriptExecutionDisabled", value=False)
        self.chrome.get("about:blank")

    def ask(self, expression: str) -> Any:
        return self.chrome.execute_script(f"return {expression}")

    def come_back(self) -> None:
        """The visitor was in another tab."""
        self.ask("document.dispatchEvent(new Event('visibilitychange'))")

    @property
    def text(self) -> str:
        return str(self.ask("document.querySelector('delayq-countdown').innerText"))

    @property
    def heard(self) -> list[Any]:
        return cast("list[Any]", self.ask("window.heard || []"))

    def seconds_shown(self) -> int:
        text = self.text
        assert re.fullmatch(r"(\d\d:)?\d\d:\d\d", text), text
        total = 0
        for part in text.split(":"):
            total = 60 * total + int(part)
        return total

    def wait_for(self, condition: Callable[[], Any], words: str) -> None:
        def check(_: Chrome) -> bool:
            return bool(condition())

        WebDriverWait(self.chrome, PATIENCE_SECONDS, poll_frequency=0.1).until(check, words)

    def complaints(self) -> list[str]:
        lines: list[dict[str, str]] = cast("Any", self.chrome).get_log("browser")
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def cdp(self, command: str, **parameters: Any) -> Any:
        return self.chrome.execute_cdp_cmd(command, parameters)


@pytest.fixture(scope="module")
def server(django_db_setup: None, request: pytest.FixtureRequest) -> str:
    """The address of a server on the tests' database.

    Started once that is made: before, it would seem to lie in memory, and the server would share, and close, our own
    connection.
    """
    return str(request.getfixturevalue("live_server").url)


@pytest.fixture
def visit(chrome: Chrome, server: str, settings: Any) -> Iterator[Visit]:
    settings.ROOT_URLCONF = "tests.integration.templatetags.urls"
    visit = Visit(chrome, server, Order.objects.create(status="new"))
    visit.complaints()  # what an earlier page left behind
    yield visit
    visit.close()


def due_in(order: Order, **delay: Any) -> Timeout:
    return dq.schedule_timeout(order, "remind", **delay)


def left(row: Timeout) -> float:
    return (row.due_at - timezone.now()).total_seconds()


@pytest.mark.parametrize("hours", [1, -1])
def test_it_shows_the_time_that_is_left_however_wrong_the_visitors_clock_is(visit: Visit, hours: int) -> None:
    row = due_in(visit.order, minutes=90)
    visit.open(clock_is_off_by=timedelta(hours=hours, minutes=7))
    before = left(row)
    shown = visit.seconds_shown()
    assert left(row) - 1 <= shown <= before + 60  # the page's way to the browser, on a busy machine
    visit.wait_for(lambda: visit.seconds_shown() < shown, "the countdown does not move")
    assert not visit.complaints()


def test_at_zero_the_page_is_loaded_again_if_it_wants_to_and_does_not_prevent_it(visit: Visit) -> None:
    due_in(visit.order, minutes=5)
    visit.open("?at_zero=reload", clock_is_off_by=timedelta(seconds=1))
    visit.ask("document.addEventListener('delayq:due', (event) => event.preventDefault())")
    visit.ask("shiftClock(301000)")
    visit.wait_for(lambda: ["delayq:due", None] in visit.heard, "it never ended")
    assert visit.ask("document.querySelector('delayq-countdown').mayReload") is False
    visit.open("?at_zero=reload", clock_is_off_by=timedelta(seconds=1))
    made = visit.ask("document.body.dataset.made")
    visit.ask("shiftClock(302000)")
    visit.wait_for(lambda: visit.text == "too late" or visit.ask("document.body.dataset.made") != made, "no end")
    visit.come_back()
    visit.wait_for(lambda: visit.ask("document.body.dataset.made") != made, "it was not loaded again")


@pytest.mark.parametrize("sync", ["", "camel/"])
def test_a_deadline_that_was_moved_meanwhile_goes_on_running(visit: Visit, sync: str) -> None:
    row = due_in(visit.order, minutes=5)
    visit.open(f"?sync={sync}&at_zero=reload", clock_is_off_by=timedelta(seconds=1))
    dq.extend_timeout(row, minutes=30)
    visit.ask("shiftClock(302000)")
    visit.wait_for(lambda: re.fullmatch(r"3[345]:\d\d", visit.text) is not None, "it did not learn of it")
    moved = timezone.localtime(Timeout.objects.get(pk=row.pk).due_at)  # maybe past midnight
    assert visit.ask("document.querySelector('time').dateTime").startswith(f"{moved:%Y-%m-%dT}")


def test_it_learns_what_became_of_the_deadline_and_then_loads_the_page(visit: Visit) -> None:
    row = due_in(visit.order, seconds=3)
    visit.open("?sync=")
    visit.wait_for(lambda: visit.text == "too late", "it never ended")
    visit.come_back()
    tag = "document.querySelector('delayq-countdown').tag"
    visit.wait_for(lambda: visit.ask(tag), "it did not ask")
    pending = visit.ask(tag)
    Timeout.objects.filter(pk=row.pk).update(state="firing", slot_taken=None)
    visit.wait_for(lambda: visit.ask(tag) != pending, "it did not ask again")
    assert visit.text == "too late"
    assert visit.heard[-1] in ("Time left to pay: too late", ["delayq:due", None]), "the handler has not finished"
    settled = {"state": "fired", "cause": "due", "settled_at": timezone.now()}
    Timeout.objects.filter(pk=row.pk).update(**settled)
    visit.wait_for(lambda: ["delayq:settled", "fired"] in visit.heard, "it did not ask again")
    assert not visit.complaints()


def test_screen_readers_are_told_at_marks_and_not_each_second(visit: Visit) -> None:
    due_in(visit.order, seconds=100)
    visit.open(clock_is_off_by=timedelta(seconds=1))
    assert visit.ask("document.querySelector('delayq-countdown').getAttribute('role')") == "timer"
    assert visit.ask("document.querySelector('delayq-countdown [aria-live]')") is None
    first = visit.seconds_shown()
    visit.wait_for(lambda: visit.seconds_shown() < first - 1, "the countdown does not move")
    assert visit.heard == []
    visit.ask("shiftClock(46000)")
    visit.wait_for(lambda: visit.seconds_shown() < 55, "the countdown has not noticed")
    assert visit.heard == ["Time left to pay: 1 minute left"]


def test_it_reads_well_without_scripts_and_in_the_words_of_the_language(visit: Visit) -> None:
    row = due_in(visit.order, days=3, minutes=30)
    visit.open(script=False)
    source = visit.chrome.page_source
    assert f"until {timezone.localtime(row.due_at):%b}" in re.sub(r"\s+", " ", source)
    assert f'datetime="{row.due_at.isoformat()}"' in source
    visit.open()
    assert re.fullmatch(r"3 days 00:\d\d:\d\d", visit.text)
    visit.ask("document.querySelector('delayq-countdown').lang = 'de'")
    visit.wait_for(lambda: visit.text.startswith("3 Tage "), "the language is not followed")
    dq.reschedule_timeout(row, minutes=90)
    visit.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    visit.open()
    assert visit.text == "1 hour 30 minutes", "without motion, it changes rarely"
