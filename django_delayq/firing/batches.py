"""`batch=n`: one handler call for up to n objects, in one transaction; if it raises, one call for each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from django_delayq.firing.attempt import Attempt
from django_delayq.firing.pace import ALONE_AFTER_BATCH, WORK_SECONDS, pace_of
from django_delayq.firing.single import concluded, fire_one, trouble_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_delayq.firing.report import Candidate, Findings
    from django_delayq.policies import TimeoutPolicy


def handle_batch(attempt: Attempt) -> None:
    """Call the handler once with `(queryset, timeouts)`, both in the order of keys.

    Then the objects are looked at again: `QuerySet.update` sends no signals, so nothing else would arm or
    cancel what follows from it. Inside the transaction, so that it commits with its cause.
    """
    from django_delayq.arming.sync import sync_timeouts

    members = sorted(attempt.ready, key=lambda member: member.place)
    objects = attempt.policy.model._base_manager.using(attempt.using)
    # `order_by` would go into an UPDATE of the handler, and MariaDB then waits for every row that it comes by.
    queryset = objects.filter(pk__in=[member.obj.pk for member in members]).extra(order_by=["pk"])
    attempt.handle_one(members[0], queryset, [member.row for member in members])
    sync_timeouts(queryset.all())


def fire_batch(policy: TimeoutPolicy[Any], candidates: Sequence[Candidate], using: str, findings: Findings) -> None:
    """All of `candidates` are fired by one call of the handler, or by one for each of them if that raises.

    A bad one cannot hold up the rest. For a while the policy's batches then consist of one object; what had no
    turn after some time is given back.
    """
    pace = pace_of(policy.label)
    rest = list(candidates)
    if len(rest) > 1 and not pace.is_alone:
        found = _fire_together(policy, rest, using)
        if found is not None:
            findings.add(found)
            return
        pace.go_alone(ALONE_AFTER_BATCH)
    began = time.monotonic()
    while rest:
        findings.add(fire_one(policy, rest.pop(0), using, handle_batch))
        if time.monotonic() - began > 2 * WORK_SECONDS:
            break
    findings.again.update({candidate.id: findings.moment() for candidate in rest})


def _fire_together(policy: TimeoutPolicy[Any], candidates: Sequence[Candidate], using: str) -> Findings | None:
    """What the batch found; None: the handler raised, and nothing is written."""
    attempt = Attempt(policy, candidates, using)
    try:
        attempt.run(handle_batch)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whose it is, firing one by one will show
        return trouble_with(attempt, error)
    return concluded(attempt)
