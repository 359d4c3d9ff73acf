"""Counters, lags and gauges for Prometheus: add `"django_delayq.contrib.prometheus"` to INSTALLED_APPS.

Counters count in the process that did it, from the signals: so bulk verbs, which send none, are not in them. They go
into prometheus_client's default registry, which your metrics page (django-prometheus, or `make_wsgi_app`) exposes; with
`PROMETHEUS_MULTIPROC_DIR` set they add up over processes, as everything in that registry does, and the gauges are left
out. A worker has no pages: with `DELAYQ_METRICS_ADDRESS=127.0.0.1:9110` in its environment it serves its own.

The gauges come from the ledger when somebody asks, at most every 5 seconds per process.
"""
