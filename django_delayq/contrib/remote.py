"""Fire timeouts in the processes of another task queue: `RemoteExecutor` sends messages, and `fire` receives them.

A message contains ids and the label of the policy. Nothing comes back through the queue: the worker reads in the ledger
which of the timeouts that it has sent are settled or were moved. So a message that is lost, late, doubled or forged is
only a hint, and the queue needs no result backend.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from django.db import Error, connections

from django_delayq.backoff import StateLog
from django_delayq.conf import get_settings
from django_delayq.engine.records import MAX_ID
from django_delayq.firing.executors import Done, Executor
from django_delayq.firing.planning import plan
from django_delayq.firing.running import EXTEND_LOCKED_SECONDS, extend_firing, run
from django_delayq.firing.state import firing_state
from django_delayq.firing.works import MAX_IDS, VERSION, Report, Work
from django_delayq.ledger.db_connections import check_connections, open_connection
from django_delayq.ledger.error_texts import message_of
from django_delayq.ledger.installation import check_ledger
from django_delayq.ledger.left_open import close_left_open, refuse_without_autocommit
from django_delayq.models import Timeout
from django_delayq.policy.declaring import MAX_LABEL
from django_delayq.policy.policies import TimeoutPolicy, registry
from django_delayq.rounds.columns import is_suspect

logger = logging.getLogger("django_delayq.worker")

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 0.5
"""Between two reads of the ledger: the first after progress, the second while nothing changes."""
JOIN_SECONDS: Final = 5.0
"""A broker that does not answer must not keep the worker from ending for longer."""
REPEATED_WITHIN: Final = timedelta(seconds=1)
"""What can be tried again later than this is sent again by the worker. To wait for it would occupy the process."""
EXTEND_RETRY_SECONDS: Final = 5.0
"""Without a retry before the next third of a lease, a short outage of the database would cost the lease."""
MAX_TRIES_SECONDS: Final = 5.0
"""How long `fire` repeats timeouts that cannot be tried, for example because another transaction locks their object."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A work whose message was sent, and the ids that have no outcome yet."""

    work: Work
    done: Done
    ids: set[int]
    sent_at: float


class RemoteExecutor(Executor):
    """Base class of executors that send each work to another task queue. A subclass defines `send`.

    One thread, with a database connection of its own, sends the messages and reads the ledger. A broker that is down or
    slow does not stop the worker: works are refused until it answers. After a lease without any progress only
    `concurrency` messages a lease are sent, so that messages do not accumulate while no process receives them. They are
    at least two: otherwise a timeout that kills its process, lease after lease, would be the only one that is sent.
    """

    prefetch_seconds = 2.0
    """Queues need up to a second for a message, for example to fork."""

    def __init__(self, using: str, concurrency: int) -> None:
        self._using = using
        self._changed = threading.Condition()
        self._unsent: list[tuple[Work, Done]] = []
        self._sent: list[_Sent] = []
        self._is_closed = self._is_silent = False
        self._max_while_silent = max(2, concurrency)
        self._progress_at = time.monotonic()
        self._name = f"{type(self).__module__}.{type(self).__qualname__}"
        self._broker = StateLog(logger, "broker_away", "broker_back")
        self._silence = StateLog(logger, "executor_silent", "executor_heard")
        self._thread = threading.Thread(target=self._serve, name="delayq-remote", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Enqueue a call of `fire(message)`. Called in one thread. An exception means that the broker is away.

        The message is plain data for JSON. A call should take at most some seconds, also while the broker is down.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define send(message).")

    def submit(self, work: Work, done: Done) -> None:
        with self._changed:
            if self._is_silent and len(self._unsent) + len(self._sent) >= self._max_while_silent:
                raise TimeoutError("its processes have settled no timeout for a lease")
            self._unsent.append((work, done))
            self._changed.notify()

    def withdraw(self) -> list[Work]:
        with self._changed:
            unsent, self._unsent = self._unsent, []
        return [work for work, _ in unsent]

    def close(self, *, wait: bool = True) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if wait:
            self._thread.join(JOIN_SECONDS)

    def _serve(self) -> None:
        open_connection(self._using)
        pause, poll_at = MIN_PAUSE_SECONDS, 0.0
        try:
            while not self._is_closed:
                with self._changed:
                    if not self._unsent and not self._is_closed:
                        self._changed.wait(max(0.0, poll_at - time.monotonic()) if self._sent else None)
                    unsent, self._unsent = self._unsent, []
                if self._send_all(unsent):
                    pause = MIN_PAUSE_SECONDS
                    poll_at = min(poll_at, time.monotonic() + pause)
                if self._sent and time.monotonic() >= poll_at:
                    pause = MIN_PAUSE_SECONDS if self._poll() else min(2 * pause, MAX_PAUSE_SECONDS)
                    poll_at = time.monotonic() + pause
        finally:
            connections.close_all()

    def _send_all(self, unsent: list[tuple[Work, Done]]) -> bool:
        """Send the works; return whether any was. After an error the rest is refused: each try may take seconds."""
        for number, (work, done) in enumerate(unsent):
            # Without the ids of objects, which may be e-mail addresses: they stay in the ledger.
            message = {"version": VERSION, "policy": work.policy, "ids": list(work.ids)}
            message |= {"suspect": work.suspect, "using": self._using}
            try:
                self.send(message)
            except BaseException as error:  # noqa: BLE001 - whatever a broker raises, also SystemExit
                check_connections(error=error)  # the queue may be a table
                self._broker.failed(
                    "%s cannot send messages: %s: %s", self._name, type(error).__name__, message_of(error)
                )
                for refused, refused_done in unsent[number:]:
                    refused_done(refused, Report(refused=refused.ids))
                return number > 0
            self._broker.recovered("%s sends messages again", self._name)
            self._sent.append(_Sent(work, done, set(work.ids), time.monotonic()))
        return bool(unsent)

    def _poll(self) -> bool:
        """Report what the ledger shows of the sent works, and forget those that are overdue; return if any is known."""
        close_left_open()  # by `send`, whose queue may be a table
        try:
            report = outcomes((each for sent in self._sent for each in sent.ids), self._using)
        except Exception as error:  # noqa: BLE001 - the worker's own queries notice and log it, too
            logger.debug("the outcomes of sent works cannot be read: %s", message_of(error))
            check_connections(error=error)
            return False
        check_connections()
        known = {*report.done, *report.again}
        for sent in self._sent:
            if ids := sent.ids & known:  # the others are still waited for
                sent.ids -= ids
                again = {each: report.again[each] for each in ids & report.again.keys()}
                done = tuple(ids - again.keys())
                part = replace(sent.work, ids=tuple(ids), object_ids=())
                sent.done(part, replace(report, done=done, again=again))
        now, lease = time.monotonic(), get_settings().lease.total_seconds()
        waiting = [sent for sent in self._sent if sent.ids]
        self._sent = [sent for sent in waiting if now - sent.sent_at < lease]
        has_expired = len(self._sent) < len(waiting)
        if known:
            self._progress_at, self._is_silent = now, False
            self._silence.recovered("Timeouts that %s has sent are settled again", self._name)
        elif has_expired and now - self._progress_at >= lease:
            self._is_silent = True
            # Not left to a refusal: a worker that asks for few timeouts at once is never refused one.
            self._silence.failed(
                "No timeout that %s has sent was settled for %s. Check that processes of the task queue run, use this "
                "database and serve this queue. Only few messages are sent per lease until they do",
                self._name,
                get_settings().lease,
            )
        return bool(known)


def outcomes(ids: Iterable[int], using: str) -> Report:
    """Return which of the timeouts are settled, moved, firing or stopped.

    The report does not name those that are still due: they wait for a process, or are being fired. Raises the errors of
    the database.
    """
    _, report = plan(dict.fromkeys(ids, 1), using)
    fired = Timeout.objects.using(using).filter(pk__in=report.done, state=Timeout.State.FIRED)
    return replace(report, fired=tuple(fired.values_list("pk", flat=True)))


def fire(message: Mapping[str, Any]) -> None:
    """Fire the timeouts of a message of `RemoteExecutor`, if they are due. For the processes of the other task queue.

    Call it outside a transaction. It returns when each of the timeouts is settled, was moved, or cannot be tried now.
    Handlers, retries and the ledger are as in a worker, so a doubled, late or forged message has no effect.

    Raises:
        ValueError: this is not such a message. Nothing has been read or changed.
        WrongInstallation: the ledger belongs to another installation. Nothing has been changed.
        RuntimeError: the thread is in a transaction, which what would be marked as fired depends on.
        django.db.Error: the ledger cannot be read.
    """
    label, ids, suspect, using = _checked(message)
    policy = registry.get(label)
    if policy is None:
        words = "A message names the policy %s, which is not declared in this process. Deploy the worker's release here"
        logger.warning(words, label, extra={"event": "policy_unknown", "policy": label})
        return
    check_connections(idle_seconds=float("inf"))
    _refuse_in_transaction(using)
    try:
        check_ledger(using)  # a process of staging may receive messages of production through a shared broker
        with _extending(policy, ids, using):
            _fire(policy, ids, using, suspect=suspect)
    finally:
        check_connections()


def _refuse_in_transaction(using: str) -> None:
    """Raise an error if timeouts would be marked as fired in a transaction that others may never commit."""
    refuse_without_autocommit(using)
    connection: Any = connections[using]
    is_test = any(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
    if connection.in_atomic_block and not is_test:
        raise RuntimeError(
            f"fire() was called in an atomic() block of database {using!r}, or code that ran in this thread before has "
            "not left one. Timeouts would count as fired without a COMMIT. Call it outside of transactions."
        )


def _fire(policy: TimeoutPolicy[Any], ids: Collection[int], using: str, *, suspect: bool) -> None:
    """Run the due timeouts among `ids`, and repeat those that can be tried again within a second.

    The ledger does not show that a timeout was released untried, so the worker would wait for it for a lease.
    """
    began_at = tried_at = time.monotonic()
    lease = get_settings().lease.total_seconds()
    while ids:
        rows = Timeout.objects.using(using).filter(pk__in=ids, policy__in=policy.labels, settled_at=None)
        # No work has two timeouts of one object. Those of the worker never do, but a forged one may.
        found = list(rows.only("object_id", "state", "suspected_at", "deaths", "share").order_by("run_at", "id"))
        by_object = {row.object_id: row.pk for row in found}
        if not by_object:
            return
        may_kill, share = any(map(is_suspect, found)), ""
        if policy.batch_by is not None and not may_kill and len(shares := {row.share for row in found}) == 1:
            [share] = shares
        may_kill = may_kill or suspect
        work = Work(policy.label, tuple(by_object.values()), tuple(by_object), policy.queue, may_kill, share=share)
        report = run(work, using)
        now, monotonic = report.now or firing_state.database_now(), time.monotonic()
        soon = {id: at for id, at in report.again.items() if at <= now + REPEATED_WITHIN}
        if len(soon) < len(work.ids) or not soon.keys() <= set(report.untried):
            tried_at = monotonic
        if not soon or monotonic - tried_at > MAX_TRIES_SECONDS or monotonic - began_at > lease:
            return
        ids = soon
        time.sleep(max(0.0, (min(soon.values()) - now).total_seconds()))


@contextmanager
def _extending(policy: TimeoutPolicy[Any], ids: Collection[int], using: str) -> Iterator[None]:
    """With `atomic=False`, extend the expiry of the rows that are firing until the block ends, as a worker does."""
    ended = threading.Event()

    def extend() -> None:
        pause = third = get_settings().lease.total_seconds() / 3
        while not ended.wait(pause):
            try:
                pause = third if extend_firing(ids, using) else min(third, EXTEND_LOCKED_SECONDS)
            except Error as error:
                pause = min(third, EXTEND_RETRY_SECONDS)
                logger.warning("The leases of running handlers were not extended: %s", message_of(error))
                check_connections(error=error)
            check_connections()
        connections.close_all()

    thread = threading.Thread(target=extend, name="delayq-leases", daemon=True)
    if policy.runs_outside:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _checked(message: Any) -> tuple[str, list[int], bool, str]:
    """Return the label, ids, flag and database of a message. Raises ValueError if it is not one."""
    data = message if isinstance(message, Mapping) else {}
    label, ids, suspect, using = (data.get(name) for name in ("policy", "ids", "suspect", "using"))
    if not isinstance(label, str) or len(label) > MAX_LABEL:
        wrong = f"policy is not a string of at most {MAX_LABEL} characters"
    elif not isinstance(ids, list) or not 0 < len(ids) <= MAX_IDS:
        wrong = f"ids is not a list of 1 to {MAX_IDS} ids"
    elif not all(type(id) is int and 0 < id <= MAX_ID for id in ids):
        wrong = "ids contains something else than the ids of timeouts"
    elif not isinstance(suspect, bool):
        wrong = "suspect is not a boolean"
    elif not isinstance(using, str) or using not in connections.settings:
        wrong = "using is not an alias of DATABASES"
    else:
        return label, ids, suspect, using
    raise ValueError(f"This is not a message of RemoteExecutor: {wrong}. Pass what send() was called with.")
