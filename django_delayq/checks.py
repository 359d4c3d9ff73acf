"""System checks: configuration errors that can be found before the first deadline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.contrib.contenttypes.models import ContentType
from django.core.checks import CheckMessage, Error, Info, Tags, Warning
from django.core.checks import register as register_check
from django.db import DatabaseError, connections, router, transaction
from django.db.models import Model, Q
from django.utils import timezone
from django.utils.module_loading import import_string

from django_delayq.arming.receivers import ArmingQuerySet
from django_delayq.conf import ConfigError, get_settings
from django_delayq.ledger.db_connections import is_missing, pool_limit
from django_delayq.ledger.declarations import wrong_names
from django_delayq.ledger.error_texts import get_scrubber
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.traces import get_around
from django_delayq.models import Timeout
from django_delayq.policy.declaring import check_id
from django_delayq.policy.policies import TimeoutPolicy, get_policies
from django_delayq.policy.reads import ignored_deletion, reads_other_rows, times_in, unindexed
from django_delayq.policy.watches import cannot_watch, watches_of
from django_delayq.sql.dialects import UNSUPPORTED, dialect_of
from django_delayq.times.clock import duration_text


def register() -> None:
    """Register the checks below with Django."""
    for check in (check_settings, check_policies, check_modules, check_pool, check_time_zone, check_other_apps):
        register_check(check, "django_delayq")
    for of_database in (check_databases, check_names, check_conditions):
        register_check(of_database, "django_delayq", Tags.database)
    for check in (check_redis, check_bulk_writes, check_installation, check_silence):
        register_check(check, "django_delayq", deploy=True)


def check_settings(**_: Any) -> Iterator[CheckMessage]:
    """Check the values of `DELAYQ`. Calls neither Redis nor the callable in SCRUB.

    Reports:
        E001: `REDIS` is not an address that redis-py can use, or `DELAYQ` has another wrong value.
        I001: no Redis is configured, so workers poll the database once a second.
        E002: `CATCH_UP` is not less than half of `RETENTION`, or of the `retention` of an automatic policy.
        E003: `EXECUTOR` cannot be imported.
        E007: `SCRUB` cannot be imported, or is not callable.
        E008: `AROUND` names something that is not callable, or cannot be imported, as if a package is not installed.
        W003: `USE_TZ` is False, so one hour of the year occurs twice.
    """
    from django_delayq.redis_clients.clients import check_source  # loads redis-py, which no web process needs for this

    try:
        settings = get_settings()
    except ConfigError as error:
        yield Error(str(error), id="django_delayq.E001")
        return
    if settings.redis is None and "REDIS" not in getattr(django_settings, "DELAYQ", {}):  # None was chosen
        words = "No Redis is configured: workers poll the database once a second."
        hint = 'Set DELAYQ = {"REDIS": "redis://..."}, if timeouts shall be in time that are scheduled less than two '
        hint += 'seconds ahead; or {"REDIS": None} to poll.'
        yield Info(words, hint, id="django_delayq.I001")
    if settings.catch_up >= settings.retention / 2:
        words = "CATCH_UP must be less than half of RETENTION."
        hint = "Otherwise a round whose settled row was pruned could be armed, and fire, a second time."
        yield Error(words, hint, id="django_delayq.E002")
    if settings.executor is not None:
        try:
            import_string(settings.executor)
        except ImportError as error:
            yield Error(f"DELAYQ['EXECUTOR'] cannot be imported: {error}", id="django_delayq.E003")
    checks: list[tuple[Callable[[], object], str]] = [(partial(check_source, settings.redis), "django_delayq.E001")]
    checks += [(get_scrubber, "django_delayq.E007"), (get_around, "django_delayq.E008")]
    for check, error_id in checks:
        try:
            check()
        except ConfigError as error:
            yield Error(str(error), id=error_id)
    if not django_settings.USE_TZ:
        words = "USE_TZ is False: deadlines are stored in local time, in which one hour a year occurs twice."
        hint = "Set USE_TZ = True."
        yield Warning(words, hint, id="django_delayq.W003")


def check_policies(**_: Any) -> Iterator[CheckMessage]:
    """Check that each policy's model shares a database with the ledger, and that saves can change its condition."""
    for policy in get_policies():
        silenced = {check_id(each) for each in policy.silenced_checks}
        for message in (*_check_database(policy), *_check_rows(policy), *_check_options(policy)):
            message.obj = policy
            if check_id(message.id) not in silenced:
                yield message


def _check_database(policy: TimeoutPolicy[Any]) -> Iterator[CheckMessage]:
    """Check the database of the model of `policy`.

    Reports:
        E004: the routers separate a model and its timeouts into two databases.
        E024: the database has a schema for each tenant, as with django-tenants.
        E026: `since` names a `DateField`, and `DATABASES` has a `TIME_ZONE` for the database.
        E020: the routers keep `contenttypes` out of the database of a model with policies.
        E021: the routers keep `django_delayq` out of the database of a model with policies.
    """
    try:
        using = database_of(policy.concrete_model)
    except ConfigError as error:
        yield Error(str(error), id="django_delayq.E004")
        return
    if hasattr(connections[using], "schema_name"):
        words = f"Database {using!r} has a schema for each tenant, and workers serve only one schema."
        hint = "Use a column or a database for each tenant: see docs/how-to/tenants.md."
        yield Error(words, hint, id="django_delayq.E024")
    if policy.counts_from_date and django_settings.USE_TZ and connections[using].settings_dict.get("TIME_ZONE"):
        words = f"since of {policy.label} names a DateField, and database {using!r} has a TIME_ZONE of its own."
        hint = "Remove TIME_ZONE from DATABASES, or give a DateTimeField: the midnight of a date is in UTC."
        yield Error(words, hint, id="django_delayq.E026")
    for model, error_id in ((ContentType, "django_delayq.E020"), (Timeout, "django_delayq.E021")):
        if not router.allow_migrate_model(using, model):
            app = model._meta.app_label
            words = f"The routers keep {app} out of database {using!r}, in which {policy.model.__name__} is."
            hint = f"Let allow_migrate() answer True for {app} there, and run manage.py migrate --database {using}."
            yield Error(words, hint, id=error_id)


def _check_rows(policy: TimeoutPolicy[Any]) -> Iterator[CheckMessage]:
    """Check that what changes the condition of `policy` can be noticed.

    Reports:
        W001: `when` or `hold_when` reads other rows in a way that cannot be watched: saving those schedules nothing.
        W017: `when` or `hold_when` compares with a time that was computed at the start, or changes without a save.
    """
    reading = cannot_watch(policy) if reads_other_rows(policy) else []
    if not reading and reads_other_rows(policy) and not watches_of(policy):
        reading = ["when"]  # by what the base manager adds
    if reading:
        lookups = "a lookup, such as ~Q(payments__status=...)"
        yield Warning(
            f"{' and '.join(reading)} of {policy.label} {'read' if len(reading) > 1 else 'reads'} other rows in a way "
            "that cannot be watched: saving those schedules and cancels nothing.",
            hint=f"Name them by {lookups}; or call sync_timeouts({policy.model._meta.model_name}) in a receiver of "
            'post_save and post_delete of their model, and add silenced_checks="W001".',
            id="django_delayq.W001",
        )
    for option, condition in (("when", policy.when), ("hold_when", policy.hold_when)):
        for value in list(times_in(condition))[:1]:
            how = "which stays as it is from the start on" if isinstance(value, date) else "which no save announces"
            yield Warning(
                f"{option} of {policy.label} compares with {value}, {how}.",
                hint="Let since and after name the time, or compare with timezone.now() in the handler, which then "
                'raises Skip. If you mean a fixed date, add silenced_checks="W017".',
                id="django_delayq.W017",
            )


def _check_options(policy: TimeoutPolicy[Any]) -> Iterator[CheckMessage]:
    """Check that the options of `policy` fit each other. For E002 see also `check_settings`.

    Reports:
        W013: `since` without `when`: the policy is not automatic.
        I004: `when` and `after` without `since`: the policy is not automatic.
        W015: `when` ignores soft deletion: timeouts of deleted rows fire.
        W016: `search` names a field without an index, so that each search reads the whole table.
        W002: `when` and `since`, but no `after`: a save can cancel the timeout, but never schedule it.
    """
    if policy.retention is not None and policy.is_automatic and get_settings().catch_up >= policy.retention / 2:
        yield Error(
            f"CATCH_UP must be less than half of the retention of {policy.label}, {duration_text(policy.retention)}.",
            hint="Otherwise a round whose settled row was pruned could be armed, and fire, a second time. "
            "Give a longer retention=, or shorten CATCH_UP.",
            id="django_delayq.E002",
        )
    if policy.since is not None and policy.when is None:
        words = f"{policy.label} has since but no when: it is not automatic, so saving an object schedules nothing."
        hint = "Give when=, or when=Q() for every object. Without when, each timeout needs schedule_timeout()."
        yield Warning(words, hint, id="django_delayq.W013")
    if not policy.names_since and policy.since is None and policy.when is not None and policy.after is not None:
        words = "when and after but no since: saving an object schedules nothing."
        hint = 'Add since=, such as since="created_at"; or since=None, if schedule_timeout() schedules it.'
        yield Info(words, hint, id="django_delayq.I004")
    if ignored := ignored_deletion(policy):
        yield Warning(
            f"when of {policy.label} does not read {', '.join(ignored)}: timeouts of deleted or hidden rows fire.",
            hint=f"Add the field to when, such as {ignored[0]}__isnull=True or {ignored[0]}=False: handlers get "
            "such rows too, and saving one may bring it back.",
            id="django_delayq.W015",
        )
    for path in unindexed(policy):
        words = f"search of {policy.label} names {path}, which has no index: each search reads the whole table."
        hint = "Set db_index=True on the field, or add an index that begins with it."
        yield Warning(words, hint, id="django_delayq.W016")
    if policy.is_automatic and policy.after is None:
        words = f"{policy.label} has when and since but no after: saving cancels it, but can never arm it."
        hint = "Give after=, or schedule it by hand."
        yield Warning(words, hint, id="django_delayq.W002")


def check_bulk_writes(**_: Any) -> Iterator[CheckMessage]:
    """Name the models with automatic policies, or that one reads, whose default manager does not arm after bulk writes.

    Only with `check --deploy`: Django prints the notes of other checks before the output of each command.

    Reports:
        I002: models with automatic policies, whose default manager does not arm after bulk writes.
    """
    automatic = [policy for policy in get_policies() if policy.is_automatic]
    models: set[type[Model]] = {policy.model for policy in automatic}
    models |= {watch.model for policy in automatic for watch in watches_of(policy) if watch.names}
    models = {model for model in models if not model._meta.auto_created}
    if lacking := sorted(model._meta.label for model in models if not _arms_bulk_writes(model)):
        yield Info(
            f"bulk_create(), bulk_update() and update() of {', '.join(lacking)} do not schedule or cancel timeouts: "
            "workers do it within SYNC_INTERVAL.",
            hint="Use ArmingManager or ArmingQuerySet to do it in the same transaction, or call sync_timeouts().",
            id="django_delayq.I002",
        )


def _arms_bulk_writes(model: type[Model]) -> bool:
    with suppress(Exception):  # a manager may raise outside of a request, for example if there is no tenant
        return isinstance(model._default_manager.get_queryset(), ArmingQuerySet)
    return True


def check_modules(**_: Any) -> Iterator[CheckMessage]:
    """Find policies in a `timeout.py`, which is not imported.

    Reports:
        W014: an app has policies in `timeout.py`, which is not imported.
    """
    for config in apps.get_app_configs():
        name = f"{config.name}.timeout"
        path = Path(config.path, "timeout.py")
        if name not in sys.modules and path.is_file() and "django_delayq" in path.read_text(errors="replace"):
            words = f"{name} is not imported: policies are looked for in timeouts.py."
            hint = f"Rename {path} to timeouts.py."
            yield Warning(words, hint, id="django_delayq.W014")


def check_other_apps(**_: Any) -> Iterator[CheckMessage]:
    """Check that no other app keeps versions of timeouts, or answers the queries of workers from a cache.

    Reports:
        E022: django-reversion keeps versions of timeouts: a revert would fire them again.
        E023: django-cachalot or django-cacheops answers the queries of workers from its cache: nothing fires.
    """
    if _of_app("reversion", "is_registered")(Timeout):
        yield Error(
            "django-reversion keeps versions of timeouts: a revert would make fired ones pending, and they fire again.",
            hint="VersionAdmin registers the models of its inlines, unless @reversion.register() is on its own model.",
            id="django_delayq.E022",
        )
    # A query that compares with the clock of the database has the same text at any time.
    profile, is_cachable = _of_app("cacheops.conf", "model_profile"), _of_app("cachalot.utils", "is_cachable")
    models = apps.get_app_config(Timeout._meta.app_label).get_models()
    if any((profile(model) or {}).get("ops") or is_cachable(model._meta.db_table) for model in models):
        words = "The queries of the ledger are cached: workers would not notice that a timeout is due."
        hint = 'Set CACHALOT_UNCACHABLE_APPS = ["django_delayq"], or CACHEOPS = {"django_delayq.*": None, ...}.'
        yield Error(words, hint, id="django_delayq.E023")


def _of_app(module: str, name: str) -> Any:
    """Return a function of another app; one that returns None if the project does not use the app."""
    return getattr(sys.modules.get(module), name, lambda _: None)


def check_redis(**_: Any) -> Iterator[CheckMessage]:
    """Check that Redis does not evict. Asks it, for a quarter of a second at most, so only with `check --deploy`.

    Reports:
        W005: Redis evicts keys when it is short of memory.
    """
    from django_delayq.redis_clients.clients import PRODUCER, evicting_policy, make_client  # loads redis-py

    with suppress(ConfigError):  # reported by `check_settings`, or when Redis is first used
        source = get_settings().redis
        policy = None if source is None else evicting_policy(make_client(source, PRODUCER))
        if policy is not None:
            words = f"Redis has maxmemory-policy {policy}: when memory is short, it evicts due times."
            hint = "Set it to noeviction, or use a Redis that is not a cache: evicted timeouts fire late."
            yield Warning(words, hint, id="django_delayq.W005")


def check_installation(**_: Any) -> Iterator[CheckMessage]:
    """Recommend a name for the installation. Reads only settings; only with `check --deploy`.

    Reports:
        W030: `INSTALLATION` is not set, so workers accept a copied database.
    """
    with suppress(ConfigError):  # reported by `check_settings`
        if get_settings().installation is None:
            yield Warning(
                "DELAYQ['INSTALLATION'] is not set: workers on a copy of this database would fire its timeouts again.",
                hint='Give each environment a name of its own, such as DELAYQ = {"INSTALLATION": "production"}. '
                "Workers refuse a database of another installation.",
                id="django_delayq.W030",
            )


def check_silence(**_: Any) -> Iterator[CheckMessage]:
    """Recommend time limits for a database that stops answering. Reads only settings; only with `check --deploy`.

    Reports:
        I003: the options of the database do not limit how long a statement waits for a silent server.
    """
    using = router.db_for_write(Timeout)
    if using not in connections:  # `check_policies` reports it
        return
    settings, limits = connections[using].settings_dict, dialect_of(connections[using]).limits_of_silence
    is_remote = settings["HOST"] and not settings["HOST"].startswith(("/", "localhost", "127."))
    missing = {name: value for name, value in limits.items() if name not in settings["OPTIONS"]}
    if is_remote and missing:
        listed = ", ".join(f'"{name}": {value}' for name, value in missing.items())
        words = f"Database {using!r}: a handler or a web request waits without limit if it stops answering."
        hint = f"Add to its OPTIONS, with values that suit your longest statement: {listed}."
        yield Info(words, hint, id="django_delayq.I003")


def check_pool(**_: Any) -> Iterator[CheckMessage]:
    """Check that the connection pool of the ledger's database is large enough for a worker. Reads only settings.

    Reports:
        W020: psycopg's connection pool is smaller than a worker with `CONCURRENCY` threads needs.
    """
    with suppress(ConfigError):  # reported by `check_settings`
        settings, using = get_settings(), router.db_for_write(Timeout)
        limit = pool_limit(using) if using in connections else None  # else `check_policies` reports it
        shortage = limit and limit.shortage(0 if settings.executor else settings.concurrency)
        if limit and shortage:
            size = settings.concurrency + limit.own
            hint = f"Set max_size to {size} or more: until then a worker runs fewer threads, or does not start."
            yield Warning(shortage, hint, id="django_delayq.W020")


def check_time_zone(**_: Any) -> Iterator[CheckMessage]:
    """Check that the ledger's database does not keep local times of which some occur twice. Reads only settings.

    Reports:
        W006: `TIME_ZONE` of the database, if it is not PostgreSQL, has daylight saving time.
    """
    using = router.db_for_write(Timeout)
    if using not in connections or connections[using].features.supports_timezones:
        return
    zone = connections[using].timezone  # None without USE_TZ, which `check_settings` reports
    year = timezone.now().year
    if zone and len({datetime(year, month, 1, tzinfo=zone).utcoffset() for month in range(1, 13)}) > 1:
        yield Warning(
            f"Database {using!r}: TIME_ZONE is {connections[using].timezone_name}, so deadlines are stored in local "
            "time, in which one hour a year occurs twice. In that hour timeouts may fire an hour early.",
            hint="Remove TIME_ZONE from DATABASES, or set it to UTC, and convert the datetimes that are stored.",
            id="django_delayq.W006",
        )


def check_databases(databases: Any = None, **_: Any) -> Iterator[CheckMessage]:
    """Check that SQLite begins its transactions as writers, and that servers are new enough for the ledger.

    Reports:
        E005: the database is not supported.
        W004: SQLite without `transaction_mode`, so that its transactions begin as readers.
        E006: MySQL before 8.0.17, which lacks the collation `utf8mb4_0900_bin`, or MariaDB before 10.6, which cannot
            skip locked rows.
    """
    for alias in databases or []:
        connection = connections[alias]
        dialect = dialect_of(connection)
        oldest = dialect.oldest.get(connection.display_name)
        if dialect is UNSUPPORTED:
            yield Error(f"Database {alias!r}: {connection.vendor} is not supported.", id="django_delayq.E005")
        elif dialect.begins_as_reader(connection):
            yield Warning(
                f"Database {alias!r}: SQLite transactions begin as readers.",
                hint='Set OPTIONS = {"transaction_mode": "IMMEDIATE"}: a transaction that reads first and writes later '
                "fails with 'database is locked' if a worker has written in between.",
                id="django_delayq.W004",
            )
        elif oldest and connection.get_database_version() < oldest:
            words = f"Database {alias!r}: this version of {connection.display_name} is too old."
            hint = f"Use {connection.display_name} {'.'.join(map(str, oldest))} or newer."
            yield Error(words, hint, id="django_delayq.E006")


def check_conditions(databases: Any = None, **_: Any) -> Iterator[CheckMessage]:
    """Have each database explain the conditions of the policies, without executing them.

    A warning, because `migrate` runs this check before the migration that may correct a column.

    Reports:
        W007: the database refuses `when` or `hold_when`, so each save of an object would fail.
    """
    for alias, policy, option in product(databases or [], get_policies(), ("when", "hold_when")):
        try:
            with transaction.atomic(alias):
                policy.model._base_manager.using(alias).filter(getattr(policy, option) or Q()).explain()
        except DatabaseError as error:
            # Else it is down, not migrated, or not that of the model.
            if connections[alias].connection is not None and not is_missing(error):
                yield Warning(
                    f"Database {alias!r} refuses {option} of {policy.label}: {error}".splitlines()[0],
                    hint="Each save of such an object would fail. Compare values of one type: the object_id of a "
                    "GenericRelation must have the type of the primary key; otherwise use Exists() with Cast().",
                    obj=policy,
                    id="django_delayq.W007",
                )


def check_names(databases: Any = None, **_: Any) -> list[CheckMessage]:
    """Check that the policies have the oldest names by which the ledger finds their timeouts.

    Reports:
        E025: the oldest name of a policy is not the one by which the database has its timeouts. Put the name in the
            hint first in `aliases`.
    """
    found: list[CheckMessage] = []
    for alias in databases or []:
        with suppress(DatabaseError, ConfigError), transaction.atomic(alias):  # there may be no table yet
            found += [Error(words, hint=hint, id="django_delayq.E025") for words, hint in wrong_names(alias)]
    return found
