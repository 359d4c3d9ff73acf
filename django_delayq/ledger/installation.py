"""The name of the installation to which a ledger and a prefix in Redis belong: a guard against copied databases.

A dump of production that is restored in staging contains pending timeouts, and workers of staging would send them to
real customers. So the ledger remembers the name of the first worker, and workers with another name do not start.
Redis remembers the name too, because two ledgers that share a prefix have different rows with the same ids: one removes
the entries of the other. A ledger without a name is known there by the time at which its tables were created.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from django.db import DatabaseError, connections
from django.db.migrations.recorder import MigrationRecorder

from django_delayq import clock
from django_delayq.clock import database_now
from django_delayq.conf import MAX_INSTALLATION, get_settings
from django_delayq.exceptions import EngineError, ForeignEngine, WrongInstallation
from django_delayq.models import Installation, PolicySync, Timeout, WorkerSeen

if TYPE_CHECKING:
    from django_delayq.engine.engine import Engine

logger = logging.getLogger("django_delayq.worker")

UNNAMED: Final = "(database of"
UNNAMED_SECONDS: Final = 300.0
"""How long a ledger without a name owns a prefix after its last sweep. One that was deleted, or that has got another
prefix, must not keep the others from using Redis for good: only this shows that it does not exist any more."""

_created: dict[str, str] = {}
"""What identifies each ledger, by alias. It does not change while the process runs."""


def ledger_name(using: str) -> str | None:
    """Return the name that the ledger remembers; None: no worker with a name has used it. Raises database errors."""
    return Installation.objects.using(using).values_list("name", flat=True).first()


def check(using: str, engine: Engine | None) -> EngineError | None:
    """Check that ledger and Redis belong to this installation, and claim them if they belong to none.

    Both are checked before anything is written, so that a refusal changes nothing. Without `INSTALLATION` every ledger
    is accepted, though not every Redis; if the ledger has a name, a warning is logged.

    Returns:
        The error of a Redis that is not to be used: it is not available, and was not checked, or it has the entries of
        another ledger, and neither has a name.

    Raises:
        WrongInstallation: one of them belongs to another installation.
        DatabaseError: the ledger could not be read.
    """
    name = get_settings().installation
    if name is None:
        if (known := ledger_name(using)) is not None:
            logger.warning(
                "This database belongs to the installation %r, and DELAYQ['INSTALLATION'] is not set here: if it is a "
                "copy, its timeouts fire twice. Set INSTALLATION in every environment.",
                known,
                extra={"event": "installation_unknown", "installation": known},
            )
        return redis_failure(engine, using)
    if check_ledger(using) is None:
        redis_failure(engine, using, claim=False)
        # Of several first workers one inserts its name, and the others read it.
        first = Installation(name=name, since_at=database_now(using))
        Installation.objects.using(using).bulk_create([first], ignore_conflicts=True)
        check_ledger(using)
    return redis_failure(engine, using)


def check_ledger(using: str) -> str | None:
    """Return the name that the ledger remembers, if any. Without `INSTALLATION` do nothing.

    Raises:
        WrongInstallation: the ledger belongs to another installation.
        DatabaseError: it could not be read.
    """
    known = None if get_settings().installation is None else ledger_name(using)
    check_name(known)
    return known


def check_name(known: str | None) -> None:
    """Raise WrongInstallation if the ledger, which remembers the name `known`, belongs to another installation."""
    name = get_settings().installation or known
    if known not in (None, name):
        raise WrongInstallation(
            f"This database belongs to the installation {known!r}, and DELAYQ['INSTALLATION'] is {name!r}. If it is a "
            "copy, run manage.py delayq_adopt to make it this installation's own. Otherwise correct the setting. "
            "Nothing was changed."
        )


def assign(using: str, name: str) -> None:
    """Make the ledger belong to `name`, and delete what workers of its former installation have left in it.

    Their heartbeats would be shown as running workers, and a claim of a copied sync would delay the next one.
    """
    Installation.objects.using(using).update_or_create(defaults={"name": name, "since_at": database_now(using)})
    WorkerSeen.objects.using(using).all().delete()
    PolicySync.objects.using(using).filter(claimed_until__isnull=False).update(claimed_until=None)


def check_prefix(engine: Engine | None, using: str, *, claim: bool = True) -> None:
    """Raise ForeignEngine if the keys of `engine` belong to another installation or ledger, or EngineError.

    `claim`: store the name if there is none, as after FLUSHALL. Without Redis do nothing. Raises the database's errors.
    """
    if engine is None:
        return
    name, unnamed = get_settings().installation, name_of_unnamed(using)
    owner = engine.installation()
    if name is None and unnamed is not None:
        if owner in (None, unnamed) and claim:
            owner = engine.claim_prefix(unnamed, replace=owner is not None, seconds=UNNAMED_SECONDS)
        if owner not in (None, unnamed) and owner != ledger_name(using):
            raise _foreign(engine, str(owner), unnamed)
    elif name is not None:
        if claim and owner in (None, unnamed):
            owner = engine.claim_prefix(name, replace=owner is not None)
        if owner not in (None, unnamed, name):
            raise _foreign(engine, str(owner), name)


def _foreign(engine: Engine, owner: str, own: str) -> ForeignEngine:
    advice = "run manage.py delayq_adopt --redis"
    if owner.startswith(UNNAMED):
        advice = f"wait for {UNNAMED_SECONDS / 60:.0f} minutes"
    error = ForeignEngine(
        f"Redis contains entries of the installation {owner[:MAX_INSTALLATION]!r} under the prefix {engine.prefix!r}, "
        f"and this one is {own!r}. Give each installation its own DELAYQ['PREFIX']. If the other one does not use this "
        f"Redis any more, {advice}"
    )
    error.is_of_unnamed = owner.startswith(UNNAMED)
    return error


def name_of_unnamed(using: str) -> str | None:
    """Return what identifies a ledger without a name, and its copies: when its tables were created; None: unknown."""
    if using not in _created:
        applied = MigrationRecorder(connections[using]).migration_qs.filter(app=Timeout._meta.app_label)
        try:
            created = applied.order_by("id").values_list("applied", flat=True).first()
        except DatabaseError:  # the user of the worker may not read it: Redis is used unchecked
            return None
        if created is None:
            return None
        _created[using] = f"{UNNAMED} {clock.aware(created).isoformat()})"
    return _created[using]


def redis_failure(engine: Engine | None, using: str, *, claim: bool = True) -> EngineError | None:
    """Call `check_prefix`; return the error of a Redis that is not available, or whose owner has no name either.

    Raises ForeignEngine for the Redis of an installation that has a name.
    """
    try:
        check_prefix(engine, using, claim=claim)
    except ForeignEngine as error:
        if error.is_of_unnamed and get_settings().installation is None:
            return error
        raise
    except EngineError as error:
        return error
    return None
