"""What must happen to an invoice, hour by hour, written without the code under test.

It shares nothing with the library but the rules of the documentation. Times are hours since the beginning. The worker
checks the invoice at each tick, unless there is an outage for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

TICK = 6
BUSY, TICKS = 22 * 24, range(0, 48 * 24, TICK)
"""Until when something happens to invoices, and when the worker checks them."""
AFTER = 14 * 24
RETRIES = (6, 12)
"""The hours between the attempts of a step or handler."""
CATCH_UP = 7 * 24
HANDLER = "handler"


@dataclass(frozen=True)
class Rule:
    """A step: its offset from the deadline in hours, or a fraction of the time to it, and how it repeats."""

    name: str
    offset: float = 0
    fraction: float | None = None
    every: float | None = None
    times: int | None = None
    atomic: bool = True


@dataclass(frozen=True)
class Shape:
    name: str
    grace: float
    rules: tuple[Rule, ...]
    atomic: bool = True


SHAPES = (
    Shape("dunning", 72, (Rule("friendly", -72, atomic=False), Rule("firm", 0, every=24, times=3))),
    Shape("daily", 120, (Rule("half", fraction=0.5), Rule("daily", -30, every=24, atomic=False)), atomic=False),
    Shape("plain", 0, (Rule("quarter", fraction=0.75), Rule("week", -168), Rule("day", -24, atomic=False))),
    Shape("dense", 48, (Rule("often", -60, every=12, times=6), Rule("last", 36), Rule("a", -54), Rule("b", -18))),
)


def fate(invoice: int, step: str, call: int) -> str:
    """Return what the n-th call of a step of an invoice does, by chance but always the same."""
    chance = random.Random(f"{invoice} {step} {call}").random()
    for limit, what in ((0.78, "works"), (0.90, "fails"), (0.93, "gives up"), (0.96, "skips"), (1.0, "snoozes")):
        if chance < limit:
            return what
    raise AssertionError


SNOOZE = 9
"""For how many hours a snooze asks."""


def script(invoice: int) -> dict[int, list[tuple[str, Any]]]:
    """Return what happens to an invoice, by tick: random, but always the same for one number."""
    chance, found = random.Random(f"script {invoice}"), dict[int, list[tuple[str, Any]]]()
    for _ in range(chance.choice((0, 1, 2, 3, 4))):
        tick = chance.randrange(TICK, BUSY, TICK)
        what = chance.choice(("pay", "extend", "extend", "hold", "outage", "outage", "resend", "earlier"))
        amount: Any = TICK * chance.randint(1, 40)
        found.setdefault(tick, []).append((what, amount))
        if what == "hold":
            found.setdefault(tick + amount, []).append(("resume", None))
        if what == "pay" and chance.random() < 0.5:
            found.setdefault(tick + TICK * chance.randint(1, 20), []).append(("bounce", None))
    return found


@dataclass
class Oracle:
    """One invoice. `log` gets each call that must happen: when, of which step, and which attempt."""

    number: int
    shape: Shape
    since: float = 0
    due: float = AFTER
    over: set[str] = field(default_factory=set)
    state: str = "pending"
    paid: bool = False
    attempts: int = 0
    waits_until: float | None = None
    held_at: float | None = None
    stops: list[tuple[float, float]] = field(default_factory=list)
    rest: float = 0
    down_until: float = -1
    first: str = ""
    log: list[tuple[float, str, int]] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = self.left()[0][1]

    def plan(self, due: float | None = None) -> list[tuple[float, str]]:
        due = self.due if due is None else due
        acts_at, found = due + self.shape.grace, []
        for place, rule in enumerate(self.shape.rules):
            at = due + rule.offset
            if rule.fraction is not None:
                at = self.at_fraction(rule.fraction, due)
            number = 1
            while at < acts_at and (rule.times is None or number <= rule.times):
                found.append((at, place, f"{rule.name}:{number}" if rule.every else rule.name))
                if rule.every is None:
                    break
                at, number = at + rule.every, number + 1
        return [(at, name) for at, _, name in sorted(found, key=lambda each: each[:2])] + [(acts_at, HANDLER)]

    def at_fraction(self, fraction: float, due: float) -> float:
        """Return the end of a part of the time from the start to `due`, of which stopped time is none."""
        start = min(due, self.since)
        time = due - start - sum(end - begin for begin, end in self.stops)
        at = start + time * fraction
        for begin, end in self.stops:
            at += end - begin if at > begin else 0
        return at if time > 0 else start + (due - start) * fraction

    def left(self, due: float | None = None) -> list[tuple[float, str]]:
        """Return what is not over. Of a step that repeats, a repetition is over if a later one is."""
        highest: dict[str, int] = {}
        for name in self.over:
            base, _, number = name.partition(":")
            highest[base] = max(highest.get(base, 0), int(number or 1))
        return [
            (at, name)
            for at, name in self.plan(due)
            if name == HANDLER or int(name.partition(":")[2] or 1) > highest.get(name.partition(":")[0], 0)
        ]

    def next_at(self) -> float:
        return self.left()[0][0] if self.waits_until is None else self.waits_until

    def begin(self, now: float) -> None:
        """A round is armed now: what was before is passed."""
        self.over |= {name for at, name in self.left() if at < now and name != HANDLER}
        self.state, self.held_at = "pending", None
        self.new_step()

    def new_step(self) -> None:
        self.attempts, self.waits_until, self.first = 0, None, self.left()[0][1]

    def do(self, what: str, amount: Any, now: float) -> None:
        """Let an event happen."""
        if what == "outage":
            self.down_until = max(self.down_until, now + amount)
        elif what in {"pay", "bounce", "resend"}:
            self.change(what, now)
        elif self.state == "pending":
            if what == "extend":
                self.move(self.due + amount, keeps_wait=True)
            elif what == "earlier" and self.held_at is None:
                self.move(now + amount / 4, keeps_wait=False)
            elif what == "hold" and self.held_at is None:
                self.held_at, self.rest = now, self.rest_at(now)
            elif what == "resume" and self.held_at is not None:
                self.resume(now)

    def change(self, what: str, now: float) -> None:
        """Let the invoice be paid, the payment be charged back, or the invoice be sent again."""
        if what == "pay":
            self.paid = True
            self.state = "ended" if self.state == "pending" else self.state
        elif what == "bounce" and self.paid:
            self.paid = False
            if self.state == "ended" and self.held_at is not None:  # it continues with the rest of its time
                self.due = now + self.rest
                self.stops.append((self.held_at, now))
                self.begin(now)
            elif self.state == "ended" and now - self.due - self.shape.grace < CATCH_UP:
                self.begin(now)
        elif what == "resend":
            self.since, self.due, self.over, self.stops = now, now + AFTER, set(), []
            self.begin(now)
            self.state = "ended" if self.paid else self.state

    def move(self, due: float, *, keeps_wait: bool) -> None:
        before, by = self.next_at(), due - self.due
        self.due, self.rest = due, self.rest + by
        waits = self.waits_until is not None and keeps_wait
        if self.left()[0][1] != self.first:
            self.new_step()
        else:
            self.waits_until = max(before, self.left()[0][0]) if waits else None

    def resume(self, now: float) -> None:
        assert self.held_at is not None
        self.due = now + self.rest
        self.stops.append((self.held_at, now))
        if self.waits_until is not None:  # a retry of the handler waits by its deadline
            self.waits_until = None if self.first == HANDLER else self.waits_until + now - self.held_at
        self.held_at = None
        if self.left()[0][1] != self.first:
            self.new_step()

    def rest_at(self, now: float) -> float:
        """Return how long the deadline is ahead if the clock is stopped now. A retry of the handler moves it."""
        due = self.due
        if self.waits_until is not None and self.first == HANDLER:
            due = self.waits_until - self.shape.grace
        return due - now if self.shape.grace else max(due - now, 0)

    def tick(self, now: float) -> None:
        """Let the worker check the invoice, unless there is an outage."""
        while now >= self.down_until and self.state == "pending" and self.held_at is None and self.next_at() <= now:
            due = [each for each in self.left() if each[0] <= now]
            if due and due[-1][1] != self.first:
                passed = [name for _, name in due[:-1]]
                self.passed += passed
                self.over |= {*passed, self.first}
                self.new_step()
            self.call(now)

    def call(self, now: float) -> None:
        step, self.attempts = self.first, self.attempts + 1
        self.calls[step] = self.calls.get(step, 0) + 1
        self.log.append((now, step, self.attempts))
        what = fate(self.number, step, self.calls[step])
        if what == "snoozes":
            self.attempts -= 1
            self.wait(now + SNOOZE)
        elif what == "fails" and self.attempts <= len(RETRIES):
            self.wait(now + RETRIES[self.attempts - 1])
        elif step == HANDLER:
            self.state = "closed"
        else:
            self.over.add(step)
            self.new_step()

    def wait(self, until: float) -> None:
        after = [at for at, name in self.left() if name != self.first]
        self.waits_until = until if self.first == HANDLER else min(until, after[0])
