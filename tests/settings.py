"""The one settings module of the tests. The environment chooses the servers (see `tests/servers.py`).

`DELAYQ_TEST_DB`: `sqlite` (default), `postgresql` or `mariadb`. `DELAYQ_TEST_ROUTER=replica` adds a replica that is
always stale, and sends it every read of the library that does not name the writer: see `tests/routers.py`. Child
processes of a test get `DELAYQ_TEST_DB_NAME` and `DELAYQ_TEST_PREFIX` too, so that they meet their parent's rows and
keys (fixture `child_environment`).
`DELAYQ_TEST_POOL`: PostgreSQL through psycopg's pool, of the default size (`true`) or of so many connections.
`DELAYQ_TEST_BINDING=server`: PostgreSQL with parameters that are bound by the server, and prepared statements.
`DELAYQ_TEST_POOLER=pgbouncer`: PostgreSQL through PgBouncer in transaction mode (fixture `django_db_setup`).
"""

from __future__ import annotations

import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DB = os.environ.get("DELAYQ_TEST_DB", "sqlite")
DB_NAME = os.environ.get("DELAYQ_TEST_DB_NAME")
ROUTER = os.environ.get("DELAYQ_TEST_ROUTER")
POOL = os.environ.get("DELAYQ_TEST_POOL", "")
BINDING = os.environ.get("DELAYQ_TEST_BINDING", "")
POOLER = os.environ.get("DELAYQ_TEST_POOLER", "")
REDIS_URL = os.environ.get("DELAYQ_TEST_REDIS_URL")


def _sqlite(suffix: str, name: str | None) -> dict[str, Any]:
    # A file, not memory: several threads and processes must meet in it. Deleted with the test database.
    file = Path(tempfile.gettempdir()) / f"delayq-test-{os.getpid()}{suffix}.sqlite3"
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": name or ":memory:",
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF",
        },
        "TEST": {"NAME": str(file)},
    }


def _server(engine: str, variable: str, options: dict[str, Any], suffix: str, name: str | None) -> dict[str, Any]:
    address = os.environ.get(variable)
    if not address:
        raise RuntimeError(f"DELAYQ_TEST_DB={DB} needs {variable}: python3 tests/servers.py run -- ...")
    url = urlsplit(address)
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": name or url.path.lstrip("/"),
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
        "HOST": url.hostname,
        "PORT": str(url.port or ""),
        "OPTIONS": options,
        "TEST": {"NAME": f"test_delayq_{os.getpid()}{suffix}"},  # several runs may share one server
    }


def _pool() -> Any:
    return True if POOL == "true" else {"min_size": 1, "max_size": int(POOL)}


def _database(suffix: str = "", name: str | None = DB_NAME) -> dict[str, Any]:
    if DB == "postgresql":
        options: dict[str, Any] = {"pool": _pool()} if POOL else {}
        if BINDING == "server":
            options |= {"server_side_binding": True, "prepare_threshold": 2}
        database = _server("postgresql", "DELAYQ_TEST_POSTGRESQL_URL", options, suffix, name)
        return database | {"DISABLE_SERVER_SIDE_CURSORS": bool(POOLER)}
    if DB == "mariadb":
        return _server("mysql", "DELAYQ_TEST_MARIADB_URL", {"charset": "utf8mb4"}, suffix, name)
    if DB == "sqlite":
        return _sqlite(suffix, name)
    raise RuntimeError(f"DELAYQ_TEST_DB is {DB!r}: one of sqlite, postgresql, mariadb")


SECRET_KEY = "only for tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "America/Sao_Paulo"  # neither UTC nor the zone of any server: a mistake between them shows
LANGUAGE_CODE = "en"
STATIC_URL = "static/"
ROOT_URLCONF = os.environ.get("DELAYQ_TEST_URLS", "tests.urls")
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

DATABASES = {"default": _database()}
if ROUTER == "replica":
    DATABASES |= {alias: _database(f"_{alias}", None) for alias in ("replica", "archive")}
    DATABASE_ROUTERS = ["tests.routers.LibraryReadsReplica"]
CACHES: dict[str, dict[str, Any]] = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
if REDIS_URL:
    CACHES["default"] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_URL}
DELAYQ: dict[str, Any] = {"PREFIX": os.environ.get("DELAYQ_TEST_PREFIX", f"delayq-test-{os.getpid()}")}
# For child processes: {"LEASE": 1} shortens the durations that a test has to wait for, in seconds.
DELAYQ |= {name: timedelta(seconds=s) for name, s in json.loads(os.environ.get("DELAYQ_TEST_SECONDS", "{}")).items()}
DELAYQ["INSTALLATION"] = os.environ.get("DELAYQ_TEST_INSTALLATION")
if os.environ.get("DELAYQ_TEST_WITHOUT_REDIS"):
    DELAYQ["REDIS"] = None
DELAYQ_WEBHOOKS: dict[str, Any] = json.loads(os.environ.get("DELAYQ_TEST_WEBHOOKS", "{}"))

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "rest_framework",
    "drf_spectacular",
    "django_delayq",
    "django_delayq.contrib.webhooks",
    "tests.testapp",
]
REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema"}
INSTALLED_APPS += os.environ.get("DELAYQ_TEST_APPS", "").split()
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
