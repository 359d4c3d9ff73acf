"""What people do in the admin, in headless Chromium: every action, the countdown, the keyboard, and axe-core."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from django_delayq.admin.render import until
from tests.e2e.admin.conftest import FIRST_PAGE, LIST, PHONE, POLICIES, Admin, Stock, each_screen

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]
LABEL = "shop.order.cancel_unpaid"
DJANGOS_OWN = (".datetime",)
"""Fields whose labels axe-core does not accept."""
CONSEQUENCES = "Show the consequences"


def detail(timeout: int) -> str:
    return f"{LIST}{timeout}/change/"


@pytest.mark.parametrize("path", [LIST, "/admin/shop/order/"], ids=["timeouts", "objects"])
@pytest.mark.parametrize(
    "done",
    [
        ("cancel", "Cancel 2 timeouts", "2 timeouts were cancelled."),
        ("fire", "Fire 2 timeouts now", "2 timeouts are due now."),
        ("postpone", "Postpone 2 timeouts", "2 timeouts were postponed."),
        ("retry", "Retry 2 timeouts", "2 timeouts are pending again."),
    ],
)
def test_an_action_on_what_is_ticked(admin: Admin, stock: Stock, path: str, done: tuple[str, str, str]) -> None:
    action, button, told = done
    of = stock.dead if action == "retry" else stock.pending
    taken = [of.pop(), of.pop()]
    address = f"{LIST}?state__exact={'dead' if action == 'retry' else 'pending'}" if path == LIST else path
    admin.open(address)
    admin.tick(*(timeout if path == LIST else order for order, timeout, _ in taken))
    admin.choose("action", f"{action}_timeouts")
    admin.press("Go")
    admin.wait_for("2 timeouts")
    if action == "postpone":
        admin.type("amount", "2")
        admin.choose("unit", "days")
    admin.type("reason", f"asked for in test of {action}")
    if action == "postpone":
        admin.press(CONSEQUENCES)
    admin.press(button)
    assert admin.message() == told
    assert admin.browser.current_url.endswith(address)
    for _, timeout, _ in taken:
        admin.open(detail(timeout))
        assert admin.state_shown().endswith("cancelled" if action == "cancel" else "pending")
        admin.wait_for(f"asked for in test of {action}", "by admin:boss")


@pytest.mark.parametrize(
    ("action", "button", "told"),
    [
        ("cancel", "Cancel the timeout", "1 timeout was cancelled."),
        ("fire", "Fire the timeout now", "1 timeout is due now."),
        ("postpone", "Postpone the timeout", "1 timeout was postponed."),
        ("retry", "Retry the timeout", "1 timeout is pending again."),
        ("refire", "Fire the timeout again", "1 timeout is scheduled again."),
    ],
)
def test_a_button_on_the_page_of_a_row(admin: Admin, stock: Stock, action: str, button: str, told: str) -> None:
    pk = (stock.dead if action in {"retry", "refire"} else stock.pending).pop()[1]
    admin.open(detail(pk))
    for words in (button, "Back", button):  # the first time, a person changes their mind
        admin.press(words)
    if action == "postpone":
        field = admin.browser.find_element(By.NAME, "at")
        admin.browser.execute_script("arguments[0].value = '2099-05-06T07:08'", field)
    first = CONSEQUENCES if action in {"postpone", "refire"} else button
    admin.press(first)  # without a reason: the page comes back
    admin.wait_for("This field is required.")
    admin.type("reason", "the customer called")
    admin.press(first)
    if first == CONSEQUENCES:
        admin.press(button)
    assert admin.message() == told
    assert admin.browser.current_url.endswith(detail(pk))
    if action == "postpone":
        admin.wait_for("2099-05-06 07:08:00")
    if action == "refire":
        admin.wait_for("fired again by the new round")
    admin.press("History")
    admin.wait_for("the customer called")


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


def test_objects_have_their_timeouts_on_their_own_pages(admin: Admin, stock: Stock) -> None:
    order, timeout, reference = stock.pending[0]
    admin.open("/admin/shop/order/?timeouts=waiting")
    admin.wait_for("cancel_unpaid")
    admin.open(f"/admin/shop/order/{order}/change/")
    admin.press("Save")  # the inline must not prevent saving the form around it
    assert reference in admin.message() and "changed successfully" in admin.message()
    admin.open(f"/admin/shop/order/{order}/change/")
    admin.press("All timeouts of this object")
    admin.press(str(timeout))
    assert admin.state_shown().endswith("pending")


def test_a_policy_is_paused_held_and_resumed(admin: Admin) -> None:
    shown = {"pause": "Resumes automatically at 2099-05-06 07:08:00", "hold": "On hold since"}
    for (verb, stopped), told in zip(shown.items(), ("paused", "held"), strict=True):
        admin.open(f"{POLICIES}shop.review.review_by_default/{verb}/")
        if verb == "pause":
            field = admin.browser.find_element(By.NAME, "until")
            admin.browser.execute_script("arguments[0].value = '2099-05-06T07:08'", field)
        admin.type("reason", "an outage")
        admin.press(f"{verb.title()} the policy")
        assert f"review_by_default”: {told}." in admin.message()
        admin.wait_for(stopped, "By admin:boss: an outage")
        admin.press("Resume shop.review.review_by_default")
        admin.type("reason", "it is over")
        admin.press("Resume the policy")
        assert "resumed" in admin.message()
    admin.open("/admin/django_delayq/policychange/")
    admin.wait_for("an outage", "it is over")


def test_the_delay_of_a_policy_is_changed_after_a_look_at_what_it_means(admin: Admin) -> None:
    admin.open(POLICIES)
    admin.unfold()
    admin.press("Change the delay shop.trialmembership.notify_trial_expiry")
    admin.type("amount", "5")
    admin.choose("unit", "days")
    admin.choose("mode", "recompute")
    admin.type("reason", "longer trials")
    admin.press("Show the consequences")
    admin.wait_for("1 deadline will change.")
    admin.press("Change the delay")
    assert "1 deadline was moved." in admin.message()
    admin.unfold()
    admin.wait_for("5 d (declared: depends on the object)")


def test_guard_rails_are_changed_and_shown_with_who_set_them(admin: Admin) -> None:
    label, late = "shop.trialmembership.notify_trial_expiry", "skipped if it would fire more than 6 h late"
    shadow = "10% of the objects are skipped, and nothing fires for them"
    for button, confirm, fields, shown in (
        ("Limit the lateness", "Change the limit of lateness", {"amount": "6"}, f"{late} (set by admin:boss)"),
        ("Change the brake", "Change the brake", {"most": "500", "amount": "10"}, "more than 500 firings in 10 min"),
        ("Shadow mode", "Change the shadow mode", {"share": "10"}, shadow),
    ):
        admin.open(POLICIES)
        admin.unfold()
        admin.press(f"{button} {label}")
        for name, value in fields.items():
            admin.type(name, value)
        admin.type("reason", "a campaign")
        admin.press(confirm)
        assert "notify_trial_expiry”: " in admin.message()
        admin.unfold()
        admin.wait_for(shown)


def test_the_countdown_runs_by_the_servers_clock_and_in_pythons_words(admin: Admin, stock: Stock) -> None:
    wrong = "Date.now = () => 0; Date.prototype.getTime = () => 0;"
    added = admin.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": wrong})
    try:
        admin.open(detail(stock.pending[0][1]))
        assert admin.browser.execute_script("return Date.now()") == 0
        shown = admin.browser.find_element(By.CSS_SELECTOR, ".field-next_attempt .delayq-left")
        found = re.fullmatch(r"in (\d+) min", shown.text)  # an hour, less what the tests before this one took
        assert found and 20 <= int(found[1]) <= 59, shown.text
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


@pytest.mark.parametrize("path", ["timeout/operate/postpone/?ids={}", "policycontrol/shop.order.cancel_unpaid/hold/"])
def test_a_double_click_on_a_confirmation_sends_it_once(admin: Admin, stock: Stock, path: str) -> None:
    """Otherwise both requests arrive, and the second one postpones a second time, or fires again a second time."""
    admin.open(f"/admin/django_delayq/{path.format(stock.pending[0][1])}")
    event = 'new SubmitEvent("submit", {bubbles: true, cancelable: true})'
    submit = f'return document.querySelector("#content-main form").dispatchEvent({event})'
    assert [admin.browser.execute_script(submit) for _ in range(2)] == [True, False]


@each_screen
def test_axe_finds_no_serious_fault_on_our_pages(admin: Admin, stock: Stock, width: int, dark: bool) -> None:
    admin.show_on(width, dark=dark)
    order, timeout, _ = stock.pending[0]
    steps: tuple[str, ...] = ("cancel", "fire", "postpone", "retry")
    stops: tuple[str, ...] = ("pause", "hold", "resume", "delay", "late", "brake", "shadow")
    if width == PHONE:  # pages with the same parts are checked once
        steps, stops = ("postpone",), ("resume", "brake")
    pages = [
        LIST,
        f"{LIST}?due_at__gte=2026-01-01T00:00:00Z&state__exact=pending",
        f"{LIST}?q=nothing",
        detail(timeout),
        detail(stock.dead[0][1]),
        *(f"{LIST}operate/{step}/?ids={timeout}" for step in steps),
        POLICIES,
        FIRST_PAGE,
        *(f"{POLICIES}{LABEL}/{stop}/" for stop in stops),
        f"{POLICIES}selected/hold/?all=1",
        "/admin/django_delayq/policychange/",
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


HIDDEN = """
const frames = [document.documentElement, ...document.querySelectorAll('.scroll')];
return frames.map((each) => each.scrollWidth - each.clientWidth);
"""


@each_screen
def test_axe_finds_no_serious_fault_on_the_shops_pages(admin: Admin, stock: Stock, width: int, dark: bool) -> None:
    admin.show_on(width, dark=dark)
    reference, refused = stock.pending[0][2], stock.pending.pop()[2]
    customer = admin.shop.ask("Customer.objects.get().get_absolute_url()")
    found = {}
    for page in ("/", f"/orders/{reference}/", customer):
        found[page] = admin.inspect(page)
        assert max(admin.browser.execute_script(HIDDEN)) <= 0, page
    admin.open(f"/orders/{refused}/")
    admin.browser.execute_async_script(  # cancelled elsewhere, and then paid on the page that does not know it yet
        """
        const [pay, cancel] = ["pay", "cancel"].map((step) => document.querySelector(`form[action$='/${step}/']`));
        fetch(cancel.action, {method: "POST", body: new FormData(cancel)}).then(() => {
          setTimeout(() => { document.body.append(pay); pay.submit(); }, 50);
          arguments[0]();
        });
        """
    )
    admin.wait_for("it was cancelled")
    found["a refused payment"] = admin.faults()
    assert {page: faults for page, faults in found.items() if faults} == {}


FITS = """
const [list] = document.querySelectorAll("#result_list"), page = list.closest(".results");
return [list.getBoundingClientRect().width, page.getBoundingClientRect().width];
"""
GAP = """
const [title, buttons] = ["#content > h2", ".object-tools"].map((each) => document.querySelector(each));
return buttons.getBoundingClientRect().top - title.getBoundingClientRect().bottom;
"""


def test_on_a_desktop_no_column_is_cut_off_and_no_title_is_covered(admin: Admin, stock: Stock) -> None:
    admin.open(LIST)
    list_width, page_width = admin.browser.execute_script(FITS)
    assert admin.browser.find_element(By.ID, "nav-sidebar").is_displayed() and list_width <= page_width
    admin.show_on(1300)
    admin.open(detail(stock.dead[0][1]))
    assert admin.browser.execute_script(GAP) >= 0


BEYOND = """
const right = document.documentElement.clientWidth, cut = [];
for (const selector of arguments[0]) {
  const nodes = [...document.querySelectorAll(selector)].filter((node) => node.getBoundingClientRect().width);
  if (!nodes.length) cut.push(`no ${selector}`);
  for (const node of nodes) {
    const box = node.getBoundingClientRect();
    if (box.left < 0 || box.right > right) cut.push(`${selector} ends at ${box.right}`);
  }
}
return cut;
"""


def test_on_a_phone_state_attempts_and_deadline_are_not_beyond_the_edge(admin: Admin, stock: Stock) -> None:
    pending, dead = stock.pending[0][1], stock.dead[0][1]
    admin.show_on(PHONE)
    listed = ("object_shown", "state_and_reason", "attempts_shown", "deadline", "policy_shown")
    admin.open(f"{LIST}?state__exact=dead")
    assert admin.browser.execute_script(BEYOND, [f"#result_list .field-{name}" for name in listed]) == []
    admin.open(f"{LIST}operate/cancel/?ids={pending},{dead}")
    confirmed = ("object", "state", "deadline", "policy-name", "id")
    assert admin.browser.execute_script(BEYOND, [f".delayq-table .delayq-{name}" for name in confirmed]) == []


BROKEN = "return [...document.querySelectorAll('time')].filter((each) => each.getClientRects().length > 1).length"


def test_on_a_phone_no_datetime_is_broken_over_two_lines(admin: Admin) -> None:
    label, change = "shop.delivery.remind_late_delivery", "from django_delayq import operations; operations."
    admin.shop.ask("1", f"{change}pause({label!r}, by='cli:ann', reason='an outage')")
    admin.show_on(PHONE)
    for path in (LIST, POLICIES, f"{POLICIES}{label}/resume/", f"{POLICIES}selected/hold/?all=1"):
        admin.open(path)
        admin.wait_for("Paused since")
        assert admin.browser.execute_script(BROKEN) == 0, path
    admin.shop.ask("1", f"{change}resume({label!r}, by='cli:ann', reason='over')")


LONG_TRACE = """
error = {{"at": timezone.now().isoformat(), "what": "failed", "error": "GatewayError", "message": "503", "traceback":
         "Traceback (most recent call last):\\n" + "".join(f'  File "/srv/shop/x{{n}}.py", line 1, in call\\n' for n in
         range(90)) + "GatewayError: 503"}}
Timeout.objects.filter(pk={pk}).update(history=[error])
"""
END_OF_TRACE = """
const box = document.querySelector(".delayq-trace"), text = box.querySelector("pre");
return [box.scrollHeight > box.clientHeight, box.getBoundingClientRect().bottom - text.getBoundingClientRect().bottom];
"""


def test_a_long_traceback_shows_its_last_line(admin: Admin, stock: Stock) -> None:
    pk = stock.dead[0][1]
    admin.shop.ask("1", "from django.utils import timezone" + LONG_TRACE.format(pk=pk))
    admin.open(detail(pk))
    is_longer, room = admin.browser.execute_script(END_OF_TRACE)
    assert is_longer and 0 <= room < 20


def test_axe_would_notice_a_fault(admin: Admin) -> None:
    admin.open(f"{POLICIES}{LABEL}/pause/")
    admin.browser.execute_script("document.querySelector('label[for=id_reason]').remove()")
    assert any("label" in fault for fault in admin.faults())


LONG = "The payment provider announced that callbacks of the last hour will arrive late. " * 3
GIVE_A_LONG_REASON = """
from django_delayq import operations
Timeout.objects.filter(pk={pk}).update(reason={reason!r})
Timeout.objects.filter(pk={dead}).update(reason={reason!r})
change = operations.pause("shop.delivery.remind_late_delivery", by="admin:boss", reason={reason!r})
operations.resume("shop.delivery.remind_late_delivery", by="admin:boss", reason="over")
"""
ROW_HEIGHTS = """
return [...document.querySelectorAll("#result_list tbody tr")]
  .filter((row) => row.textContent.includes("payment provider"))
  .map((row) => row.getBoundingClientRect().height)
"""


def test_on_a_phone_a_long_reason_makes_no_tall_row(admin: Admin, stock: Stock) -> None:
    pk, dead, reason = stock.pending[0][1], stock.dead[0][1], LONG[:250]
    admin.shop.ask("1", GIVE_A_LONG_REASON.format(pk=pk, dead=dead, reason=reason))
    admin.show_on(PHONE)
    for path in (LIST, f"{LIST}?state__exact=dead", "/admin/django_delayq/policychange/"):
        assert admin.inspect(path) == []
        heights = admin.browser.execute_script(ROW_HEIGHTS)
        assert heights and max(heights) < 200, (path, heights)
    for path in (detail(pk), f"/admin/shop/order/{stock.pending[0][0]}/change/"):
        admin.inspect(path)
