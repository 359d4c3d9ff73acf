"""A model of what should have happened, replayed in the order in which the database let it happen.

For each subject (an order, a policy and a key) it knows only whether a timeout is pending, and its deadline. It gets
what operations say they did, and what effects there are; whatever does not fit is a violation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tests.e2e.chaos.audit import AUTOMATIC_SECONDS, SHORTEST_DELAY
from tests.e2e.chaos.evidence import NEVER, Evidence, Note

AUTOMATIC = "cancel_unpaid"
AT_LEAST_ONCE = {"send_outside"}


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated guarantee; `kind` in a word or two, `words` with the details."""

    kind: str
    words: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


@dataclass(slots=True)
class Stop:
    """A time in which a policy was certainly paused or on hold."""

    policy: str
    since: datetime
    until: datetime
    is_hold: bool
    is_over: bool = False
    """A claim has ended it. A later one may have begun before that, and waited for a lock: it ends nothing."""


@dataclass(slots=True)
class Subject:
    """The place of one pending timeout. `state`: none, pending, fired, closed, stale (paid without a sync)."""

    name: tuple[int, str, str]
    state: str = "none"
    deadline: datetime = NEVER
    known_at: datetime = NEVER
    """When it was scheduled at the latest."""

    def pend(self, deadline: datetime) -> None:
        self.state, self.deadline = "pending", deadline

    def close(self) -> None:
        if self.state == "pending":
            self.state, self.deadline = "closed", NEVER

    def __str__(self) -> str:
        order, policy, key = self.name
        return f"{policy} of order {order}{f' ({key})' if key else ''}"


class History:
    """The replay; `violations` grows on the way."""

    def __init__(self, evidence: Evidence) -> None:
        self.violations: list[Violation] = []
        self.orders: dict[int, str] = {}
        self.subjects: dict[tuple[int, str, str], Subject] = {}
        self._by_order: dict[int, list[Subject]] = defaultdict(list)
        self.stops: list[Stop] = []
        self._changed_at: list[datetime] = []
        """When the answers to changes of the delay came; `schedule_by_policy` allows for the shortest one."""
        self._evidence = evidence

    def replay(self) -> None:
        """Everything in its order."""
        for _, what in sorted(self._events(), key=lambda event: event[0]):
            if isinstance(what, Note):
                self._fire(what)
            elif what["verb"].endswith("_many"):
                self._many(what)
            else:
                act = getattr(self, f"_{what['verb']}")
                act(self._subject(what["order"], what["policy"], what["key"]), what)

    def _events(self) -> Iterator[tuple[int, Any]]:
        for operation in self._evidence.operations:
            if operation.id in self._evidence.committed:
                times = {"began_at": operation.began_at, "ended_at": operation.ended_at}
                for claim in operation.claims:
                    yield self._evidence.committed[operation.id][0], {**claim, **times}
        for note in self._evidence.notes:
            if note.kind == "effect" and note.before is None:
                yield note.number, note
            elif note.kind == "order" and note.before is None and note.after and note.after["note"].startswith("out-"):
                order = {"order": note.after["id"], "policy": AUTOMATIC, "key": "", "was": None}
                yield note.number, {"verb": "place", **order, "since": note.after["created_at"]}

    def _subject(self, order: int, policy: str, key: str) -> Subject:
        name = (order, policy, key)
        if name not in self.subjects:
            self.subjects[name] = Subject(name)
            self._by_order[order].append(self.subjects[name])
        return self.subjects[name]

    def _say(self, kind: str, subject: object, words: str) -> None:
        self.violations.append(Violation(kind, f"{subject}: {words}"))

    def _become(self, order: int, status: str, *, only_from: str | None) -> None:
        known = self.orders.get(order)
        if known != only_from:
            self._say("order", f"order {order}", f"became {status} when it should have been {only_from}, not {known}")
        self.orders[order] = status

    def _place(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        """It is new, counted again, or reopened."""
        self._become(subject.name[0], "unpaid", only_from=claim["was"])
        subject.pend(_moment(claim["since"]) + timedelta(seconds=AUTOMATIC_SECONDS))

    def _remove(self, subject: Subject, _: Mapping[str, Any]) -> None:
        self.orders.pop(subject.name[0], None)
        for one in self._by_order[subject.name[0]]:
            one.close()

    def _pay(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        answer = claim["answer"]
        if answer == "too late":
            if subject.state != "fired":
                self._say("answer", subject, f"a payment was refused, but it is {subject.state}")
        elif answer in ("paid", "paid silently"):
            self._become(subject.name[0], "paid", only_from="unpaid")
            if answer == "paid silently" and subject.state == "pending":
                subject.state = "stale"
            subject.close()
        elif answer != "was paid":
            self._say("answer", subject, f"a payment went through the guard, and found an order that {answer}")

    def _pay_in_time(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        """The deadline decides: by the clock between the beginning of the call and its answer."""
        if claim["answer"] != "too late":
            if subject.deadline <= _moment(claim["asked"]) and subject.state == "pending":
                self._say("answer", subject, f"the strict guard let a payment through, after {subject.deadline}")
            self._pay(subject, claim)
        elif subject.deadline > _moment(claim["heard"]) and subject.state != "fired":
            self._say("answer", subject, f"the strict guard refused a payment before {subject.deadline}")

    def _schedule(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        subject.pend(self._given(subject, claim))
        subject.known_at = claim["ended_at"]

    def _schedule_by_policy(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        earliest = _moment(claim["asked"]) + timedelta(seconds=SHORTEST_DELAY)
        if _moment(claim["answer"]) < earliest:
            self._say("answer", subject, f"was reported as due at {claim['answer']}, before {earliest}")
        # The change of a delay that a transaction has missed: a later one shifts its row as if it had not.
        is_missed = any(claim["began_at"] <= changed_at for changed_at in self._changed_at)
        subject.pend(_moment(claim["asked"]) if is_missed else earliest)

    def _refire(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        if subject.state == "pending":
            self._say("doubled", subject, "was repeated while it was pending")
        subject.pend(self._given(subject, claim))

    def _change_delay(self, _: Subject, claim: Mapping[str, Any]) -> None:
        self._changed_at.append(claim["ended_at"])

    def _shadow(self, *_: object) -> None:
        """Workers follow within two seconds, and a suspended one later."""

    def _pause(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        self._resume(subject, claim)
        self.stops.append(Stop(subject.name[1], claim["ended_at"], _moment(claim["until"]), is_hold=False))

    def _hold(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        self._resume(subject, claim)
        self.stops.append(Stop(subject.name[1], claim["ended_at"], self._evidence.released_at, is_hold=True))

    def _resume(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        """End the stop of the policy. After a hold its pending deadlines are later by at least the certain part."""
        stop = next((each for each in reversed(self.stops) if each.policy == subject.name[1]), None)
        if stop is None or stop.is_over or stop.until < claim["began_at"]:
            return
        stop.until, stop.is_over = claim["began_at"], True
        for one in self.subjects.values():
            if stop.is_hold and one.name[1] == stop.policy and one.state == "pending":
                _shift(one, max(0.0, (stop.until - max(stop.since, one.known_at)).total_seconds()))

    def _keep(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        if subject.state != "pending":
            subject.pend(self._given(subject, claim))
        self._check_deadline(subject, claim["answer"])

    def _move(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        if self._is_there(subject, claim["answer"]):
            subject.pend(self._given(subject, claim))
        elif claim["answer"] is not None:  # stale: its row may still be pending, and has another deadline now
            subject.deadline = self._given(subject, claim)

    def _extend(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        if self._is_there(subject, claim["answer"]):
            _shift(subject, claim["seconds"])
            self._check_deadline(subject, claim["answer"])

    def _given(self, subject: Subject, claim: Mapping[str, Any]) -> datetime:
        """Return the deadline of a new round: the requested one, or the time of the call if that has passed."""
        asked, answer = _moment(claim["deadline"]), _moment(claim["answer"])
        if answer != asked and not asked < answer <= _moment(claim["heard"]):
            self._say("answer", subject, f"was reported as due at {answer}, not at {asked}")
        return answer

    def _cancel(self, subject: Subject, claim: Mapping[str, Any]) -> None:
        if claim["answer"] == (subject.state == "fired"):
            self._say("answer", subject, f"cancelling answered {claim['answer']}, but it is {subject.state}")
        subject.close()

    def _is_there(self, subject: Subject, answer: object) -> bool:
        """Whether something was pending, of which a row (or None) was the answer."""
        if subject.state != "stale" and (answer is not None) != (subject.state == "pending"):
            self._say("answer", subject, f"answered {answer}, but it is {subject.state}")
        return subject.state == "pending"

    def _check_deadline(self, subject: Subject, answer: str) -> None:
        if _moment(answer) != subject.deadline:
            self._say("answer", subject, f"was reported as due at {answer}, not at {subject.deadline}")

    def _many(self, claim: Mapping[str, Any]) -> None:
        """A bulk verb has changed those of its subjects that it should have."""
        verb, deadline = claim["verb"], _moment(claim["deadline"])
        subjects = [self._subject(order, claim["policy"], claim["key"]) for order in claim["orders"]]
        if verb == "keep_many":
            subjects = [subject for subject in subjects if subject.state != "pending"]
        elif verb != "replace_many":
            subjects = [subject for subject in subjects if subject.state == "pending"]
        if verb == "postpone_many":
            subjects = [subject for subject in subjects if subject.deadline < deadline]
        if len(subjects) != claim["answer"]:
            self._say("answer", f"{verb} of {claim['policy']}", f"counted {claim['answer']}, not {len(subjects)}")
        for subject in subjects:
            if verb == "cancel_many":
                subject.close()
            elif verb == "extend_many":
                _shift(subject, claim["seconds"])
            elif verb == "fire_now_many":  # the deadline is a time during the call, unless it had passed before
                subject.deadline = min(subject.deadline, deadline)
            else:
                subject.pend(deadline)

    def _fire(self, effect: Note) -> None:
        assert effect.after is not None
        row = self._evidence.ledger.get(effect.after["timeout_id"])
        if row is None:
            self._say("effect without fired", f"timeout {effect.after['timeout_id']}", "the ledger does not know it")
            return
        subject = self._subject(int(row.object_id), row.policy.rpartition(".")[2], row.key)
        for stop in self.stops:
            if stop.policy == subject.name[1] and stop.since < effect.began_at and effect.at < stop.until:
                self._say("while stopped", subject, f"had an effect at {effect.at}, stopped since {stop.since}")
        if subject.name[1] in AT_LEAST_ONCE and subject.state == "fired":
            return
        if subject.state != "pending":
            kind = {"fired": "doubled", "none": "phantom"}.get(subject.state, "after cancel")
            self._say(kind, subject, f"had an effect at {effect.at}, when it was {subject.state}")
        elif effect.at < subject.deadline:
            self._say("early", subject, f"had an effect at {effect.at}, before {subject.deadline}")
        subject.state = "fired"
        if subject.name[1] == AUTOMATIC:
            self._become(subject.name[0], "cancelled", only_from="unpaid")


def _moment(text: Any) -> datetime:
    return datetime.fromisoformat(text)


def _shift(subject: Subject, seconds: float) -> None:
    subject.deadline += timedelta(seconds=seconds)
