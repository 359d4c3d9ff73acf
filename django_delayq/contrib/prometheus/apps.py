"""Start: count what happens, and offer the gauges."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class PrometheusConfig(AppConfig):
    """Connects the signals and registers the gauges, once per process."""

    name = "django_delayq.contrib.prometheus"
    label = "delayq_prometheus"
    verbose_name = _("Timeouts for Prometheus")

    def ready(self) -> None:
        from prometheus_client import REGISTRY

        from django_delayq import signals
        from django_delayq.contrib.prometheus import metrics

        metrics.connect()
        REGISTRY.register(metrics.Gauges())
        signals.worker_started.connect(metrics.serve_worker, dispatch_uid=self.label)
