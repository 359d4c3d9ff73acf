"""Migrate, check, schedule by saving, cancel, fire in a worker process, and open the pages of the admin."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command
from django.utils import timezone


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = f"{__package__}.settings"
    django.setup()
    import django_delayq

    assert Path(django_delayq.__file__).is_relative_to(sys.prefix), django_delayq.__file__
    for name in settings.EXTRAS:
        importlib.import_module(f"django_delayq.contrib.{name}")
    call_command("check", fail_level="WARNING", databases=["default"])
    call_command("migrate", run_syncdb=True, verbosity=0)
    call_command("makemigrations", "django_delayq", check=True, dry_run=True, verbosity=0)
    run("delayq_doctor", "--help", stdout=subprocess.DEVNULL)
    use()
    if settings.EXTRAS:
        use_calendars()
    rest = ["/delayq/timeouts/"] if settings.EXTRAS else []
    for page in ("/admin/django_delayq/timeout/", "/admin/django_delayq/policycontrol/", *rest):
        open_page(page)


def use() -> None:
    from django_delayq import DeadlinePassed, before_deadline, cancel_timeout, get_deadline
    from django_delayq.redis_clients import get_engine

    from .models import Ticket

    due = Ticket.objects.create(opened_at=timezone.now() - timedelta(minutes=31))
    ahead = Ticket.objects.create()
    paid = Ticket.objects.create()
    assert get_deadline(ahead, "close_unused") == ahead.opened_at + timedelta(minutes=30)
    assert cancel_timeout(paid, "close_unused")
    engine = get_engine("default")
    assert (engine is None) is not bool(settings.REDIS)
    if engine is not None:
        assert engine.queue("default", 0).stats().total == 1  # the other one is due later than HORIZON
    run("delayq_worker", "--burst")
    states = [list(ticket.timeouts.values_list("state", "cause")) for ticket in (due, ahead, paid)]
    assert states == [[("fired", "due")], [("pending", "")], [("cancelled", "hand")]], states
    assert Ticket.objects.get(pk=due.pk).status == "closed"
    try:
        with before_deadline(due, "close_unused"):
            raise AssertionError("the deadline has passed")
    except DeadlinePassed:
        pass
    with before_deadline(ahead, "close_unused"):
        ahead.status = "used"
        ahead.save()
    assert ahead.timeouts.get().cause == "condition"


def use_calendars() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the lowest release announces its next major version
        import holidays

    from django_delayq import Wall, Working, WorkingHours, schedule_timeout

    from .models import Ticket

    office = WorkingHours("Europe/Berlin", {"mon-fri": "09:00-17:00"}, holidays=holidays.Germany())
    ticket = Ticket.objects.create()
    month = schedule_timeout(ticket, "close_unused", after=Wall(months=1))
    assert timedelta(days=27) < month.due_at - timezone.now() < timedelta(days=32)
    assert schedule_timeout(ticket, "close_unused", after=Working(hours=4, calendar=office)).due_at > timezone.now()


def run(*command: str, **options: Any) -> None:
    subprocess.run([sys.executable, "-m", "django", *command], check=True, **options)


def open_page(page: str) -> None:
    from django.contrib.auth.models import User
    from django.test import Client

    user, _ = User.objects.get_or_create(username="staff", is_staff=True, is_superuser=True)
    client = Client()
    client.force_login(user)
    response = client.get(page)
    assert response.status_code == 200, (page, response.status_code)
    assert b"close_unused" in response.content, page


if __name__ == "__main__":
    main()
