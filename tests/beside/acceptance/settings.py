"""SQLite in the current folder, and the Redis of the environment, if it names one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

APP = __name__.rpartition(".")[0]
EXTRAS = os.environ.get("ACCEPTANCE_CONTRIB", "").split()
"""Modules of `django_delayq.contrib`; none after a plain installation."""
REDIS = os.environ.get("ACCEPTANCE_REDIS", "")
SECRET_KEY = "only for tests"
ALLOWED_HOSTS = ["testserver"]
USE_TZ = True
STATIC_URL = "static/"
ROOT_URLCONF = f"{APP}.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": Path.cwd() / "acceptance.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
CACHES: dict[str, dict[str, Any]] = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
if REDIS:
    CACHES["default"] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS}
DELAYQ = {
    "PREFIX": os.environ.get("ACCEPTANCE_PREFIX", "acceptance"),
    "AROUND": [f"django_delayq.contrib.{name}.around_handler" for name in {"opentelemetry", "sentry"} & {*EXTRAS}],
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    *(["rest_framework", "django_delayq.contrib.prometheus"] if EXTRAS else []),
    "django_delayq",
    APP,
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
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
