"""Ask before acting: call the `confirm` function of a policy before the transaction of a firing, with nothing locked.

A provider may take seconds to answer, so nothing may be locked meanwhile. Afterwards the timeout fires as always: it
sees every change that was committed between the answer and the lock. Without an answer that is still good the judge
marks nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from django.db import connections

from django_delayq.exceptions import TimeLimitExceeded
from django_delayq.firing import rails
from django_delayq.firing.handler import call_handler, checkpoint, raised_by
from django_delayq.firing.members import Member, counted_from_resume, matching_of, readable_pk
from django_delayq.firing.report import SLOT_OVER, longest_wait
from django_delayq.firing.settling import reason_to_repeat, settle
from django_delayq.firing.state import ANSWER_SECONDS, firing_state
from django_delayq.firing.works import Call, Candidate, RunningWork
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import Timeout
from django_delayq.policy.options import Confirmation
from django_delayq.policy.outcomes import Outcome, returned_outcome
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.times.clock import brief

ASKING_SECONDS: Final = ANSWER_SECONDS / 2
"""After this time the rest of a work waits for its next turn: the first answers would otherwise be too old to fire."""


def ask(running: RunningWork, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Ask about each of `candidates` that may fire now. Return those that the transaction is to check.

    The others are in its report: an answer has decided about them, the attempt to get one has failed, or there was no
    time to ask. Those that need no answer are returned, too: the transaction shows why they do not fire.
    """
    using, report = running.using, running.report
    if not running.begin():
        report.release_rest([each.id for each in candidates], report.current_time(), SLOT_OVER)
        report.missed = True
        return []
    free, end = list[Candidate](), time.monotonic() + ASKING_SECONDS
    for place, candidate in enumerate(candidates):
        if place and time.monotonic() > end:
            report.release_rest([each.id for each in candidates[place:]], report.current_time())
            break
        member = _member_of(running.policy, candidate, using)
        if member is None or firing_state.has_answer(using, member.row) or _ask_about(running, member):
            free.append(candidate)
    return free


def _member_of(policy: TimeoutPolicy[Any], candidate: Candidate, using: str) -> Member | None:
    """Return the timeout and its object, both unlocked; None: as things are now, it does not fire."""
    rows = Timeout.objects.using(using).due().of_labels(policy.labels).filter(step="")  # steps need no answer
    row = rows.filter(pk=candidate.id, object_id=candidate.object_id).first()
    pk = None if row is None else readable_pk(policy, candidate.object_id)
    obj = None if pk is None else policy.model._base_manager.using(using).filter(pk=pk).first()
    if row is None or obj is None or obj.pk not in matching_of(policy, [obj], using)[0]:
        return None
    member, withheld = Member(row, obj), list[bool]()
    guards, now = stop_cache.guards(policy, using), firing_state.database_now()
    raised_by(lambda: withheld.append(rails.withhold(member, guards, now)))  # the transaction records an error
    counted_from_resume([member], guards, now)
    return member if withheld == [False] else None


def _ask_about(running: RunningWork, member: Member) -> bool:
    """Call the function. Return whether the timeout may fire by its answer; otherwise report what follows from it."""
    policy, using, report, row = running.policy, running.using, running.report, member.row
    seen = {name: getattr(row, name) for name in ("state", "attempts", "run_at", "idempotency_key")}
    call = Call((row.pk,), seen, limit=policy.confirmation.seconds)
    call.obj, call.could_begin_at = member.obj, row.could_fire_at()
    answers = list[Outcome | None]()
    driver_connection = connections[using].connection
    error = raised_by(lambda: answers.append(_answer(running, policy.confirmation, member, call)))
    checkpoint("asked")
    decided = answers[0] if error is None else error
    if decided is None:
        firing_state.note_answer(using, row)
        return True
    try:
        reason = None if isinstance(decided, Outcome) else reason_to_repeat(decided, using, call, driver_connection)
        if reason is not None:
            report.release([row.pk], using, reason, longest_wait(decided))
        else:
            report.add(settle(policy, decided, using, call))
    except Exception as failure:  # noqa: BLE001 - it must not keep the others from being reported
        report.release_unknown(policy.label, [row.pk], failure, using)
    return False


def _answer(running: RunningWork, confirmation: Confirmation, member: Member, call: Call) -> Outcome | None:
    """Return the outcome that the function answers; None: the handler is to be called.

    An answer that came too late is none, also where the function could not be abandoned. Nor is another value: it
    might mean no as well as yes.
    """
    returned = call_handler(running, member.obj, member.row, call, confirmation.function)
    if call.took is not None and call.took > confirmation.seconds:
        words = f"The confirm function of {running.policy.label} answered after {brief(call.took)}"
        raise TimeLimitExceeded(f"{words}, and not within {brief(confirmation.seconds)}.")
    if returned is None:
        return None
    if isinstance(answer := returned_outcome(returned), Outcome):
        return answer
    raise TypeError(
        f"The confirm function of {running.policy.label} returned {type(returned).__name__}. It must return None, so "
        "that the handler is called, or Skip, Snooze or GiveUp."
    )
