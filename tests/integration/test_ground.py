"""What the other tests rely on: the right server, own keys, child processes that see the rows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.db import connection

from tests import settings as test_settings

pytestmark = pytest.mark.dialect

StartCommand = Callable[..., "subprocess.Popen[bytes]"]
VENDORS = {"sqlite": "sqlite", "postgresql": "postgresql", "mariadb": "mysql"}


@pytest.mark.django_db
def test_the_database_is_the_one_that_was_asked_for() -> None:
    assert connection.vendor == VENDORS[test_settings.DB]
    assert User.objects.count() == 0


@pytest.mark.django_db
@pytest.mark.skipif(test_settings.DB != "mariadb", reason="only this server is set up in another time zone")
def test_the_mariadb_server_lives_eight_hours_east_of_utc() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT TIMESTAMPDIFF(MINUTE, UTC_TIMESTAMP(), NOW())")
        assert cursor.fetchone()[0] == 8 * 60
