"""The database: versions, migrations, indexes, and its clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import django
from django.db import connections
from django.db.migrations.loader import MigrationLoader
from django.db.models import Model
from django.utils import timezone

import django_delayq
from django_delayq.clock import database_now
from django_delayq.conf import get_settings
from django_delayq.ledger.db_connections import pool_limit, server_limit
from django_delayq.models import PolicyChange, Timeout
from django_delayq.monitoring.doctor.findings import Finding, error, ok, warning

APP: Final = "django_delayq"
SKEW_NOTED: Final = 1.0
SKEW_WRONG: Final = 30.0
"""Seconds. Between them nothing fires early, but deadlines that people named are off by as much."""


def versions(using: str) -> Iterator[Finding]:
    """What runs here."""
    connection = connections[using]
    version = ".".join(str(part) for part in connection.get_database_version())
    words = f"django-delayq {django_delayq.__version__}, Django {django.get_version()}"
    yield ok("versions", f"{words}, {connection.display_name} {version}")


def migrations(using: str) -> Iterator[Finding]:
    """Whether the tables are as this version wants them."""
    loader = MigrationLoader(connections[using])
    missing = sorted(
        name for app, name in loader.graph.nodes if app == APP and (app, name) not in loader.applied_migrations
    )
    if missing:
        yield error("migrations", f"Not applied: {', '.join(missing)}.", "manage.py migrate django_delayq")
    else:
        yield ok("migrations", "All are applied.")


def indexes(using: str) -> Iterator[Finding]:
    """Whether every index is there: without one, what takes milliseconds takes minutes with a million rows."""
    missing = [name for model in (Timeout, PolicyChange) for name in _missing_from(model, using)]
    if missing:
        yield error("indexes", f"Missing: {', '.join(missing)}.", "Somebody dropped them; add them as migrations have.")
    else:
        yield ok("indexes", "All are there.")


def _missing_from(model: type[Model], using: str) -> list[str]:
    connection = connections[using]
    with connection.cursor() as cursor:
        there = connection.introspection.get_constraints(cursor, model._meta.db_table)
    return [str(each.name) for each in (*model._meta.indexes, *model._meta.constraints) if each.name not in there]


def clock(using: str) -> Iterator[Finding]:
    """Whether this machine's clock, which names deadlines, agrees with the database's, which decides."""
    before = timezone.now()
    moment = database_now(using)
    aware = moment if timezone.is_aware(moment) else timezone.make_aware(moment)
    ahead = (before - aware).total_seconds()
    yield skew("clock", "This machine's clock", ahead)


def room(using: str) -> Iterator[Finding]:
    """Whether a worker may open as many connections as it needs."""
    limit = pool_limit(using) or server_limit(using)
    settings = get_settings()
    shortage = limit and limit.shortage(0 if settings.executor else settings.concurrency)
    if shortage:
        yield warning("connections", shortage, "Raise the limit; until then workers run fewer threads.")
    else:
        yield ok("connections", "A worker may open as many as it needs.")


def skew(name: str, whose: str, ahead: float) -> Finding:
    """What it means that a clock is so many seconds ahead of the database's."""
    seconds = abs(ahead)
    text = f"{whose} is {seconds:.1f} s {'ahead of' if ahead > 0 else 'behind'} the database's."
    hint = "Let both machines keep their time by NTP."
    if seconds >= SKEW_WRONG:
        return error(name, text, hint)
    return warning(name, text, hint) if seconds >= SKEW_NOTED else ok(name, f"{whose} agrees with the database's.")
