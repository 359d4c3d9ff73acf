"""Settings of one contestant's processes. The harness passes database, Redis and name in the environment."""

from __future__ import annotations

import json
import os
from typing import Any

NAME = os.environ.get("BENCH_NAME", "delayq")
REDIS_URL = os.environ.get("BENCH_REDIS_URL")

SECRET_KEY = "only for benchmarks"
USE_TZ = True
DEBUG = False
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES: dict[str, Any] = {"default": json.loads(os.environ["BENCH_DATABASE"])}
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "benchmarks.shop"]

if NAME == "delayq":
    INSTALLED_APPS.append("django_delayq")
    DELAYQ = {"REDIS": None if os.environ.get("BENCH_WITHOUT_REDIS") else REDIS_URL, "PREFIX": "bench"}
elif NAME in {"procrastinate", "procrastinate_pool"}:
    INSTALLED_APPS.append("procrastinate.contrib.django")
    PROCRASTINATE_IMPORT_PATHS = ["benchmarks.rivals.procrastinate"]
elif NAME in {"django_q2", "django_q2_orm"}:
    INSTALLED_APPS.append("django_q")
    Q_CLUSTER = {
        "name": "bench",
        "workers": 2,
        "recycle": 100_000,
        "save_limit": -1,
        "guard_cycle": 0.2,
        "queue_limit": 1_000,
        "label": "bench",
        **({"redis": REDIS_URL} if NAME == "django_q2" else {"orm": "default"}),
    }
