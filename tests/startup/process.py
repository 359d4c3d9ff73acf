"""Start as a web process does, save a booking, and print what that loaded and cost, as one line of JSON.

python -m tests.startup.process FILE [admin] [rest] [delayq] [redis=URL]

`FILE` is the SQLite database; with `prepare` in place of the parts, its tables are made. "Started" is a process that
has loaded its apps, models, receivers, admin and URLs; "saved" is one that has saved a booking, too.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

_began = time.process_time()


def settings_for(file: str, parts: set[str]) -> dict[str, Any]:
    """Return the settings of a project with these parts."""
    apps = ["django.contrib.auth", "django.contrib.contenttypes", "tests.startup.stall"]
    if "admin" in parts:
        apps += ["django.contrib.admin", "django.contrib.messages", "django.contrib.sessions"]
    if "rest" in parts:
        apps.append("rest_framework")
    if "delayq" in parts:
        apps.append("django_delayq")
    redis = next((part.partition("=")[2] for part in parts if part.startswith("redis=")), None)
    return {
        "SECRET_KEY": "only for tests",
        "USE_TZ": True,
        "ROOT_URLCONF": "tests.startup.stall.urls",
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "DATABASES": {
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": file,
                "OPTIONS": {"transaction_mode": "IMMEDIATE"},
            }
        },
        "INSTALLED_APPS": apps,
        "DELAYQ": {"REDIS": redis, "PREFIX": "delayq-startup"},
        "TEMPLATES": [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
    }


def cost() -> dict[str, float]:
    """Return the CPU milliseconds and the megabytes that this process has used."""
    try:
        with open("/proc/self/statm") as statm:  # noqa: PTH123 - pathlib would be a part of the cost
            megabytes = int(statm.read().split()[1]) * resource.getpagesize() / 1e6
    except OSError:  # not Linux: the peak in place of the present use
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"ms": 1000 * (time.process_time() - _began), "mb": megabytes}


def main(file: str, parts: set[str]) -> None:
    from django.conf import settings

    settings.configure(**settings_for(file, parts))
    from django.core.wsgi import get_wsgi_application

    get_wsgi_application()
    from django.urls import Resolver404, resolve

    for path in ("/admin/", "/api/bookings/", "/api/timeouts/"):
        try:
            resolve(path)
        except Resolver404:
            continue
    started = cost() | {"modules": sorted(sys.modules)}
    from datetime import timedelta

    from django.utils import timezone

    from tests.startup.stall.models import Booking

    Booking._default_manager.create(created_at=timezone.now() - timedelta(minutes=29))  # due within HORIZON
    sys.stdout.write(json.dumps({"started": started, "saved": cost() | {"modules": sorted(sys.modules)}}))


def prepare(file: str) -> None:
    """Create the tables of the database."""
    from django.conf import settings

    settings.configure(**settings_for(file, {"admin", "delayq"}))
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)


if __name__ == "__main__":
    if sys.argv[2:] == ["prepare"]:
        prepare(sys.argv[1])
    else:
        main(sys.argv[1], set(sys.argv[2:]))
