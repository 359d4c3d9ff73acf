"""Migrate, check, schedule by saving, cancel, fire in a worker process, and open the pages of the admin."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

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
    use()
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
        assert engine.queue("default", 0).stats().total == 2
    subprocess.run([sys.executable, "-m", "django", "delayq_worker", "--burst"], check=True)
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
