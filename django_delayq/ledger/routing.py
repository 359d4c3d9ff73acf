"""Which database holds an object and its timeouts, as the routers of the project decide it."""

from __future__ import annotations

import functools
from typing import Any, cast

from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.models import Model, QuerySet

from django_delayq.conf import ConfigError
from django_delayq.models import Timeout


def database_of(model: type[Model], source: Model | QuerySet[Any] | None = None) -> str:
    """Return the alias of the writer that holds `model` and the ledger; each decision is made and locked there.

    Args:
        model: a business model, or `Timeout` itself.
        source: the instance or queryset at hand, for routers that decide by it. See `writer_of`.

    Raises:
        ConfigError: the routers put the two into different databases, where no transaction spans both; or the
            database has no ledger.
    """
    own: str | None = None
    if source is not None:
        own = cast("Any", source)._db if isinstance(source, QuerySet) else source._state.db
    if not router.routers and own in (None, DEFAULT_DB_ALIAS):
        return DEFAULT_DB_ALIAS  # by far the most frequent case
    business, ledger = writer_of(model, source), writer_of(Timeout, source)
    if business != ledger:
        raise ConfigError(
            f"{model.__name__} is written to database {business!r} and its timeouts to {ledger!r}. They must share "
            f"one: let db_for_write() of your routers answer {business!r} for the apps django_delayq and contenttypes "
            f"too, and run manage.py migrate --database {business}."
        )
    if not has_ledger(business):
        raise ConfigError(
            f"This {model.__name__} comes from database {business!r}, which has no timeouts. Pass one from "
            f"{writer_of(model)!r}, or run manage.py migrate django_delayq --database {business}."
        )
    return business


def writer_of(model: type[Model], source: Model | QuerySet[Any] | None = None) -> str:
    """Return the alias to which rows of `model` are written, according to the routers.

    `db_for_write()` decides, and gets `source` (or an instance from the same database) as its hint `instance`. If no
    router answers, the database that `source` comes from counts, as for Django's `save()`: an application that names
    shards with `using` needs no router. It does not count where routers choose the database to read from: then
    `source` may come from a replica, and `default` is the writer.
    """
    hints: dict[str, Any] = {}
    own: str | None = None
    if isinstance(source, QuerySet):
        own, hints = cast("Any", source)._db, dict(cast("Any", source)._hints)
        if own is not None and "instance" not in hints:
            hints["instance"] = source.model()
            hints["instance"]._state.db = own
    elif source is not None:
        own, hints = source._state.db, {"instance": source}
    chosen = _routed("db_for_write", model, hints)
    if chosen is None and own is not None and _routed("db_for_read", model, hints) is None:
        chosen = own
    return chosen or DEFAULT_DB_ALIAS


def _routed(action: str, model: type[Model], hints: dict[str, Any]) -> str | None:
    """Return the first router's answer; None: no router answers, and Django falls back to the hint's own alias."""
    answers = (getattr(each, action)(model, **hints) for each in router.routers if hasattr(each, action))
    return next(filter(None, answers), None)


def has_ledger(using: str) -> bool:
    """Return whether database `using` has the ledger's tables, or is the one that must have them."""
    return using == writer_of(Timeout) or (router.allow_migrate_model(using, Timeout) and _is_migrated(using))


@functools.cache
def _is_migrated(using: str) -> bool:
    return Timeout._meta.db_table in connections[using].introspection.table_names()


def has_timeouts(model: type[Model], instance: Model, using: str) -> bool:
    """Return whether `using`, to which `instance` is written, is the database that has the timeouts of `model`.

    Copies that the application writes to another database, such as an archive, have none. Raises ConfigError if the
    routers separate the model from the ledger.
    """
    is_home = using == writer_of(model)
    if not is_home and (writer_of(model, instance) != using or not has_ledger(using)):
        return False
    return database_of(model, instance) == using
