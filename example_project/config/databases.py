"""Convert `DATABASE_URL` to a Django database."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

ENGINES = {
    "sqlite": "django.db.backends.sqlite3",
    "postgres": "django.db.backends.postgresql",
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
    "mariadb": "django.db.backends.mysql",
}


def database_from_url(url: str) -> dict[str, Any]:
    """Return one entry of `DATABASES`.

    `sqlite:////absolute/path` or `sqlite:///relative/path`; `postgresql://user:password@host:port/name`;
    `mysql://...` and `mariadb://...` in the same form. Options after the `?` are passed to the driver.

    Raises:
        ImproperlyConfigured: another scheme.
    """
    parts = urlsplit(url)
    engine = ENGINES.get(parts.scheme)
    if engine is None:
        raise ImproperlyConfigured(f"DATABASE_URL must begin with one of {', '.join(ENGINES)}, not {url[:12]!r}.")
    name = unquote(parts.path.removeprefix("/"))
    options: dict[str, Any] = dict(parse_qsl(parts.query))
    if parts.scheme == "sqlite":
        return {"ENGINE": engine, "NAME": name or ":memory:", "OPTIONS": _sqlite_options() | options}
    if engine == ENGINES["mysql"]:
        options.setdefault("charset", "utf8mb4")
    return {
        "ENGINE": engine,
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": options,
        "CONN_MAX_AGE": 60,
    }


def _sqlite_options() -> dict[str, Any]:
    """Return the options that let web server and workers share one file.

    IMMEDIATE locks when a transaction begins. Otherwise a transaction that reads first and writes later fails
    without waiting if another process has written in between.
    """
    return {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
