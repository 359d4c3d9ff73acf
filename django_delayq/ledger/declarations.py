"""What the ledger remembers of the declarations of policies.

It knows which of several is the newest, while releases of an application run side by side, and the oldest name.

During a rolling deployment, workers with the former code and with the new code fire the same timeouts. If the new code
has another `when`, the former one would settle timeouts whose condition holds only by the new one. So `PolicySync` has
the fingerprints of the declarations that workers had, the newest first, and a worker with another one neither syncs the
policy nor settles timeouts whose condition does not hold by its own declaration.

A declaration that no worker had before becomes the newest when its first worker starts. A former one becomes it again
only if no worker has confirmed the newest one for `SILENT` intervals, as after a return to the former release. A worker
with the former code that is started again in the middle of a deployment changes nothing.

The slots of rounds are digests of the oldest name of their policy. A release with another one would not find them, and
would arm second ones. So its worker does not start: see `wrong_names`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Final

from django.db.models import Field, Lookup, Model, QuerySet, Subquery
from django.db.models.expressions import BaseExpression
from django.db.models.sql import Query
from django.utils.functional import Promise
from django.utils.tree import Node

from django_delayq.conf import get_settings
from django_delayq.exceptions import PolicyError
from django_delayq.ledger.routing import database_of
from django_delayq.models import PolicySync, Timeout
from django_delayq.policy.policies import TimeoutPolicy, get_policies
from django_delayq.sql.now import database_now
from django_delayq.times.calendars import WorkingHours, is_calendar

logger = logging.getLogger("django_delayq.worker")

SILENT: Final = 3
"""Each sync confirms a declaration, twice in an interval: a worker that misses some must not lose the policy."""
REMEMBERED: Final = 10
"""How many declarations are remembered. More than releases that run at the same time, and short enough for a row."""

_outdated = set[tuple[str, str]]()
"""The databases and labels for which this process has logged that its declaration is not the newest one."""


@functools.lru_cache(maxsize=1000)
def fingerprint(policy: TimeoutPolicy[Any]) -> str:
    """Return a digest of what decides whether an object has a timeout, and whether its clock runs.

    It is the same in each process with the same code.
    """
    parts = (policy.when, policy.since, policy.after, policy.hold_when)
    text = json.dumps([_described(value) for value in parts])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def register(using: str) -> set[str]:
    """Make the declarations of this process known, and confirm those that are the newest; log a change of that.

    Return the labels of the policies of which another declaration is the newest. Each sync of a worker calls it. Raises
    the database's errors, and PolicyError for `wrong_names`, if another database replaced it meanwhile.
    """
    declared, rows = _declared(using), PolicySync.objects.using(using)
    now, interval = database_now(using), get_settings().sync_interval
    found = {row.policy: row for row in rows.filter(policy__in=declared)}
    if missing := sorted(declared.keys() - found.keys()):
        oldest = {label: declared[label].oldest_label for label in missing}
        new = [PolicySync(policy=label, oldest_label=oldest[label], before_at=now) for label in missing]
        rows.bulk_create(new, ignore_conflicts=True)
        found = {row.policy: row for row in rows.filter(policy__in=declared)}
    if any(row.oldest_label != declared[label].oldest_label for label, row in found.items()):
        check_names(using)
    outdated, confirmed = set[str](), list[int]()
    for label, row in found.items():
        own = fingerprint(declared[label])
        if _is_outdated(row, own, now):
            outdated.add(declared[label].label)
        elif row.declarations[:1] != [own]:
            known = [own, *(each for each in row.declarations if each != own)][:REMEMBERED]
            # Another worker may do the same now. The one that comes second finds what the first one has written.
            same = rows.filter(pk=row.pk, confirmed_at=row.confirmed_at)
            same.update(declarations=known, confirmed_at=now)
        elif not now - interval / 2 <= row.confirmed_at <= now:
            confirmed.append(row.pk)
    if confirmed:
        rows.filter(pk__in=confirmed).update(confirmed_at=now)
    _log(using, outdated)
    return outdated


def check_names(using: str) -> None:
    """Raise PolicyError if there are `wrong_names`; else remember other names, of which the ledger has no timeouts.

    Each worker calls it before it begins.
    """
    if faults := [" ".join(fault) for fault in wrong_names(using)]:
        raise PolicyError("\n".join(faults))
    for row, label in _other_names(using):
        PolicySync.objects.using(using).filter(pk=row.pk).update(oldest_label=label)


def wrong_names(using: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the oldest names of the declared policies, each with a hint.

    An alias was removed or is at another place, or two policies were joined, and the ledger has timeouts of the former
    declaration.
    """
    for row, label in _other_names(using):
        former = row.oldest_label
        if not Timeout.objects.using(using).of_labels({row.policy, former}).exists():
            continue
        words = f"Timeout policy {row.policy}: its oldest name is {label!r}, but was {former!r}, by which its timeouts "
        hint = f"Put {former!r} first in aliases=."
        if former == row.policy:
            hint += " If it was another policy, declare it by itself until the ledger has no timeouts of it."
        yield f"{words}are found: saves would schedule second ones, and both fire.", hint


def _other_names(using: str) -> Iterator[tuple[PolicySync, str]]:
    """Yield the rows with another oldest label than that of the declared policy, which comes with them."""
    declared = _declared(using)
    for row in PolicySync.objects.using(using).filter(policy__in=declared).order_by("policy"):
        if row.oldest_label != (label := declared[row.policy].oldest_label):
            yield row, label


def _declared(using: str) -> dict[str, TimeoutPolicy[Any]]:
    """Return the declared policies of a database by their labels, present and former."""
    policies = [policy for policy in get_policies() if database_of(policy.concrete_model) == using]
    return {label: policy for policy in policies for label in policy.labels}


def is_outdated(policy: TimeoutPolicy[Any], using: str, now: datetime) -> bool:
    """Return whether workers run with a newer declaration of `policy` than this process has."""
    row = PolicySync.objects.using(using).filter(policy=policy.label).first()
    return row is not None and _is_outdated(row, fingerprint(policy), now)


def _is_outdated(row: PolicySync, own: str, now: datetime) -> bool:
    """Return whether a worker has confirmed a newer declaration recently. Not if the clock was set back since.

    An unknown one is newer: its first worker has not registered it yet, or it runs where no worker does.
    """
    interval, at = get_settings().sync_interval, row.confirmed_at
    is_confirmed = at is not None and now - SILENT * interval <= at <= now + interval
    return own in row.declarations[1:] and is_confirmed


def _log(using: str, outdated: set[str]) -> None:
    known = {label for database, label in _outdated if database == using}
    for label in sorted(outdated - known):
        logger.warning(
            "%s: workers with a newer declaration of the policy are running. This one leaves timeouts whose condition "
            "does not hold by its own declaration to them.",
            label,
            extra={"event": "declaration_outdated", "policy": label},
        )
    for label in sorted(known - outdated):
        words = "%s: the declaration of this worker is the newest one that runs"
        logger.info(words, label, extra={"event": "declaration_current", "policy": label})
    _outdated.difference_update((using, label) for label in known - outdated)
    _outdated.update((using, label) for label in outdated)


def _described(value: Any) -> Any:
    """Return what JSON can represent of `value`, the same in each process: no addresses, and sets in one order.

    Of a function and of a type that is not known here, only its name.
    """
    if isinstance(value, Enum):
        return _described(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Promise):
        return str(value)
    if isinstance(value, Node):  # Q, and the WHERE of a query
        return [value.connector, value.negated, *map(_described, value.children)]
    if isinstance(value, set | frozenset):
        return _sorted(value)
    if isinstance(value, Mapping):
        return _sorted(value.items())
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    return [_name(value), *_parts(value)]


def _parts(value: Any) -> list[Any]:
    """Return the described parts of a value that is not plain data."""
    parts: Iterable[Any] = ()
    if isinstance(value, Model):
        parts = [value.pk]
    elif isinstance(value, QuerySet | Subquery):
        parts = [value.query]
    elif isinstance(value, Query):
        parts = [value.model, value.where, value.low_mark, value.high_mark, value.annotations]
    elif isinstance(value, Lookup):
        # A query turns the sets that it gets into lists.
        parts = [value.lhs, _sorted(value.rhs) if isinstance(value.rhs, list | tuple) else value.rhs]
    elif is_calendar(value):  # not its holidays, which fill themselves by the years that were asked for
        parts = [str(value)] if isinstance(value, WorkingHours) else []
    elif hasattr(value, "_constructor_args"):  # most expressions, such as F
        parts = value._constructor_args
    elif isinstance(value, BaseExpression):
        parts = value.get_source_expressions()
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, Field | bytes) or type(value).__module__ in {"datetime", "decimal", "uuid", "zoneinfo"}:
        parts = [str(value)]
    return [_described(part) for part in parts]


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(map(_described, values), key=json.dumps)


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
