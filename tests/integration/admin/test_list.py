"""The list reads one window of the ledger for every query, and states that there are more rows."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.contenttypes.models import ContentType
from django.test import Client
from django.urls import reverse
from django.utils import timezone

import django_delayq as dq
from django_delayq.admin import changelist
from django_delayq.models import Timeout, slot_of
from tests.integration.admin.conftest import source
from tests.integration.admin.places import DETAIL, LIST, REMIND
from tests.support.typed import Patch
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db]
SETTLED = {"fired": "due", "skipped": "gone", "cancelled": "hand", "dead": "retries"}


def fill(count: int, state: str = "pending", label: str = REMIND, **values: Any) -> list[int]:
    """So many rows, a second apart, of which none is due while the test runs; their ids."""
    now, kind = timezone.now(), ContentType.objects.get_for_model(Order).pk
    settled = {"cause": SETTLED[state], "slot_taken": None, "settled_at": now} if state in SETTLED else {}
    rows = []
    for number in range(count):
        due = now + timedelta(minutes=10, seconds=number)
        moments = {"due_at": due, "run_at": due, "first_due_at": due, "created_at": now}
        slot = slot_of(label, kind, f"{state}{number}", uuid.uuid4().hex)
        row = {"policy": label, "content_type_id": kind, "object_id": str(number), "state": state, "slot": slot}
        rows.append(Timeout(**{**moments, **row, **settled, **values}))
    return [row.pk for row in Timeout.objects.bulk_create(rows)]


def failed(*errors: str, state: str = "pending", message: str = "no stock", **values: Any) -> int:
    """Return the id of a row whose attempts have failed with `errors`, the last one with `message`."""
    events = [{"at": timezone.now().isoformat(), "what": "failed", "error": name, "message": name} for name in errors]
    events[-1] |= {"message": message, "traceback": "Traceback"}
    later = {"at": timezone.now().isoformat(), "what": "postponed"}
    (pk,) = fill(1, state, history=[*events, later], attempts=len(errors), **values)
    return pk


def changes(client: Client, query: str = "") -> Any:
    answer = client.get(f"{reverse(LIST)}{query}")
    assert answer.status_code == 200, answer.status_code
    return answer.context["cl"]


def shown(client: Client, query: str = "") -> list[int]:
    return [row.pk for row in changes(client, query).result_list]


@pytest.fixture
def small_window(monkeypatch: Patch) -> int:
    monkeypatch.setattr(changelist, "WINDOW", 6)
    return 6


def walk(client: Client, query: str) -> Iterator[list[int]]:
    """What each window shows, to the last one."""
    while True:
        seen = changes(client, query)
        yield [row.pk for row in seen.result_list]
        if not seen.further:
            return
        query = seen.further


@pytest.mark.parametrize(
    ("query", "state"),
    [
        ("?", "fired"),
        ("?state__exact=pending", "pending"),
        ("?due=dead", "dead"),
        (f"?policy={REMIND}&state__exact=dead", "dead"),
    ],
)
def test_window_after_window_shows_every_row_once(viewer: Client, small_window: int, query: str, state: str) -> None:
    ids = fill(15, state)
    windows = list(walk(viewer, query))
    assert len(windows) == 3
    assert sorted(pk for window in windows for pk in window) == ids


def test_rows_due_at_one_and_the_same_moment_are_not_passed_over(viewer: Client, small_window: int) -> None:
    ids = fill(20)
    moment = timezone.now() + timedelta(hours=1)
    Timeout.objects.update(due_at=moment, run_at=moment)
    period = {"due_at__gte": moment - timedelta(hours=1), "due_at__lt": moment + timedelta(hours=1)}
    for query in ("?state__exact=pending", f"?{urlencode(period)}"):
        assert [pk for window in walk(viewer, query) for pk in window] == ids
    Timeout.objects.filter(pk__in=[ids[1], ids[13]]).update(queue="rare")
    assert [pk for window in walk(viewer, "?queue=rare") for pk in window] == [ids[13], ids[1]]


def test_pages_count_the_window_and_not_the_table(viewer: Client) -> None:
    ids = fill(120)
    first, third = changes(viewer), changes(viewer, "?p=3")
    assert (first.result_count, first.multi_page, first.further) == (120, True, "")
    assert [row.pk for row in third.result_list] == ids[19::-1]
    assert viewer.get(f"{reverse(LIST)}?p=4").status_code == 302
    for order in ("1", "-3", "4.2", "x"):  # it sorts by no other column
        assert shown(viewer, f"?o={order}")[0] == ids[-1]


EASTERN = "2026-11-23T10:00:00%2B23:59"  # PostgreSQL refuses offsets of 16 hours and more


def test_an_address_that_makes_no_sense_is_no_crash(viewer: Client) -> None:
    fill(3)
    for query in (
        *("further=x", "state__exact=pending&further=2026_5", "state__exact=pending&further=2026-01-01T00:00:00_5"),
        *("due_at__year=0", "due_at__year=2026&due_at__month=13", "due_at__year=x", "due_at__year=99999999999"),
        *("due_at__gte=x", "due_at__gte=0001-01-01&due_at__lt=9999-12-31", "nosuchfield=1", "p=x"),
        *(f"due_at__gte={EASTERN}", f"due_at__gte={EASTERN}&queue=x"),
        f"state__exact=pending&further=run_at,{EASTERN},5",
        *("q=%00", "q=" + "x" * 500, "q=%F0%9F%98%80", "object=nonsense", "policy=no.such", "o=-1.2"),
    ):
        assert viewer.get(f"{reverse(LIST)}?{query}").status_code in {200, 302}, query
    for name in ("policy", "queue", "state__exact", "due"):
        answer = viewer.get(f"{reverse(LIST)}?{name}=%00")
        assert answer.headers["Location"].endswith("?e=1"), "it leads to the whole list"


@pytest.mark.usefixtures("own_kinds")
def test_the_filter_by_object_also_finds_rows_of_a_removed_model_and_nothing_for_what_is_no_key(viewer: Client) -> None:
    order = Order.objects.create(status="new")
    row = dq.schedule_timeout(order, "remind", hours=1)
    assert shown(viewer, f"?object=testapp.parcel:{order.pk}") == []
    removed = ContentType.objects.create(app_label="former", model="invoice")
    Timeout.objects.filter(pk=row.pk).update(content_type=removed, object_id="7")
    assert shown(viewer, "?object=former.invoice:7") == [row.pk]
    assert shown(viewer, "?object=former.invoice:8") == []
    Timeout.objects.update(content_type_id=10**6, object_id="lost-1", policy="gone.order.old")
    for query in ("?", "?q=lost-1", "?state__exact=pending", "?policy=gone.order.old"):
        assert shown(viewer, query) == [row.pk], query
    page = source(viewer, LIST)
    assert "unknown content type, lost-1" in page and "gone.order.old (no longer declared)" in page
    assert "unknown content type, lost-1" in source(viewer, reverse(DETAIL, args=[row.pk]))


def test_failing_rows_show_their_last_error_and_are_filtered_by_its_type(viewer: Client) -> None:
    both, quoting = failed("KeyError", "ValueError"), failed("ValueError", message='"error": "KeyError"')
    other, dead, healthy = failed("KeyError"), failed("KeyError", state="dead"), fill(1)[0]
    page = source(viewer, f"{reverse(LIST)}?due=failing")
    assert "ValueError: no stock" in page and "KeyError: KeyError" not in page
    assert re.findall(r"(\w+Error \(\d+\))", page) == ["ValueError (2)", "KeyError (1)"]
    queries = ("due=failing&error=ValueError", "due=dead&error=KeyError", "error=KeyError", "error=Other%0A")
    found = [set(shown(viewer, f"?{query}")) for query in queries]
    assert found == [{both, quoting}, {dead}, {other, dead}, set()]
    assert healthy in shown(viewer) and "By last error" not in source(viewer, LIST)


def test_overdue_and_failing_rows_come_first(viewer: Client, small_window: int) -> None:
    rest = fill(4)
    (late,), failing = fill(1), failed("ValueError")
    Timeout.objects.filter(pk=late).update(run_at=timezone.now() - timedelta(minutes=1))
    more = fill(small_window + 1)
    first, *others = list(walk(viewer, "?"))
    assert first == [late, failing, *more[:0:-1]]
    assert [pk for window in others for pk in window] == [more[0], failing, late, *rest[::-1]]
    assert "Overdue and failing ones first" in source(viewer, LIST)
    assert shown(viewer, "?queue=default")[0] == more[-1], "other lists keep their order"
