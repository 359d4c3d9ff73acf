"""`DELAYQ`: defaults, near-miss hints, clear refusals; system checks that report errors before the first deadline."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured

from django_delayq import DelayqError, Retry
from django_delayq.conf import ConfigError, get_settings

LOCMEM = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


def test_every_key_is_optional(settings: Any) -> None:
    settings.DELAYQ = {}
    settings.CACHES = LOCMEM
    found = get_settings()
    assert (found.redis, found.prefix, found.shards, found.concurrency) == (None, "delayq", 1, 4)
    assert (found.horizon, found.lease) == (timedelta(minutes=5), timedelta(seconds=60))
    assert (found.sweep_interval, found.sync_interval) == (timedelta(seconds=5), timedelta(seconds=60))
    assert (found.catch_up, found.retention) == (timedelta(days=7), timedelta(days=30))
    assert [round(step) for step in found.retry.delays] == [0, 0, 120, 600, 600, 3600, 7200, 21600, 54000]


@pytest.mark.parametrize("backend", ["django_redis.cache.RedisCache", "django.core.cache.backends.redis.RedisCache"])
def test_the_default_cache_is_used_if_redis_serves_it(settings: Any, backend: str) -> None:
    settings.DELAYQ = {}
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": "redis://localhost"}}
    assert get_settings().redis == "default"
    settings.DELAYQ = {"REDIS": None}
    assert get_settings().redis is None


def test_an_unknown_key_is_refused_with_the_near_one(settings: Any) -> None:
    settings.DELAYQ = {"SWEEP_INTERVALL": timedelta(seconds=5)}
    with pytest.raises(ConfigError, match="SWEEP_INTERVAL'") as refused:
        get_settings()
    assert isinstance(refused.value, (DelayqError, ImproperlyConfigured))
    assert [message.id for message in run_checks(tags=["django_delayq"], databases=[])][:1] == ["django_delayq.E001"]
    settings.DELAYQ = {"THREADS": 4}  # of which no key is a misspelling
    with pytest.raises(ConfigError, match="Known are: .*CONCURRENCY"):
        get_settings()


def test_no_process_starts_with_a_wrong_setting_not_even_a_web_server_which_runs_no_checks() -> None:
    start = "import django; from django.conf import settings as s; s.configure(INSTALLED_APPS={}, DELAYQ={}); {}"
    script = start.format(["django.contrib.contenttypes", "django_delayq"], {"RETENTOIN": None}, "django.setup()")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ConfigError" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("Did you mean 'RETENTION'?")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["REDIS"], "dict"),
        ({"PREFIX": ""}, "PREFIX"),
        ({"PREFIX": 5}, "PREFIX"),
        ({"SHARDS": True}, "SHARDS"),
        ({"CONCURRENCY": 10**6}, "CONCURRENCY"),
        ({"LEASE": 60}, "LEASE"),
        ({"LEASE": timedelta(0)}, "LEASE"),
        ({"HORIZON": timedelta.max}, "HORIZON"),
        ({"RETRY": [1, 2]}, "RETRY"),
        ({"EXECUTOR": object()}, "EXECUTOR"),
        ({"REDIS": ""}, "dotted path or None, not ''"),  # of a variable without a value
        ({"REDIS": "defalt"}, "REDIS"),
        ({"REDIS": "localhost:6433"}, "'localhost:6433' is not a Redis URL. Did you mean 'redis://localhost:6433/0'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(settings: Any, value: Any, message: str) -> None:
    settings.DELAYQ = value
    with pytest.raises(ConfigError, match=message):
        get_settings()


def ids() -> set[str]:
    return {str(message.id) for message in run_checks(tags=["django_delayq"], databases=[])}


def test_checks_tell_of_polling_and_of_a_catch_up_that_could_fire_twice(settings: Any) -> None:
    settings.CACHES = LOCMEM
    settings.DELAYQ = {"CATCH_UP": timedelta(days=15), "EXECUTOR": "no.such.thing"}
    assert {"django_delayq.I001", "django_delayq.E002", "django_delayq.E003"} <= ids()
    settings.DELAYQ = {"REDIS": None}
    assert "django_delayq.I001" not in ids(), "polling was chosen"
    settings.DELAYQ = {"REDIS": "redis://localhost", "CATCH_UP": timedelta(days=14)}
    assert not ids() & {"django_delayq.I001", "django_delayq.E002"}


@pytest.mark.parametrize("source", ["http://host", "tests.no_such.client"])
def test_checks_tell_of_an_address_that_leads_nowhere_and_ask_no_server(settings: Any, source: str) -> None:
    settings.DELAYQ = {"REDIS": source}
    assert "django_delayq.E001" in ids()
    settings.DELAYQ = {"REDIS": "redis+cluster://nobody.invalid:1"}
    assert "django_delayq.E001" not in ids()


def test_checks_tell_of_conditions_on_related_rows_and_of_missing_after(declare: Any) -> None:
    from django.db.models import Exists, OuterRef, Q

    from tests.testapp.models import Customer, Order

    assert not ids() & {"django_delayq.W001", "django_delayq.W002"}
    declare(Order, name="watched", when=Q(customer__vip=True), since="paid_at", after=timedelta(1))
    vip = Exists(Customer.objects.filter(pk=OuterRef("customer"), vip=True))
    declare(Order, name="related", when=Q(vip), since="paid_at", after=timedelta(1))
    declare(Order, name="endless", when=Q(customer=5), since="paid_at")
    assert {"django_delayq.W001", "django_delayq.W002"} <= ids()
    warned = [
        message for message in run_checks(tags=["django_delayq"], databases=[]) if message.id == "django_delayq.W001"
    ]
    assert [message.obj.name for message in warned if message.obj] == ["related"]


@pytest.mark.parametrize(
    ("server", "ids"),
    [
        ("8.0.16", ["django_delayq.E006"]),
        ("8.0.17", []),
        ("10.5.28-MariaDB", ["django_delayq.E006"]),
        ("10.6.0-MariaDB", []),
    ],
)
def test_checks_report_a_database_that_is_too_old(server: str, ids: list[str]) -> None:
    """MySQL has the collation of the ledger since 8.0.17, and MariaDB skips locked rows since 10.6."""
    pytest.importorskip("MySQLdb")
    from django.db import connections
    from django.db.backends.mysql.base import DatabaseWrapper

    from django_delayq.checks import check_databases

    wrapper: Any = DatabaseWrapper({"ENGINE": "django.db.backends.mysql", "NAME": "x", "OPTIONS": {}}, alias="other")
    wrapper.mysql_server_data = {"version": server}  # else Django asks the server
    connections["other"] = wrapper
    try:
        assert [message.id for message in check_databases(databases=["other"])] == ids
    finally:
        del connections["other"]


@pytest.mark.django_db
def test_checks_tell_of_a_sqlite_whose_transactions_begin_as_readers(settings: Any) -> None:
    from django.db import connection

    from django_delayq.checks import check_databases

    assert list(check_databases(databases=["default"])) == []
    if connection.vendor == "sqlite":
        connection.settings_dict["OPTIONS"]["transaction_mode"] = "DEFERRED"
        try:
            assert [message.id for message in check_databases(databases=["default"])] == ["django_delayq.W004"]
        finally:
            connection.settings_dict["OPTIONS"]["transaction_mode"] = "IMMEDIATE"


def test_a_ledger_in_another_database_is_refused(settings: Any) -> None:
    from tests.testapp.models import Order

    class Apart:
        def db_for_write(self, model: Any, **hints: Any) -> str:
            return "ledger" if model._meta.app_label == "django_delayq" else "default"

    settings.DATABASE_ROUTERS = [Apart()]
    from django_delayq.ledger.routing import database_of

    with pytest.raises(ConfigError, match="must share"):
        database_of(Order)
    assert "django_delayq.E004" in ids()


def test_retry_ladders_count_attempts_and_end() -> None:
    ladder = Retry([1, timedelta(minutes=1)])
    assert [ladder.delay_after(n) for n in (1, 2, 3)] == [timedelta(seconds=1), timedelta(minutes=1), None]
    assert Retry.never().delay_after(1) is None
    grown = Retry.exponential(base=1, factor=3, max=10, times=4, jitter=0)
    assert grown.delays == (1, 3, 9, 10)
    waits = [Retry([100], jitter=0.5).delay_after(1) for _ in range(50)]
    assert all(wait is not None and 100 <= wait.total_seconds() <= 150 for wait in waits)
    assert len(set(waits)) > 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retry([-1]),
        lambda: Retry(5),  # type: ignore[arg-type]
        lambda: Retry(["1"]),  # type: ignore[list-item]
        lambda: Retry([float("nan")]),
        lambda: Retry([10**9]),
        lambda: Retry(jitter=2),
        lambda: Retry.exponential(factor=0.5),
        lambda: Retry.exponential(times=-1),
        lambda: Retry([60] * 60 * 24 * 30),  # after 23 days, PostgreSQL refused the number of the attempt
    ],
)
def test_a_senseless_ladder_is_refused(make: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        make()
