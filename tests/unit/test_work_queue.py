"""Works in line for a thread: by turns between policies, by what is under way, first come within one.

And the last free thread is not for slow ones. Works and reports survive JSON.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone

from django_delayq.exceptions import Abandoned
from django_delayq.firing import Report, Work, executors
from django_delayq.firing.executors import WorkQueue
from django_delayq.firing.works import Call, RunningWork


def work(policy: str, number: int) -> Work:
    return Work(policy, (number,), (str(number),))


def done(_work: Work, _report: Report) -> None:
    """Ignore the report."""


def line(*works: Work, threads: int = 100, reserves_one: bool = True) -> WorkQueue:
    made = WorkQueue(threads, lambda: reserves_one)
    for one in works:
        made.put(one, done)
    return made


def next_of(one: WorkQueue) -> tuple[str, int]:
    item = one.get()
    assert item is not None
    return item[0].policy, item[0].ids[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of the queue by one that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(executors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def lasted(one: WorkQueue, policy: str, seconds: float, clock: list[float], times: int = 1) -> None:
    """Works of `policy` have run, `seconds` each."""
    for _ in range(times):
        one.put(work(policy, 0), done)
        item = one.get()
        assert item is not None
        clock[0] += seconds
        one.finished(item[0])


def is_kept(one: WorkQueue) -> bool:
    """Whether nothing that waits may be taken now."""
    return one._next_policy() is None


def test_a_crowd_shares_its_turns_with_whoever_comes_later() -> None:
    one = line(*(work("crowd", number) for number in range(5)), work("late", 9), work("late", 10))
    taken = [next_of(one) for _ in range(7)]
    assert taken == [
        ("crowd", 0), ("late", 9), ("crowd", 1), ("late", 10), ("crowd", 2), ("crowd", 3), ("crowd", 4),
    ]  # fmt: skip


def test_the_next_free_thread_is_for_the_policy_with_the_fewest_under_way() -> None:
    works = [work("slow", number) for number in range(8)]
    one = line(*works)
    for number in range(4):
        assert next_of(one) == ("slow", number)
    one.put(work("quick", 50), done)
    one.put(work("quick", 51), done)
    one.finished(works[0])
    assert [next_of(one), next_of(one)] == [("quick", 50), ("quick", 51)]


def test_the_last_free_thread_is_not_given_to_a_slow_policy(clock: list[float]) -> None:
    one = line(threads=4)
    lasted(one, "slow", 12.0, clock)
    for number in range(8):
        one.put(work("slow", number), done)
    assert [next_of(one)[1] for _ in range(3)] == [0, 1, 2]
    assert is_kept(one)
    one.put(work("quick", 9), done)
    assert next_of(one) == ("quick", 9)


def test_the_first_works_of_a_policy_do_not_take_every_thread(clock: list[float]) -> None:
    works = [work("new", number) for number in range(8)]
    one = line(*works, threads=4)
    assert [next_of(one)[1] for _ in range(3)] == [0, 1, 2]
    assert is_kept(one), "nothing is known yet of how long they take"
    clock[0] += 0.1
    one.finished(works[0])
    assert [next_of(one)[1] for _ in range(2)] == [3, 4], "now it is known that they are quick"


@pytest.mark.parametrize(("threads", "reserves_one"), [(1, True), (4, False)], ids=["one thread", "one policy"])
def test_no_thread_is_kept_free_where_it_is_of_no_use(threads: int, reserves_one: bool, clock: list[float]) -> None:
    one = line(threads=threads, reserves_one=reserves_one)
    lasted(one, "slow", 12.0, clock)
    for number in range(threads):
        one.put(work("slow", number), done)
    assert [next_of(one)[1] for _ in range(threads)] == [*range(threads)]


@pytest.mark.parametrize("closes", [False, True], ids=["its policy proves quick", "the queue closes"])
def test_a_thread_that_was_kept_free_is_woken_and_runs_the_rest(closes: bool) -> None:
    first, second = work("new", 1), work("new", 2)
    one, taken = line(first, second, threads=2), []
    assert next_of(one) == ("new", 1)
    if closes:
        one.close()
    thread = threading.Thread(target=lambda: taken.append(one.get()), daemon=True)
    thread.start()
    one.finished(first)
    thread.join(20)
    assert [item and item[0].ids for item in taken] == [(2,)]


def test_what_is_in_line_when_it_closes_is_still_taken_but_not_what_is_withdrawn() -> None:
    one = line(work("a", 1), work("b", 2), work("a", 3))
    assert next_of(one) == ("a", 1)
    assert {left.ids[0] for left in one.withdraw()} == {2, 3}
    one.put(work("a", 4), done)
    one.close()
    assert next_of(one) == ("a", 4)
    assert one.get() is None


def another_of(one: WorkQueue, ran: Work) -> int | None:
    found = one.get_another(ran, done)
    return None if found is None else found.ids[0]


def test_a_thread_that_reports_later_continues_with_the_policy_with_the_fewest_under_way(clock: list[float]) -> None:
    crowd, late = [work("crowd", number) for number in range(5)], work("late", 9)
    one = line(threads=1)
    for name in ("crowd", "late"):
        lasted(one, name, 0.01, clock)
    for each in crowd:
        one.put(each, done)
    assert [next_of(one), next_of(one)] == [("crowd", 0), ("crowd", 1)]
    one.put(late, done)
    assert another_of(one, crowd[0]) == 9
    assert [another_of(one, late), another_of(one, crowd[1])] == [2, 3]
    assert another_of(one, crowd[2]) is None, "no more wait than threads can begin"
    assert next_of(one) == ("crowd", 4)
    for each in crowd[2:]:
        one.finished(each)
    assert one.is_idle


@pytest.mark.parametrize(
    "difference",
    [{"suspect": True}, {"begin_at": inf}, {"begin_by": 1e9}, {"share": "customer"}],
    ids=lambda difference: next(iter(difference)),
)
def test_a_thread_reports_before_it_begins_what_is_alone_waits_or_has_a_slot(difference: dict[str, Any]) -> None:
    plain = work("one", 1)
    one = line(plain, *(replace(work("one", number), **difference) for number in (2, 3)), threads=1)
    one.get()
    assert another_of(one, plain) is None
    assert one.get() is not None


def test_works_and_reports_survive_json_and_fields_of_a_newer_release() -> None:
    work = Work("shop.order.x", (1, 2**62), ("a", "b"), "mail", suspect=True)
    report = Report((1,), {2: timezone.now()}, (1,), timezone.now(), {}, (3,), (4,), (2,))
    for message in (work, report):
        data = json.loads(json.dumps({**message.as_dict(), "version": 2, "new": {"of": "a newer release"}}))
        assert type(message).from_dict(data) == message
    assert Work.from_dict({"policy": "a.b.c", "ids": [1], "object_ids": ["1"]}) == Work("a.b.c", (1,), ("1",))
    assert Report.from_dict({}) == Report()


GARBLED: list[Any] = [
    None, [], {}, {"policy": "a.b.c", "ids": [1], "object_ids": []}, {"policy": "a.b.c", "ids": [], "object_ids": []},
    {"policy": "a.b.c", "ids": [1, 1], "object_ids": ["1", "1"]}, {"policy": 1, "ids": [1], "object_ids": ["1"]},
    {"policy": "a.b.c", "ids": ["1"], "object_ids": ["1"]}, {"policy": "a.b.c", "ids": [2**63], "object_ids": ["1"]},
    {"policy": "a.b.c", "ids": [True], "object_ids": ["1"]}, {"policy": "a.b.c", "ids": [1], "object_ids": [1]},
]  # fmt: skip


@pytest.mark.parametrize("data", GARBLED, ids=str)
def test_a_garbled_work_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="This is not a work"):
        Work.from_dict(data)


@pytest.mark.parametrize(
    "data", [None, {"done": 1}, {"again": [[1, "tomorrow"]]}, {"again": [[1, "2026-01-01T00:00:00"]]}], ids=str
)
def test_a_garbled_report_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="This is not a report"):
        Report.from_dict(data)


def test_a_call_either_ends_or_is_abandoned() -> None:
    ended, abandoned = Call((1,)), Call((2,))
    running = RunningWork(Work("a.b.c", (1, 2), ("1", "2")), using="default", report=None)
    running.leave(ended, running.enter(ended))
    assert running.abandon(0.0) is None
    running.enter(abandoned)
    assert running.abandon(0.0) is abandoned
    with pytest.raises(Abandoned):  # so that its thread calls no other handler
        running.leave(abandoned, None)
