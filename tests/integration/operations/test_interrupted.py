"""An operation that is interrupted between two pages, and repeated: each row is changed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_delayq import schedule_timeouts
from django_delayq.models import Timeout, UnfinishedRun
from django_delayq.operations import change_deadline, postpone, refire, runner
from django_delayq.sql.now import database_now
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]
BY = "script:test"
HOUR = timedelta(hours=1)
PAGE = 500
Act = Callable[..., Any]


class Interrupted(BaseException):
    """As Ctrl-C, or the end of the process: raised after the commit of a page."""


def interrupt(_page: object) -> None:
    raise Interrupted


@pytest.fixture
def deadline() -> Any:
    """1,200 pending timeouts, three pages, due then."""
    at = timezone.now().replace(microsecond=0) + timedelta(days=1)
    Order.objects.bulk_create([Order(status="new") for _ in range(1200)])
    schedule_timeouts(list(Order.objects.all()), "remind", at=at)
    return at


def deadlines() -> dict[Any, int]:
    return dict(Counter(Timeout.objects.values_list("due_at", flat=True)))


def later(**more: Any) -> Any:
    return postpone(Timeout.objects.pending(), hours=1, by=BY, **more)


def shifted(**more: Any) -> Any:
    return change_deadline(Timeout.objects.pending(), shift=HOUR, by=BY, **more)


@pytest.mark.parametrize("act", [later, shifted])
def test_what_is_repeated_continues_behind_the_last_page(act: Act, deadline: Any) -> None:
    with pytest.raises(Interrupted):
        act(progress=interrupt)
    assert deadlines() == {deadline: 700, deadline + HOUR: PAGE}
    with pytest.raises(Interrupted):
        act(progress=interrupt)
    result = act()
    assert (result.changed, result.continued) == (200, 1000)
    assert deadlines() == {deadline + HOUR: 1200}
    assert not UnfinishedRun.objects.exists()


@pytest.mark.parametrize("act", [later, shifted])
def test_what_was_completed_is_done_again_when_it_is_repeated(act: Act, deadline: Any) -> None:
    assert [act().changed, act().changed] == [1200, 1200]
    assert deadlines() == {deadline + 2 * HOUR: 1200}


@pytest.mark.usefixtures("deadline")
def test_another_duration_and_another_selection_are_other_operations() -> None:
    with pytest.raises(Interrupted):
        later(progress=interrupt)
    rows = Timeout.objects.pending()
    assert postpone(rows, hours=2, by=BY).changed == 1200
    assert postpone(rows.filter(pk__gt=0), hours=1, by=BY).changed == 1200
    assert later().changed == 700


@pytest.mark.usefixtures("deadline")
def test_on_another_day_it_is_done_to_all() -> None:
    with pytest.raises(Interrupted):
        later(progress=interrupt)
    UnfinishedRun.objects.update(touched_at=database_now("default") - runner.FORGOTTEN_AFTER - HOUR)
    result = later()
    assert (result.changed, result.continued) == (1200, 0)


def test_a_page_that_fails_is_neither_changed_nor_counted(deadline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as broken:
        broken.setattr(UnfinishedRun, "save", fail)
        with pytest.raises(ValueError, match="broken"):
            later()
    assert deadlines() == {deadline: 1200}
    assert later().changed == 1200


def test_inside_a_transaction_nothing_is_stored(deadline: Any) -> None:
    with pytest.raises(Interrupted), transaction.atomic():
        later(progress=interrupt)
    assert deadlines() == {deadline: 1200}
    assert not UnfinishedRun.objects.exists()


@pytest.mark.usefixtures("deadline")
def test_a_dry_run_neither_begins_nor_continues() -> None:
    later(dry_run=True)
    assert not UnfinishedRun.objects.exists()


@pytest.mark.usefixtures("deadline")
def test_rounds_that_were_repeated_are_not_repeated_again_although_they_have_fired() -> None:
    settled = {"state": "fired", "cause": "due", "settled_at": timezone.now(), "slot_taken": None}
    Timeout.objects.update(**settled)
    fired = Timeout.objects.filter(state="fired")
    with pytest.raises(Interrupted):
        refire(fired, by=BY, progress=interrupt)
    Timeout.objects.pending().update(**settled)  # a worker has fired the new rounds
    result = refire(fired, by=BY)
    assert (result.changed, result.continued) == (700, PAGE)
    assert Timeout.objects.count() == 2400
