"""Counters, lags and gauges for Prometheus: add `"django_delayq.contrib.prometheus"` to INSTALLED_APPS.

Signals increment the counters in the process that sends them. Bulk functions send no signals, so they are not counted.
All metrics are in prometheus_client's default registry, which your metrics page (django-prometheus, or `make_wsgi_app`)
exposes: the counters of the process that answers, and the gauges. To add up the counters of several web processes, set
`PROMETHEUS_MULTIPROC_DIR`, and expose a registry with a `MultiProcessCollector` and `Gauges` (see docs/monitoring.md).
A worker has no pages: with `DELAYQ_METRICS_ADDRESS=127.0.0.1:9110` in its environment it serves its own.

The gauges are read from the ledger when the page is requested, at most every 5 seconds per process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, router
from prometheus_client import Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from django_delayq import signals
from django_delayq.policy.policies import registry

if TYPE_CHECKING:
    from django_delayq.models import Timeout

logger = logging.getLogger("django_delayq.metrics")

CACHE_SECONDS: Final = 5.0
"""Several servers scrape several times a minute, and each scrape would count the ledger."""
LAG_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600, 21600, 86400)
"""From the milliseconds of a healthy worker to the day of one that was down; fewer would hide one of them."""
ADDRESS_VARIABLE: Final = "DELAYQ_METRICS_ADDRESS"

_COUNTED: Final = {
    "scheduled": "Scheduled timeouts",
    "rescheduled": "Pending timeouts that got another deadline",
    "cancelled": "Cancelled timeouts: by hand, or because their condition no longer held",
    "held": "Clocks of timeouts that were stopped",
    "resumed": "Clocks of timeouts that run again",
    "rearmed": "Timeouts that were armed again after before_deadline had ended their round, as after a refused payment",
    "fired": "Fired timeouts",
    "skipped": "Timeouts that were due with nothing to do",
    "failed": "Failed attempts that will be retried",
    "dead": "Timeouts that became dead: no retry was left, their handler gave up, or a guard rail decided so",
}
COUNTERS: Final[dict[Any, Counter]] = {
    getattr(signals, f"timeout_{name}"): Counter(f"delayq_{name}", words, ["policy"])
    for name, words in _COUNTED.items()
}
LAG = Histogram(
    "delayq_firing_lag_seconds",
    "Seconds from when a timeout could fire (its deadline, or later if it was armed later or snoozed) to the firing",
    ["policy"],
    buckets=LAG_BUCKETS,
)
GUARD_CAUSES: Final = ("late", "shadow", "limit")
WITHHELD = Counter("delayq_withheld", "Timeouts that a guard rail settled: late, shadow or limit", ["policy", "cause"])
IN_TIME = Counter("delayq_in_time", "Timeouts that their condition ended before their deadline", ["policy"])
GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "pending_timeouts": ("Pending timeouts", ("policy",)),
    "overdue_timeouts": ("Timeouts overdue by more than a minute", ("policy",)),
    "failing_timeouts": ("Pending timeouts of which an attempt has failed, and which are tried again", ("policy",)),
    "dead_timeouts": ("Dead timeouts", ("policy",)),
    "held_timeouts": ("Timeouts whose clock is stopped", ("policy",)),
    "policy_stopped": ("1 while the policy is paused or on hold", ("policy",)),
    "policy_braked": ("1 while the policy is paused by its brake", ("policy",)),
    "policy_shadow_percent": ("Percentage of the objects of the policy that are in shadow mode", ("policy",)),
    "workers": ("Running worker processes", ()),
    "stuck_threads": ("Threads of workers that still run a handler after its time limit", ()),
    "redis_up": ("1 if Redis responds; absent if none is configured", ()),
}
"""Their descriptions and labels."""
ENDING: Final = (signals.timeout_cancelled, signals.timeout_skipped)
"""Sent when a condition has ended a round."""
RESTORED = Counter(
    "delayq_restored_entries", "Entries that Redis had lost, counted by the worker whose sweep restored them"
)


def connect() -> None:
    """Count from now on what happens in this process. May be called twice."""
    for signal in COUNTERS:
        signal.connect(_count, dispatch_uid="delayq_prometheus")
    signals.entries_restored.connect(_count_restored, dispatch_uid="delayq_prometheus")
    start_at_zero()


def start_at_zero() -> None:
    """Create the counters of all declared policies.

    PromQL's `increase()` compares two samples. Without a zero it does not notice the first event of a policy.
    """
    for policy in registry:
        for counter in COUNTERS.values():
            counter.labels(policy.label)
        IN_TIME.labels(policy.label)
        for cause in GUARD_CAUSES:
            WITHHELD.labels(policy.label, cause)


def _count(signal: Any, timeout: Timeout, **_: object) -> None:
    policy = registry.get(timeout.policy)
    label = timeout.policy if policy is None else policy.label  # not a former one, which no dashboard names
    COUNTERS[signal].labels(label).inc()
    if timeout.cause in GUARD_CAUSES and signal is not signals.timeout_cancelled:  # saved too late: not a guard rail
        WITHHELD.labels(label, timeout.cause).inc()
    if signal in ENDING and timeout.has_ended_in_time:
        IN_TIME.labels(label).inc()
    lateness = timeout.lateness()
    if lateness is not None:
        LAG.labels(label).observe(max(0.0, lateness))


def _count_restored(count: int, **_: object) -> None:
    RESTORED.inc(count)


class Gauges(Collector):
    """Gauges for the state of the ledger. If the ledger cannot be read, there are none, and the page has the rest."""

    def __init__(self, using: str | None = None) -> None:
        self._using = using
        self._lock = Lock()
        self._metrics: list[Metric] = []
        self._until = 0.0

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, because registering must not query a database that may not exist yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        with self._lock:  # concurrent requests share one query
            if time.monotonic() >= self._until:
                self._metrics = self._read()
                self._until = time.monotonic() + CACHE_SECONDS
            return self._metrics

    def _read(self) -> list[Metric]:
        from django_delayq.models import Timeout
        from django_delayq.monitoring import snapshot as status

        connection = connections[self._using or router.db_for_write(Timeout)]
        was_open = connection.connection is not None
        families = {
            name: GaugeMetricFamily(f"delayq_{name}", words, labels=labels) for name, (words, labels) in GAUGES.items()
        }
        try:
            now = status.snapshot(self._using)
        except Exception:  # without the gauges, the page still has the counters
            logger.exception("The gauges could not be read from the ledger", extra={"event": "metrics_failed"})
            return []
        finally:
            if not was_open:  # a server with a thread for each request would leave a connection open in each
                connection.close()
        for policy in now.policies:
            kinds = ("pending", "overdue", "failing", "dead", "held")
            values: dict[str, Any] = {f"{kind}_timeouts": getattr(policy, kind).value for kind in kinds}
            values["policy_stopped"] = policy.is_stopped
            if policy.state is not None:
                values |= {"policy_braked": policy.state.is_braked, "policy_shadow_percent": policy.state.shadow}
            for name, value in values.items():
                families[name].add_metric([policy.label], value)
        families["workers"].add_metric([], len(now.workers))
        families["stuck_threads"].add_metric([], sum(worker.stuck_threads for worker in now.workers))
        if now.redis.is_configured:
            families["redis_up"].add_metric([], now.redis.is_reachable)
        return list(families.values())


def serve_worker(**_: object) -> None:
    """Create all counters, and serve the metrics of this worker process at `DELAYQ_METRICS_ADDRESS`, if it is set.

    Of several processes under one supervisor the second one uses the next port, and so on.

    An address that cannot be used is logged, and the worker starts without metrics.
    """
    start_at_zero()  # again, for policies of apps that became ready after this one
    address = os.environ.get(ADDRESS_VARIABLE)
    if not address:
        return
    host, _colon, first = address.rpartition(":")
    host = host or "127.0.0.1"
    try:
        port = int(first) + int(os.environ.get("DELAYQ_PROCESS", "1")) - 1
        start_http_server(port, host.removeprefix("[").removesuffix("]"))  # the brackets of [::1]:9110
    except (OSError, ValueError, OverflowError) as error:
        words = "%s=%r cannot be served, so this worker has no metrics: %s"
        logger.error(words, ADDRESS_VARIABLE, address, error, extra={"event": "metrics_address"})
    else:
        logger.info("metrics at %s:%d", host, port, extra={"event": "metrics_served"})
