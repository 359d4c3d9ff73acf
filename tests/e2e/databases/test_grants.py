"""The privileges that docs/databases.md names are enough for a worker."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from django.apps import apps
from django.db import connection
from django.utils import timezone

import django_delayq as dq
from django_delayq.contrib.webhooks.models import Delivery
from django_delayq.models import PolicySync, Timeout, UnfinishedRun, WorkerSeen
from tests.conftest import ROOT
from tests.e2e.databases.conftest import Start
from tests.support.waiting import wait_until
from tests.testapp.models import Effect, Order, Parcel

pytestmark = [
    pytest.mark.dialect,
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("redis_client"),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the statements are those of PostgreSQL"),
]


def documented(tables: str) -> list[str]:
    """Return the statements of the page, for the tables of the tests instead of those of the shop."""
    page = (ROOT / "docs/databases.md").read_text()
    [block] = re.findall(r"```sql\n(.*?)```", page[page.index("## Privileges") :], re.DOTALL)[:1]
    return [each.replace("shop_order", tables) for each in block.split(";") if each.strip()]


@pytest.fixture
def role() -> Iterator[str]:
    def tables(app: str) -> set[str]:
        return {model._meta.db_table for model in apps.get_app_config(app).get_models()}

    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE shop_worker LOGIN")
        statements = documented(", ".join(sorted(tables("testapp") - {Effect._meta.db_table})))
        assert all(name in "".join(statements) for name in tables("django_delayq") - {UnfinishedRun._meta.db_table})
        for statement in statements:
            cursor.execute(statement)
        cursor.execute(f"GRANT SELECT, INSERT ON {Effect._meta.db_table} TO shop_worker")  # what the handlers write
        cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {Delivery._meta.db_table} TO shop_worker")
    yield "shop_worker"
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop_worker'")
        cursor.execute("DROP OWNED BY shop_worker")
        cursor.execute("DROP ROLE shop_worker")


def test_a_worker_does_all_its_work_with_these_privileges(
    role: str, start: Start, child_environment: dict[str, str]
) -> None:
    url = re.sub("//[^@]*@", f"//{role}@", child_environment["DELAYQ_TEST_POSTGRESQL_URL"])
    dq.schedule_timeout(Order.objects.create(status="new"), "remind", seconds=0)
    dq.schedule_timeout(Order.objects.create(status="new"), "send_outside", seconds=0)
    # Far ahead: rounds that are long due when a slow machine has started the worker are left alone, as forgotten.
    [parcel] = Parcel.objects.bulk_create([Parcel(sent_at=timezone.now(), status="open")])
    seconds = {"SWEEP_INTERVAL": 0.5, "SYNC_INTERVAL": 0.5, "LEASE": 2.0}
    worker = start(seconds=seconds, DELAYQ_TEST_POSTGRESQL_URL=url)
    wait_until(lambda: dq.pending_timeouts(parcel).exists(), "the sync has found the parcel")
    dq.reschedule_timeouts(dq.pending_timeouts(parcel), seconds=0)
    wait_until(lambda: Timeout.objects.filter(state="fired").count() == 3, "by hand, and found by the sync")
    wait_until(lambda: WorkerSeen.objects.exists() and PolicySync.objects.exists())
    assert worker.text == ""
