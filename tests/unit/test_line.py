"""Works in line for a thread: by turns between policies, by what is under way, first come within one."""

from __future__ import annotations

import threading

from django_delayq.executors import Line
from django_delayq.firing import Report, Work


def work(policy: str, number: int) -> Work:
    return Work(policy, (number,), (str(number),))


def done(_work: Work, _report: Report) -> None:
    """Nobody wants to know."""


def line(*works: Work) -> Line:
    made = Line()
    for one in works:
        made.put(one, done)
    return made


def next_of(one: Line) -> tuple[str, int]:
    item = one.take()
    assert item is not None
    return item[0].policy, item[0].ids[0]


def test_a_crowd_shares_its_turns_with_whoever_comes_later() -> None:
    one = line(*(work("crowd", number) for number in range(5)), work("late", 9), work("late", 10))
    taken = [next_of(one) for _ in range(7)]
    assert taken == [
        ("crowd", 0), ("late", 9), ("crowd", 1), ("late", 10), ("crowd", 2), ("crowd", 3), ("crowd", 4),
    ]  # fmt: skip


def test_the_next_free_thread_is_for_whom_has_the_fewest_under_way() -> None:
    one = line(*(work("slow", number) for number in range(8)))
    slow = [next_of(one) for _ in range(4)]
    one.put(work("quick", 50), done)
    one.put(work("quick", 51), done)
    one.ended(work(*slow[0]))
    assert [next_of(one), next_of(one)] == [("quick", 50), ("quick", 51)]
    one.ended(work("quick", 50))
    one.ended(work("quick", 51))
    one.put(work("quick", 52), done)
    assert next_of(one) == ("quick", 52), "three of the other are still under way"


def test_one_policy_alone_has_every_thread() -> None:
    one = line(*(work("only", number) for number in range(4)))
    assert [next_of(one)[1] for _ in range(4)] == [0, 1, 2, 3]


def test_what_is_withdrawn_is_not_taken() -> None:
    one = line(work("a", 1), work("b", 2), work("a", 3))
    assert next_of(one) == ("a", 1)
    assert {left.ids[0] for left in one.withdraw()} == {2, 3}
    one.close()
    assert one.take() is None


def test_what_is_in_line_when_it_closes_is_still_taken() -> None:
    one = line(work("a", 1))
    one.close()
    assert next_of(one) == ("a", 1)
    assert one.take() is None


def test_who_waits_is_woken_by_a_work_and_by_the_end() -> None:
    one, taken = Line(), []
    threads = [threading.Thread(target=lambda: taken.append(one.take()), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    one.put(work("a", 1), done)
    one.close()
    for thread in threads:
        thread.join(20)
    assert sorted(item is None for item in taken) == [False, True, True]
