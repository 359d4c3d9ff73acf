"""Find rounds that do not fit their policy as it is now, by samples of each policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.core.checks import CheckMessage, Info, Warning
from django.db.models import F

from django_delayq.arming.changes import Failures
from django_delayq.arming.row_state import objects_of_policy
from django_delayq.arming.sync import automatic_policies
from django_delayq.ledger.controls import PolicyState, policy_states
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import kind_of
from django_delayq.models import PolicyChange, Timeout, TimeoutQuerySet
from django_delayq.policy.policies import TimeoutPolicy
from django_delayq.policy.reads import since_name, with_since
from django_delayq.sql.key_types import keys_in, object_id_of
from django_delayq.sql.now import database_now
from django_delayq.times import clock
from django_delayq.times.clock import duration_text, plural

SAMPLE: Final = 100
"""How many pending timeouts of a policy are compared with its delay, at each end, and how many fired ones with their
objects."""
MIN_ALIKE: Final = 2
"""One timeout with another delay was most likely scheduled by hand."""
MIN_SHARE: Final = 0.1
"""Fewer of the compared timeouts with the same other delay, or of the objects that match again, are exceptions."""
MIN_ENDED: Final = 5
"""Fewer objects that no longer match may be a coincidence: see `matching_again`."""


def matching_again(using: str) -> Iterator[CheckMessage]:
    """Find objects that match a policy although their round has fired, if its handler usually ends its condition.

    They never fire again: a stale `save()` has undone what the handler wrote, the handler has not saved, or a person
    has reopened the object. No declaration states whether a handler ends its condition. It is taken to do so if, of the
    last timeouts that fired within a day, at least `MIN_ENDED` in number, at most a tenth match: within a day, an
    invoice of which a customer was reminded is mostly still unpaid. The last `SAMPLE` that fired are examined.
    """
    yesterday = database_now(using) - timedelta(days=1)
    for policy in automatic_policies(using):
        if not policy.when or since_name(policy) is None:
            continue
        fired = _last_fired_rounds(policy.labels, using)
        matching = _still_matching(policy, fired, using)
        recent = [row for row in fired if row.settled_at and row.settled_at > yesterday]
        still = sum(row.pk in matching for row in recent)
        if not matching or len(recent) - still < MIN_ENDED or still > len(recent) * MIN_SHARE:
            continue
        row = next(row for row in fired if row.pk in matching)
        one = f"object matches {policy.label} although its round has fired,"
        many = f"objects match {policy.label} although their rounds have fired,"
        text = f"{plural(len(matching), one, many)} such as object {row.object_id} (timeout {row.pk})."
        hint = "Its handler usually ends the condition. Has it not saved the object, or has a save() of an instance "
        hint += "that was read before undone it (see the page Races)? "
        hint += f"Correct the object, or manage.py delayq_refire --id {row.pk}."
        yield Warning(text, hint=hint, id="fired_again")


def _last_fired_rounds(labels: Sequence[str], using: str) -> list[Timeout]:
    """Return the last rounds that fired under each label, by the time at which they were to run."""
    found: list[Timeout] = []
    for label in labels:
        rows: TimeoutQuerySet = Timeout.objects.using(using).filter(policy=label, state=Timeout.State.FIRED)
        rows = rows.order_by("policy", "state", "run_at", "id").reverse()
        found += rows.only("object_id", "key", "since_at", "settled_at")[:SAMPLE]
    return [row for row in found if not row.key and row.since_at is not None]


def _still_matching(policy: TimeoutPolicy[Any], fired: Sequence[Timeout], using: str) -> set[int]:
    """Return the ids of those of `fired` whose object matches with the `since` of that round, and has no other one."""
    model, rounds = policy.concrete_model, {row.object_id: row for row in reversed(fired)}
    objects = policy.model._base_manager.using(using).filter(policy.when, pk__in=list(keys_in(model, rounds).values()))
    found = with_since(objects, policy).values_list("pk", F(str(since_name(policy))))
    pairs = ((rounds.get(object_id_of(model, pk)), since) for pk, since in found)
    same = [row for row, since in pairs if row is not None and row.since_at == since]
    pending = Timeout.objects.using(using).pending().of_labels(policy.labels)
    other = set(pending.filter(object_id__in=[row.object_id for row in same]).values_list("object_id", flat=True))
    return {row.pk for row in same if row.object_id not in other}


def moved_models(using: str) -> Iterator[CheckMessage]:
    """Find pending timeouts under a former label of a policy whose objects have the content type of another model."""
    for state in policy_states(using):
        policy, former = state.policy, state.policy.labels[1:]
        if not former or database_of(policy.concrete_model) != using:
            continue
        kind = kind_of(policy.concrete_model, using)
        if labels := {row.policy for row in _sample(former, using) if row.content_type_id != kind}:
            text = f"Pending timeouts of {', '.join(sorted(labels))} have the content type of another model than "
            text += f"{policy.label}, so that saves schedule a second one, and both fire."
            hint = "Rename the content type in the migration that moves the model: see the page Declaring, Renaming."
            yield Warning(text, hint=hint, id="moved_models")


def delays(using: str) -> Iterator[CheckMessage]:
    """Find policies whose `after` was changed in the code, and whose pending deadlines still have the former one."""
    outdated = list[CheckMessage]()
    for state in policy_states(using):
        policy, delay = state.policy, state.delay
        if state.length is None or policy.since is None or database_of(policy.concrete_model) != using:
            continue
        rows = _sample(policy.labels, using)
        # A row that was extended or moved, or that a change of the delay has kept, has its deadline on purpose.
        changes = PolicyChange.objects.using(using).filter(policy__in=policy.labels, what=PolicyChange.What.DELAY)
        decided_at = changes.order_by("-id").values_list("at", flat=True).first()
        armed = [row for row in rows if row.since_at and row.due_at == row.first_due_at and not row.extensions]
        armed = [row for row in armed if not decided_at or row.created_at > decided_at]
        if delay is None:
            outdated += _moved_by_calendar(state, armed, using)
            continue
        found = (row.due_at - row.since_at for row in armed)
        # Without fractions of a second, which a timeout has that was scheduled with a delay of its own.
        former = Counter(each for each in found if each != delay and not each.microseconds)
        for distance, count in former.most_common(1):
            if count < max(MIN_ALIKE, len(rows) * MIN_SHARE):
                continue  # a few timeouts that were scheduled by hand, at a round time
            text = f"Of {plural(len(rows), 'checked timeout')} of {policy.label}, "
            text += f"{plural(count, 'is due', 'are due')} {duration_text(distance)} after the time they count from, "
            text += f"but its delay is {duration_text(delay)} now."
            hint = f"After a change of after= in the code: delayq_replan {policy.label} --mode recompute --dry-run. "
            hint += "It would also move timeouts that were scheduled with a delay of their own."
            outdated.append(Warning(text, hint=hint, id="delays"))
    yield from outdated or [Info("Pending timeouts have the delays of their policies.", id="delays")]


def _moved_by_calendar(state: PolicyState, armed: Sequence[Any], using: str) -> Iterator[CheckMessage]:
    """Find the `armed` rows whose deadline would be another one now: their calendar, or its data, has changed."""
    policy, failures, moved = state.policy, Failures(state.policy), list[tuple[Any, datetime]]()
    pks = keys_in(policy.concrete_model, (row.object_id for row in armed))
    objects = objects_of_policy(policy, set(pks.values()), using) if policy.needs_object else {}
    for row in armed:
        with failures.counting(row.object_id):
            obj = objects.get(pks.get(row.object_id))
            due_at = None if policy.needs_object and obj is None else policy.due_of(obj, row.since_at, state.after)
            if due_at is not None and due_at != row.due_at:
                moved.append((row, due_at))
    if len(moved) >= max(MIN_ALIKE, len(armed) * MIN_SHARE):
        row, due_at = moved[0]
        text = f"Of {plural(len(armed), 'checked timeout')} of {policy.label}, {plural(len(moved), 'has', 'have')} "
        text += f"another deadline than its calendar gives now, such as timeout {row.id}: "
        text += f"{clock.local(row.due_at)}, now {clock.local(due_at)}."
        hint = f"After a change of a calendar: delayq_replan {policy.label} --mode recompute --dry-run. "
        hint += "It would also move timeouts that were scheduled with a delay of their own."
        yield Warning(text, hint=hint, id="delays")


def _sample(labels: Sequence[str], using: str) -> list[Any]:
    """Return the pending rows that are due first and last, at most `SAMPLE` each of every label, by the index."""
    found: dict[int, Any] = {}
    for label in labels:
        rows = Timeout.objects.using(using).filter(policy=label, state=Timeout.State.PENDING)
        rows = rows.order_by("policy", "state", "run_at", "id").defer("history", "payload")
        for ordered in (rows, rows.reverse()):
            found |= {row.pk: row for row in ordered[:SAMPLE]}
    return list(found.values())
