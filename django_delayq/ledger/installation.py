"""The name of the installation to which a ledger and a prefix in Redis belong: a guard against copied databases.

A dump of production that is restored in staging contains pending timeouts, and workers of staging would send them to
real customers. So the ledger remembers the name of the first worker, and workers with another name do not start.
Redis remembers the name too, because two ledgers that share a prefix have different rows with the same ids.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from django_delayq.clock import database_now
from django_delayq.conf import MAX_INSTALLATION, get_settings
from django_delayq.exceptions import EngineError, ForeignEngine, WrongInstallation
from django_delayq.models import Installation, PolicySync, WorkerSeen

if TYPE_CHECKING:
    from django_delayq.engine.engine import Engine

logger = logging.getLogger("django_delayq.worker")


def ledger_name(using: str) -> str | None:
    """Return the name that the ledger remembers; None: no worker with a name has used it. Raises database errors."""
    return Installation.objects.using(using).values_list("name", flat=True).first()


def check(using: str, engine: Engine | None) -> EngineError | None:
    """Check that ledger and Redis belong to this installation, and claim them if they belong to none.

    Both are checked before anything is written, so that a refusal changes nothing. Without `INSTALLATION` every ledger
    is accepted; if the ledger has a name, a warning is logged.

    Returns:
        The error of a Redis that is not available, and was not checked.

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
        return None
    if check_ledger(using) is None:
        redis_failure(engine, claim=False)
        # Of several first workers one inserts its name, and the others read it.
        first = Installation(name=name, since_at=database_now(using))
        Installation.objects.using(using).bulk_create([first], ignore_conflicts=True)
        check_ledger(using)
    return redis_failure(engine)


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


def check_prefix(engine: Engine | None, *, claim: bool = True) -> None:
    """Raise ForeignEngine if the keys of `engine` belong to another installation, or EngineError.

    `claim`: store the name if there is none, as after FLUSHALL. Without `INSTALLATION` or Redis do nothing.
    """
    name = get_settings().installation
    if name is None or engine is None:
        return
    owner = engine.claim_prefix(name) if claim else engine.installation()
    if owner not in (None, name):
        raise ForeignEngine(
            f"Redis contains entries of the installation {str(owner)[:MAX_INSTALLATION]!r} under the prefix "
            f"{engine.prefix!r}, and this one is {name!r}. Give each installation its own DELAYQ['PREFIX']. If the "
            "other one does not use this Redis any more, run manage.py delayq_adopt --redis"
        )


def redis_failure(engine: Engine | None, *, claim: bool = True) -> EngineError | None:
    """Call `check_prefix`, and return the error of a Redis that is not available. Raises ForeignEngine."""
    try:
        check_prefix(engine, claim=claim)
    except ForeignEngine:
        raise
    except EngineError as error:
        return error
    return None
