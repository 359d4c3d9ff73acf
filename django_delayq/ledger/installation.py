"""The name of the installation to which a ledger belongs: a guard against copied databases.

A dump of production that is restored in staging contains pending timeouts, and workers of staging would send them to
real customers. So the ledger remembers the name of the first worker, and workers with another name do not start.
"""

from __future__ import annotations

import logging

from django_delayq.conf import get_settings
from django_delayq.exceptions import WrongInstallation
from django_delayq.models import Installation, PolicySync, WorkerSeen
from django_delayq.sql.now import database_now

logger = logging.getLogger("django_delayq.worker")


def ledger_name(using: str) -> str | None:
    """Return the name that the ledger remembers; None: no worker with a name has used it. Raises database errors."""
    return Installation.objects.using(using).values_list("name", flat=True).first()


def check(using: str) -> None:
    """Check that the ledger belongs to this installation, and claim it if it belongs to none.

    Without `INSTALLATION` every ledger is accepted; if it has a name, a warning is logged.

    Raises:
        WrongInstallation: it belongs to another installation.
        DatabaseError: it could not be read.
    """
    name, known = get_settings().installation, ledger_name(using)
    if name is None and known is not None:
        logger.warning(
            "This database belongs to the installation %r, and DELAYQ['INSTALLATION'] is not set here: if it is a "
            "copy, its timeouts fire twice. Set INSTALLATION in every environment.",
            known,
            extra={"event": "installation_unknown", "installation": known},
        )
    if name is not None and known is None:
        # Of several first workers one inserts its name, and the others read it.
        first = Installation(name=name, since_at=database_now(using))
        Installation.objects.using(using).bulk_create([first], ignore_conflicts=True)
        known = ledger_name(using)
    check_name(known)


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
