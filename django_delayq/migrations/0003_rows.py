"""Upgrade the tables of the state that was developed before the first release, with all that waits in them.

A new installation does not run it: `0001_squashed_0004_indexes` makes its tables at once. Stop web processes and workers
before it, because the former code cannot write the new tables.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import migrations
from django.utils import timezone

from django_delayq.policies import registry

PAGE = 500
NOTHING_TO_COMPUTE = ""
"""The terms of a deadline that a constant `after` has computed: see `policy_terms`."""


def carry_over(apps: Any, schema_editor: Any) -> None:
    """Write into the new columns what former rows have elsewhere, or what the declarations of the policies say."""
    using = schema_editor.connection.alias
    policies = {label: policy for policy in registry for label in policy.labels}
    rows = apps.get_model("django_delayq", "Timeout")._base_manager.using(using)
    last = 0
    while page := list(rows.filter(pk__gt=last).order_by("pk")[:PAGE]):
        last = page[-1].pk
        _keep_one_slot(page, policies, rows)
        waiting = [row for row in page if row.settled_at is None]
        for row in waiting:
            _read_history(row)
            _mark_computed(row, policies.get(row.policy))
        columns = ["snoozes", "retried_at", "first_failed_at", "last_failed_at", "terms", "computed_due_at"]
        rows.bulk_update(waiting, columns)
    for change in apps.get_model("django_delayq", "PolicyChange")._base_manager.using(using).filter(finished_at=None):
        _read_details(change)
        change.save(using=using)
    for sync in apps.get_model("django_delayq", "PolicySync")._base_manager.using(using).all():
        policy = policies.get(sync.policy)
        sync.oldest_label = sync.policy if policy is None else policy.oldest_label
        sync.save(using=using)


def _keep_one_slot(page: list[Any], policies: dict[str, Any], rows: Any) -> None:
    """Give rows of a renamed policy the slot of its first name, by which all releases find them from now on.

    Where another row waits in that slot, both keep their own, and both fire.
    """
    for row in page:
        policy = policies.get(row.policy)
        if policy is None or not policy.aliases:
            continue
        text = "\0".join((policy.oldest_label, str(row.content_type_id), row.object_id, row.key))
        slot = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        if slot == row.slot or (row.slot_taken and rows.filter(slot=slot, slot_taken=1).exists()):
            continue
        row.slot = slot
        rows.filter(pk=row.pk).update(slot=slot)


def _read_history(row: Any) -> None:
    """Set the columns that decisions read, instead of the history, which drops old events."""
    counting = [
        event
        for event in row.history
        if event.get("what") in ("snoozed", "retried") or (event.get("what"), event.get("by")) == ("rescheduled", "save")
    ]
    row.snoozes = int(counting[-1].get("number", 0)) if counting else 0
    retried = [event["at"] for event in row.history if event.get("what") == "retried"]
    failed = [event["at"] for event in row.history if event.get("what") == "failed"] if row.attempts else []
    row.retried_at = _moment(retried[-1]) if retried else None
    row.first_failed_at, row.last_failed_at = (_moment(failed[0]), _moment(failed[-1])) if failed else (None, None)


def _mark_computed(row: Any, policy: Any) -> None:
    """Mark a deadline that is what its policy computes with a constant delay. Others stay, as if set by hand."""
    if policy is None or row.since_at is None or policy.since is None or not isinstance(policy.after, timedelta):
        return
    if row.due_at == row.since_at + policy.after:
        row.terms, row.computed_due_at = NOTHING_TO_COMPUTE, row.due_at


def _read_details(change: Any) -> None:
    """Set by what an unfinished change moves deadlines."""
    details = change.details
    if details.get("move") == "thaw":
        change.held_from, change.held_until = _moment(details["frozen_at"]), _moment(details["thawed_at"])
    elif details.get("move") == "shift":
        change.shift = timedelta(microseconds=details["microseconds"])


def _moment(text: str) -> datetime:
    """Return a time of a history, which is in UTC, as the database has it."""
    moment = datetime.fromisoformat(text)
    if timezone.is_aware(moment) == settings.USE_TZ:
        return moment
    return timezone.make_aware(moment) if settings.USE_TZ else timezone.make_naive(moment)


class Migration(migrations.Migration):

    dependencies = [
        ('django_delayq', '0002_columns'),
    ]

    operations = [
        migrations.RunPython(carry_over, migrations.RunPython.noop),
    ]
