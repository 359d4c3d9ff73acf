"""The tests' settings with business and ledger on a second alias; the default database has no tables at all."""

from __future__ import annotations

from typing import Any

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES as _ONE

DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    "business": _ONE["default"],
}
DATABASE_ROUTERS = ["tests.e2e.databases.second_settings.Router"]
APPS = {"django_delayq", "testapp", "delayq_webhooks"}


class Router:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "business" if model._meta.app_label in APPS else None

    db_for_read = db_for_write
