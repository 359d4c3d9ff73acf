"""The counters, the histogram, the gauges, and the page of a worker."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from threading import Lock
from typing import Any, Final

from django.db import connections, router
from prometheus_client import Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from django_delayq import signals
from django_delayq.models import Timeout
from django_delayq.monitoring import snapshot as status

logger = logging.getLogger("django_delayq.metrics")

FRESH_SECONDS: Final = 5.0
LAG_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600, 21600, 86400)
ADDRESS_VARIABLE: Final = "DELAYQ_METRICS_ADDRESS"

WHAT_HAPPENED: Final = {
    signals.timeout_scheduled: ("scheduled", "Timeouts that began to wait"),
    signals.timeout_rescheduled: ("rescheduled", "Pending timeouts that got another deadline"),
    signals.timeout_cancelled: ("cancelled", "Timeouts that were cancelled"),
    signals.timeout_fired: ("fired", "Timeouts that fired"),
    signals.timeout_skipped: ("skipped", "Timeouts that were due with nothing to do"),
    signals.timeout_failed: ("failed", "Attempts that failed and will be repeated"),
    signals.timeout_dead: ("dead", "Timeouts that were given up"),
}


LAG = Histogram("delayq_firing_lag_seconds", "From the deadline until it had fired", ["policy"], buckets=LAG_BUCKETS)
COUNTERS = {signal: Counter(f"delayq_{name}", words, ["policy"]) for signal, (name, words) in WHAT_HAPPENED.items()}


def connect() -> None:
    """From now on, what happens in this process is counted. May be called twice."""
    for signal in WHAT_HAPPENED:
        signal.connect(_count, dispatch_uid="delayq_prometheus")


def _count(signal: Any, timeout: Timeout, **_: object) -> None:
    COUNTERS[signal].labels(timeout.policy).inc()
    lateness = timeout.lateness()
    if lateness is not None:
        LAG.labels(timeout.policy).observe(max(0.0, lateness))


class Gauges(Collector):
    """The state of the ledger, read when somebody asks. Without a database it says nothing, and the page goes on."""

    def __init__(self, using: str | None = None) -> None:
        self._using = using
        self._lock = Lock()
        self._metrics: list[Metric] = []
        self._until = 0.0

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask a database that may not be there yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The gauges, at most `FRESH_SECONDS` old; none if the ledger cannot be read."""
        with self._lock:  # several who ask at once share one look
            if time.monotonic() >= self._until:
                self._metrics = self._read()
                self._until = time.monotonic() + FRESH_SECONDS
            return self._metrics

    def _read(self) -> list[Metric]:
        connection = connections[self._using or router.db_for_write(Timeout)]
        was_open = connection.connection is not None
        try:
            return _gauges(status.snapshot(self._using))
        except Exception:  # a page of metrics that fails tells less than one without these
            logger.exception("The gauges could not be read from the ledger", extra={"event": "metrics_failed"})
            return []
        finally:
            if not was_open:  # a server with a thread for each question would leave a connection behind each time
                connection.close()


def gauge_families() -> list[tuple[GaugeMetricFamily, tuple[str, ...]]]:
    """The gauges, empty, with the names of their labels."""
    named = {
        "pending_timeouts": ("Timeouts that wait", ("policy",)),
        "overdue_timeouts": ("Timeouts that should have fired", ("policy",)),
        "dead_timeouts": ("Timeouts that were given up", ("policy",)),
        "policy_stopped": ("1 while it is paused or held", ("policy",)),
        "workers": ("Workers that were alive a moment ago", ()),
        "redis_up": ("1 if Redis answers", ()),
    }
    return [
        (GaugeMetricFamily(f"delayq_{name}", words, labels=labels), labels) for name, (words, labels) in named.items()
    ]


def _gauges(now: status.Snapshot) -> list[Metric]:
    families = [family for family, _labels in gauge_families()]
    pending, overdue, dead, stopped, workers, redis_up = families
    for policy in now.policies:
        pending.add_metric([policy.label], policy.pending.value)
        overdue.add_metric([policy.label], policy.overdue.value)
        dead.add_metric([policy.label], policy.dead.value)
        stopped.add_metric([policy.label], bool(policy.state and policy.state.is_stopped))
    workers.add_metric([], len(now.workers))
    if now.redis.is_configured:
        redis_up.add_metric([], now.redis.is_reachable)
    return list(families)


def serve_worker(**_: object) -> None:
    """The worker of this process serves its metrics where `DELAYQ_METRICS_ADDRESS` says; not set: nowhere.

    An address that cannot be used is logged and stops no worker: firing matters more than telling of it.
    """
    address = os.environ.get(ADDRESS_VARIABLE)
    if not address:
        return
    host, _colon, port = address.rpartition(":")
    try:
        start_http_server(int(port), host or "127.0.0.1")
    except (OSError, ValueError, OverflowError) as error:
        words = "%s=%r cannot be served, so this worker has no metrics: %s"
        logger.error(words, ADDRESS_VARIABLE, address, error, extra={"event": "metrics_address"})
    else:
        logger.info("metrics at %s", address, extra={"event": "metrics_served"})
