"""Make a ledger this installation's own: for a copied database, or after `INSTALLATION` was changed.

The name is written last. A process that dies before leaves a ledger that workers still refuse, and the next call
continues with the rows that are left.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

from django.db.models import Q

from django_delayq import signals
from django_delayq.clock import counted
from django_delayq.conf import ConfigError, get_settings
from django_delayq.exceptions import DelayqError
from django_delayq.ledger import installation, writing
from django_delayq.ledger.history import record
from django_delayq.ledger.locking import database_of, transaction_of
from django_delayq.ledger.search import count
from django_delayq.models import Timeout
from django_delayq.operations.runner import Action, Context, Progress, Refusal, checked_actor, run_action
from django_delayq.redis_clients import get_engine

logger = logging.getLogger("django_delayq.steering")
State = Timeout.State


@dataclass(frozen=True, slots=True)
class Adoption:
    """What `adopt` did, or with `dry_run` would do.

    Attributes:
        before: the former name of the ledger; None: it had none.
        name: the present one. If both are equal, nothing was changed.
        cancelled: the number of cancelled timeouts.
        renewed: the number of timeouts with a new `idempotency_key`: dead ones, and pending ones that are kept.
    """

    before: str | None
    name: str
    cancelled: int = 0
    renewed: int = 0


def adopt(
    *,
    by: str,
    reason: str = "",
    pending: Literal["cancel", "keep"] | None = None,
    with_redis: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    using: str | None = None,
) -> Adoption:
    """Give the ledger the name in `DELAYQ["INSTALLATION"]`, so that workers of this installation accept it.

    Timeouts that may fire here get new idempotency keys, because receivers of the former ones may belong to the other
    installation. Heartbeats and claims of the former workers are deleted. Outside a transaction each page of 500 rows
    is a transaction; the call may be interrupted and repeated.

    Args:
        by, reason: see `operations`. They are stored in the history of each row.
        pending: `"cancel"` pending and firing timeouts by hand, or `"keep"` them. Required if there are any.
        with_redis: also claim the Redis under `PREFIX`, from an installation that does not use it any more.
        dry_run: count, and write nothing.
        progress: called with the result of each page, after its commit.
        using: the database; by default where the routers write the ledger.

    Raises:
        ConfigError: `INSTALLATION` is not set.
        WrongInstallation: the Redis under `PREFIX` belongs to another installation. Nothing was changed.
        DelayqError: `pending` is missing. Nothing was changed.
        ValueError: `by` is empty, or `pending` has another value.
    """
    by, name, using = checked_actor(by), get_settings().installation, using or database_of(Timeout)
    if name is None:
        raise ConfigError("DELAYQ['INSTALLATION'] is not set: give this installation a name of its own first.")
    if pending not in ("cancel", "keep", None):
        raise ValueError(f'pending is "cancel", "keep" or None, not {pending!r}.')
    done = Adoption(installation.ledger_name(using), name)
    if not with_redis:
        # Before a row is cancelled, whose id may be the id of a timeout of the other installation.
        error = installation.redis_failure(get_engine(using), claim=False)
        if error is not None:
            logger.warning("%s. It was not checked whose Redis it is", error, extra={"event": "redis_unchecked"})
    if done.before != name:
        done = _change_rows(done, using, pending, by=by, reason=reason, dry_run=dry_run, progress=progress)
    if done.before != name and not dry_run:
        with transaction_of(using):
            installation.assign(using, name)
        logger.info(
            "The database of %r was adopted as %r by %s: %s cancelled, %s renewed",
            *(done.before, name, by, counted(done.cancelled, "timeout"), counted(done.renewed, "idempotency key")),
            extra={"event": "adopted", "by": by, "reason": reason, "before": done.before, "installation": name},
        )
    if with_redis and not dry_run and (engine := get_engine(using)) is not None:
        engine.claim_prefix(name, replace=True)
    return done


def _change_rows(done: Adoption, using: str, pending: str | None, **options: Any) -> Adoption:
    rows = Timeout.objects.using(using)
    if pending is None and (number := count(rows.unsettled())).value:
        words = f"This database has {counted(number, 'pending timeout')}: give --cancel-pending or --keep-pending."
        raise DelayqError(words)
    kept, cancelled = Q(state=State.DEAD), 0
    if pending == "cancel":
        action = Action("cancel", signals.timeout_cancelled, _refuse_settled, _cancel)
        cancelled = run_action(rows.unsettled(), action, **options).changed
    else:
        kept |= Q(settled_at__isnull=True)
    action = Action("adopt", signals.timeout_rescheduled, _refuse_settled, _renew)
    return replace(done, cancelled=cancelled, renewed=run_action(rows.filter(kept), action, **options).changed)


def _refuse_settled(row: Timeout, context: Context) -> Refusal | None:
    return Refusal.SETTLED if row.is_settled and row.state != State.DEAD else None


def _cancel(rows: list[Timeout], context: Context) -> None:
    # Firing ones too: the process that fired them in the copied database does not run here.
    for row in rows:
        record(row, "cancel_requested", **context.event)
    states = (State.PENDING, State.FIRING)
    writing.cancel_rows(rows, context.using, context.reason, context.now, states=states)


def _renew(rows: list[Timeout], context: Context) -> None:
    for row in rows:
        record(row, "adopted", **context.event)
    writing.renew_keys(rows, context.using)
