"""Settings of the example shop, for your own machine only.

Environment variables:
    DATABASE_URL: PostgreSQL, MySQL or MariaDB instead of SQLite (`config/databases.py` documents the form).
    REDIS_URL: the Redis that wakes the workers on time; without it they poll once a second.
    SHOP_REDIS_PREFIX: the first part of all keys, if another shop uses the same Redis.
    SHOP_DELAYS: JSON of `{policy name: seconds}`, to shorten the delays.
    SHOP_SPEED: every delay is divided by this number (60: half an hour becomes half a minute).
    SHOP_SECRET_KEY, SHOP_DEBUG: as Django's SECRET_KEY and DEBUG.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from config.databases import database_from_url

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "only-for-the-demo-shop-on-your-own-machine")
# The development server serves the style sheet only with DEBUG. Workers and commands run without it, because Django
# would otherwise keep a record of every query.
DEBUG = os.environ.get("SHOP_DEBUG", str("runserver" in sys.argv)).lower() in {"true", "1"}
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "django_delayq",
    "shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "config.urls"
WSGI_APPLICATION = "config.wsgi.application"

TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {"default": database_from_url(os.environ.get("DATABASE_URL") or f"sqlite:///{BASE_DIR / 'shop.sqlite3'}")}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
STATIC_URL = "static/"
X_FRAME_OPTIONS = "SAMEORIGIN"  # the front page shows the admin in a frame; in your project, keep Django's DENY
SESSION_COOKIE_SAMESITE = "Lax"

DELAYQ: dict[str, Any] = {
    "REDIS": os.environ.get("REDIS_URL") or None,
    "PREFIX": os.environ.get("SHOP_REDIS_PREFIX", "shop"),
}

# The delays of the policies by name. In one dict, so that demo, replay and tests can shorten them.
SHOP_DELAYS = {
    "cancel_unpaid": timedelta(minutes=30),
    "cancel_unaccepted": timedelta(minutes=5),
    "review_by_default": timedelta(days=7),
    "notify_trial_expiry": timedelta(days=3),
    "promised_delivery": timedelta(days=2),  # the promise of a merchant; remind_late_delivery is due then
}
for _name, _seconds in json.loads(os.environ.get("SHOP_DELAYS", "{}")).items():
    SHOP_DELAYS[_name] = timedelta(seconds=_seconds)
SHOP_SPEED = float(os.environ.get("SHOP_SPEED", "1"))
SHOP_SMS_GATEWAY = "shop.sms.LogGateway"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        "shop": {"handlers": ["console"], "level": "INFO"},
        "django_delayq": {"handlers": ["console"], "level": "INFO"},
    },
}
