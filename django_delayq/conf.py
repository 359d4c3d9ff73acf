"""The `DELAYQ` setting as a frozen `Settings` object. Every key is optional; unknown keys are refused with a hint.

`get_settings()` validates once, and again after `setting_changed`, so that `override_settings` works in tests. It
needs neither a database nor Redis.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_delayq.exceptions import DelayqError, suggestion
from django_delayq.policy.options import Retry
from django_delayq.times.clock import MAX_DURATION

REDIS_BACKENDS = ("django_redis.cache.RedisCache", "django.core.cache.backends.redis.RedisCache")
MAX_CONCURRENCY = 1024
"""Also of shards. More threads, or keys in Redis for each queue, are a typing error."""
MAX_INSTALLATION = 100
"""The column of the ledger holds no more."""
MIN_DURATION = timedelta(milliseconds=50)
"""With less, periodic passes would run without a pause, and a lease would end before its handler begins."""
MAX_LEASE = timedelta(days=1)
"""The engine honors no longer ones. The timeouts of a worker that died wait as long."""
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}(/\d+)?")
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")


class ConfigError(DelayqError, ImproperlyConfigured):
    """The `DELAYQ` setting is wrong; the message names the key, the value and the rule."""


def callable_of(setting: str, given: Any, hint: str = "") -> Any:
    """Return `given`, or what it names if it is a dotted path. Raises ConfigError, with `hint` at its end."""
    try:
        found = import_string(given) if isinstance(given, str) else given
    except Exception as error:  # the module may raise anything
        raise ConfigError(f"DELAYQ[{setting!r}] names {given!r}, which cannot be imported: {error}{hint}") from error
    if not callable(found):
        raise ConfigError(f"DELAYQ[{setting!r}] names {given!r}, which is not callable.")
    return found


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of `DELAYQ`, with defaults.

    Attributes:
        redis: the Redis to use: a `CACHES` alias, a URL, or a callable (or a dotted path to one) that returns a client
            of redis-py. If the key is omitted: alias `"default"`, if Redis serves it. None: workers poll the database
            once a second.
        prefix: the first part of every key in Redis; the same in all processes. An identity of the database follows,
            so that several databases may share a Redis.
        shards: parts of each queue in Redis; more than one only for Redis Cluster, and the same in all processes.
        horizon: timeouts due later than this, and later than two `SWEEP_INTERVAL`s, are stored in the database only.
        lease: how long other workers cannot fire what a worker has claimed, if it dies; extended while a handler runs.
            The same in all workers.
        concurrency: handler threads of a worker process.
        sweep_interval: how often a worker adds missing entries to Redis.
        sync_interval: how often a worker schedules and cancels timeouts of rows that were changed without `save()`; the
            same in all workers.
        catch_up: how long after its deadline a save still schedules a timeout; less than half of `RETENTION`.
        retention: settled timeouts are deleted this long after their end, their deadline or their first deadline,
            whichever is latest. A policy may have its own.
        retry: when failed handlers are retried, unless their policy has its own.
        scrub: a callable `(text, timeout) -> text`, or a dotted path to one, that removes secrets from every error
            message and traceback before it is stored or logged; `timeout` is None if the error belongs to none.
        handler_limit: how long a handler may run, unless its policy has a limit of its own. None: without limit.
        installation: the name of this installation, the same in all of its processes. A worker refuses a database of
            another one. None: no check.
        production: the name of the production installation, the same in all installations. In another one time can
            pass at once (`delayq_clock`).
        executor: dotted path of a class like `django_delayq.firing.executors.Executor` that runs handlers. None:
            threads of the worker.
        around: functions `(policy, timeouts)` that return context managers, or dotted paths to some, entered around
            each call of a handler, for tracing.
    """

    redis: str | Callable[[], Any] | None = field(default=None, repr=False)  # a URL may contain a password
    prefix: str = "delayq"
    shards: int = 1
    horizon: timedelta = timedelta(minutes=5)
    lease: timedelta = timedelta(seconds=60)
    concurrency: int = 4
    sweep_interval: timedelta = timedelta(seconds=5)
    sync_interval: timedelta = timedelta(seconds=60)
    catch_up: timedelta = timedelta(days=7)
    retention: timedelta = timedelta(days=30)
    retry: Retry = Retry()
    scrub: str | Callable[[str, Any], str] | None = None
    executor: str | None = None
    handler_limit: timedelta | None = None
    installation: str | None = None
    around: tuple[str | Callable[..., Any], ...] = ()
    production: str | None = None

    @property
    def longest_lease(self) -> timedelta:
        """Return how far in the future a lease may end.

        One that ends later was given by a clock that was ahead, or is forged, and would stop its timeout for as long.
        Twice `lease`, because leases of processes with another setting, or a slightly different clock, are valid.
        """
        return 2 * self.lease

    def kept_for(self, retention: timedelta | None) -> timedelta:
        """Return how long settled rows are kept whose policy has this `retention`, which may be no time at all."""
        return self.retention if retention is None else retention


KEYS = {field.name.upper(): field for field in fields(Settings)}


@functools.cache
def get_settings() -> Settings:
    """Return the validated settings. Raises ConfigError."""
    raw = getattr(django_settings, "DELAYQ", {})
    if not isinstance(raw, dict):
        raise ConfigError(f"DELAYQ must be a dict, not {type(raw).__name__}.")
    for key in raw:
        if key not in KEYS:
            hint = suggestion(str(key).upper(), KEYS, f"Known are: {', '.join(sorted(KEYS))}.")
            raise ConfigError(f"Unknown DELAYQ setting {key!r}. {hint}")
    values = {KEYS[key].name: _checked(key, value) for key, value in raw.items()}
    if "redis" not in values:
        values["redis"] = "default" if _is_redis_alias("default") else None
    return Settings(**values)


def _is_redis_alias(alias: str) -> bool:
    return django_settings.CACHES.get(alias, {}).get("BACKEND") in REDIS_BACKENDS


def _checked(key: str, value: Any) -> Any:
    """Return `value` if it is valid for `key`; otherwise raise ConfigError, at the start and not at a deadline."""
    default = KEYS[key].default
    if key in _CHECKED_APART:
        return _CHECKED_APART[key](value)
    if value is None and default is None:
        return None
    if isinstance(default, timedelta) or key == "HANDLER_LIMIT":
        least = timedelta(0) if key in {"CATCH_UP", "RETENTION", "HORIZON"} else MIN_DURATION
        most = MAX_LEASE if key == "LEASE" else MAX_DURATION
        expected = isinstance(value, timedelta) and least <= value <= most
        rule = f"a timedelta from {least.total_seconds():g} seconds to {most.days} days"
    elif isinstance(default, int):
        expected = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_CONCURRENCY
        rule = f"an int from 1 to {MAX_CONCURRENCY}"
    elif isinstance(default, Retry):
        expected, rule = isinstance(value, Retry), "a django_delayq.Retry"
    elif key == "EXECUTOR":
        expected, rule = _is_dotted(value), "a dotted path"
    elif key == "SCRUB":
        expected, rule = _is_dotted(value) or callable(value), "a callable, a dotted path to one"
    elif key == "PREFIX":
        expected = isinstance(value, str) and bool(value) and not set(value) & set("{} \n\r\t")
        rule = "a non-empty string without braces and blanks"
    else:  # INSTALLATION, PRODUCTION
        expected = isinstance(value, str) and 0 < len(value) <= MAX_INSTALLATION and value.isprintable()
        rule = f"a string of 1 to {MAX_INSTALLATION} printable characters"
    if not expected:
        rule += ", or None" if default is None else ""
        raise ConfigError(f"DELAYQ[{key!r}] must be {rule}, not {value!r}.")
    return value


def _is_dotted(value: Any) -> bool:
    return isinstance(value, str) and _DOTTED.fullmatch(value) is not None


def _checked_redis(value: Any) -> Any:
    if value is None or callable(value):
        return value
    if not isinstance(value, str) or not value:
        kind = type(value).__name__ if value else repr(value)
        raise ConfigError(f"DELAYQ['REDIS'] must be a cache alias, a URL, a dotted path or None, not {kind}.")
    if "://" in value or _DOTTED.fullmatch(value) or _is_redis_alias(value):
        return value
    if _HOST_AND_PORT.fullmatch(value):
        url = f"redis://{value}" if "/" in value else f"redis://{value}/0"
        raise ConfigError(f"DELAYQ['REDIS'] = {value!r} is not a Redis URL. Did you mean {url!r}?")
    known = ", ".join(alias for alias in django_settings.CACHES if _is_redis_alias(alias)) or "none"
    # Anything but a word is probably a misspelled URL, and is not shown: it may contain a password.
    shown = repr(value) if re.fullmatch(r"[\w-]+", value) else "a string"
    raise ConfigError(
        f"DELAYQ['REDIS'] is {shown}, which is neither a URL nor a dotted path nor a cache alias served by Redis. "
        f"Such aliases here: {known}."
    )


def _checked_around(value: Any) -> Any:
    listed = value if isinstance(value, list | tuple) else None
    if listed is None or not all(_is_dotted(each) or callable(each) for each in listed):
        raise ConfigError(f"DELAYQ['AROUND'] must be a list of callables, or of dotted paths to some, not {value!r}.")
    return tuple(listed)


_CHECKED_APART: dict[str, Callable[[Any], Any]] = {"REDIS": _checked_redis, "AROUND": _checked_around}


def _clear_cache(*, setting: str, **_: Any) -> None:
    if setting in {"DELAYQ", "CACHES"}:
        get_settings.cache_clear()


setting_changed.connect(_clear_cache, dispatch_uid="django_delayq.conf")
