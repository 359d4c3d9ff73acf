"""The app: connect the counters and register the gauges."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _
from prometheus_client import REGISTRY

from django_delayq.contrib import prometheus
from django_delayq.signals import worker_started


class PrometheusConfig(AppConfig):
    """Connects the signals and registers the gauges, once per process."""

    name = "django_delayq.contrib.prometheus"
    label = "delayq_prometheus"
    verbose_name = _("Timeouts for Prometheus")

    def ready(self) -> None:
        prometheus.connect()
        REGISTRY.register(prometheus.Gauges())
        worker_started.connect(prometheus.serve_worker, dispatch_uid=self.label)
