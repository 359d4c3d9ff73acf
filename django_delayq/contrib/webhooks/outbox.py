"""Write messages in the transaction of what they report, and delete old ones.

A message is saved, which schedules its timeout. Timeouts of messages are reported by no message.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from django_delayq.contrib.webhooks.endpoints import Endpoint, get_endpoints
from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.ledger.error_texts import empty_copies
from django_delayq.ledger.subjects import about_objects, model_of_kind
from django_delayq.models import PolicyChange, Timeout
from django_delayq.policy.options import Brake
from django_delayq.policy.policies import TimeoutPolicy, labels_of
from django_delayq.signals import policy_pausing, timeouts_erasing, timeouts_pruned, timeouts_settling
from django_delayq.sql.statements import CHUNK
from django_delayq.times import clock

State = Timeout.State
TIMES: Final = ("due_at", "since_at", "first_due_at", "created_at", "settled_at")
COLUMNS: Final = ("id", "policy", "key", "queue", "state", "extensions", "attempts", "reason", "is_computed")


def connect() -> None:
    """Connect the receivers below, once per process."""
    timeouts_settling.connect(write_settled, dispatch_uid="delayq_webhooks")
    policy_pausing.connect(write_braked, dispatch_uid="delayq_webhooks")
    timeouts_pruned.connect(forget_old, dispatch_uid="delayq_webhooks")
    timeouts_erasing.connect(erase, dispatch_uid="delayq_webhooks")


def write_settled(timeouts: Sequence[Timeout], using: str, **_: Any) -> None:
    """Write the messages about timeouts that a firing has settled. Receives `timeouts_settling`."""
    for row in timeouts if get_endpoints() else ():
        for event in events_of(row):
            for endpoint in _endpoints_for(event, row.policy):
                data = shown(row, using)
                if endpoint.payload:
                    data["payload"] = row.payload
                elif row.cause == Timeout.Cause.RETRIES:  # the text of the error may contain what the payload does
                    data["reason"] = row.reason.partition(":")[0]
                _write(endpoint, f"timeout.{event}", data, using)


def write_braked(
    policy: TimeoutPolicy[Any], change: PolicyChange, fired: int, brake: Brake, using: str, **_: Any
) -> None:
    """Write the messages about a policy that its brake pauses. Receives `policy_pausing`."""
    for endpoint in _endpoints_for("braked", policy.label):
        data = {"policy": policy.label, "paused_at": _iso(change.at), "reason": change.reason}
        counted = {"fired": fired, "most": brake.most, "per_seconds": brake.per.total_seconds()}
        _write(endpoint, "policy.braked", {**data, **counted}, using)


def events_of(row: Timeout) -> Iterator[str]:
    """Yield the events that a settled row is. One that was too late may be dead, too."""
    if row.state in (State.FIRED, State.DEAD):
        yield str(row.state)
    if row.cause == Timeout.Cause.LATE:
        yield "late"


def shown(row: Timeout, using: str) -> dict[str, Any]:
    """Return a settled row as the REST API shows it, with times in UTC, and without payload and history."""
    model = model_of_kind(row.content_type_id, using)
    about = {"model": model and model._meta.label_lower, "id": row.object_id}
    values = {name: getattr(row, name) for name in COLUMNS} | {name: _iso(getattr(row, name)) for name in TIMES}
    return {**values, "state": str(row.state), "object": about, "cause": str(row.cause) or None}


def forget_old(using: str, before: datetime, **_: Any) -> None:
    """Delete the messages from before `before` whose timeout was deleted, too. Receives `timeouts_pruned`.

    A message that was never delivered is kept as long as its dead timeout, so that it can be retried.
    """
    rows, last = Delivery.objects.using(using).filter(created_at__lt=before).order_by("pk"), 0
    while page := list(rows.filter(pk__gt=last).only("pk")[:CHUNK]):
        last = page[-1].pk
        timeouts = Timeout.objects.using(using).filter(about_objects([Delivery], page, using))
        kept = set(timeouts.values_list("object_id", flat=True))
        rows.filter(pk__in=[each.pk for each in page if str(each.pk) not in kept]).delete()


def erase(timeouts: Sequence[Timeout], using: str, **_: Any) -> None:
    """Empty the messages about these timeouts, also those that are not delivered yet. Receives `timeouts_erasing`."""
    empty_copies(Delivery._base_manager.using(using), "data", timeouts)


def _endpoints_for(kind: str, label: str) -> Collection[Endpoint]:
    """Return the endpoints that get this kind of event of the policy; none for the policy that sends messages."""
    labels = labels_of(label)
    if any(each.startswith(f"{Delivery._meta.label_lower}.") for each in labels):
        return ()
    wanted = (each for each in get_endpoints().values() if kind in each.events)
    return [each for each in wanted if not each.policies or not each.policies.isdisjoint(labels)]


def _write(endpoint: Endpoint, kind: str, data: dict[str, Any], using: str) -> None:
    now = clock.now()
    body = json.dumps({"type": kind, "timestamp": _iso(now), "data": data}, separators=(",", ":"))
    about = {"policy": data["policy"], "timeout_id": data.get("id")}
    message = Delivery(endpoint=endpoint.name, event=kind, **about, body=body, created_at=now)
    message.save(using=using, force_insert=True)


def _iso(at: datetime | None) -> str | None:
    return None if at is None else clock.aware(at).astimezone(UTC).isoformat().replace("+00:00", "Z")
