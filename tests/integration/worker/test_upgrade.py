"""The tables of the state before the first release are migrated, and all that waits in them fires.

`before_the_release.json` has the rows that the code of that state has written, in SQLite, for the policies below.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.core.management.color import no_style
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq import operations
from django_delayq.models import PolicyChange, PolicyDay, Timeout, slot_of
from tests.support.waiting import wait_until
from tests.support.workers import StartWorker
from tests.testapp.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)

APP, SQUASHED = "django_delayq", "0001_squashed_0004_indexes"
BEFORE = json.loads(Path(__file__).with_name("before_the_release.json").read_text(encoding="utf-8"))
SINCE_THEN = timedelta(hours=2)
"""How long ago the rows were written: their deadlines, up to an hour later, have passed."""


def migrate_to(name: str) -> None:
    """Migrate to one of the replaced migrations."""
    executor = MigrationExecutor(connection)
    executor.loader = MigrationLoader(connection, replace_migrations=False)
    executor.migrate([(APP, name)])


@pytest.fixture
def former_tables() -> Iterator[Any]:
    """Return the models of the former tables, which are there until the test migrates. Afterwards all are new."""
    call_command("migrate", APP, "zero", verbosity=0)
    migrate_to("0001_initial")
    loader = MigrationLoader(connection, replace_migrations=False)
    yield loader.project_state([(APP, "0001_initial")]).apps
    Timeout.objects.filter(state="held").update(state="pending", remaining=None, held_at=None)
    call_command("migrate", APP, "zero", verbosity=0)
    call_command("migrate", verbosity=0)


def noting(name: str) -> Callable[[Order, Timeout], None]:
    def handler(order: Order, timeout: Timeout) -> None:
        Effect.objects.create(what=name, object_id=order.pk, timeout_id=timeout.pk)

    return handler


@pytest.fixture
def policies(declare: Callable[..., Any]) -> None:
    """Declare the policies of the former application. Two have another name now."""
    for name in ("fails", "dies", "snoozes", "skips", "fires", "held", "paused", "releasing"):
        declare(Order, noting(name), name=name, retry=dq.Retry.never() if name == "dies" else dq.Retry([3600, 3600]))
    declare(Order, noting("newname"), name="newname", aliases=("oldname",))
    automatic: dict[str, Any] = {"after": timedelta(minutes=30), "since": "created_at", "when": Q(status="old")}
    declare(Order, noting("newauto"), name="newauto", aliases=("oldauto",), **automatic)


def schema() -> dict[str, Any]:
    """Return the columns, indexes and constraints of the tables of the app."""
    found = dict[str, Any]()
    with connection.cursor() as cursor:
        tables = [name for name in connection.introspection.table_names(cursor) if name.startswith(f"{APP}_")]
        for table in tables:
            columns = {each.name: each for each in connection.introspection.get_table_description(cursor, table)}
            found |= {f"{table}.{name}": each for name, each in columns.items()}
            for name, each in connection.introspection.get_constraints(cursor, table).items():
                # Checks of one column have no name on SQLite and MariaDB, but the order in which they were made.
                shown = name if "unnamed" not in name else f"check of {each['columns'][0]}"
                found[f"{table}: {shown}"] = {**each, "columns": set(each["columns"]), "definition": None}
    return found


def load(apps: Any) -> None:
    """Write the former rows, as if they had been written some time ago."""
    moved = timezone.now() - datetime.fromisoformat(BEFORE["made_at"]) - SINCE_THEN

    def value(stored: Any) -> Any:
        if isinstance(stored, dict) and stored.keys() == {"at"}:
            return datetime.fromisoformat(stored["at"]) + moved
        return timedelta(microseconds=stored["us"]) if isinstance(stored, dict) and stored.keys() == {"us"} else stored

    Order._base_manager.bulk_create([Order(**{k: value(v) for k, v in each.items()}) for each in BEFORE["orders"]])
    kind = ContentType.objects.get_for_model(Order)
    for table in ("timeout", "policycontrol", "policychange"):
        model = apps.get_model(APP, table)
        for stored in BEFORE[table]:
            row = model(**{name: value(each) for name, each in stored.items()})
            if table == "timeout":
                row.content_type_id = kind.pk
                row.slot = slot_of(row.policy, kind.pk, row.object_id, row.key)
            row.save(force_insert=True)
    tables = [Order, *(apps.get_model(APP, table) for table in ("timeout", "policycontrol", "policychange"))]
    with connection.cursor() as cursor:
        for statement in connection.ops.sequence_reset_sql(no_style(), tables):
            cursor.execute(statement)


@pytest.mark.usefixtures("source", "policies")
def test_every_pending_timeout_fires_once_and_settled_ones_stay(former_tables: Any, start_worker: StartWorker) -> None:
    load(former_tables)
    call_command("migrate", verbosity=0)
    before = {row.pk: row for row in Timeout.objects.all()}
    waiting = {pk for pk, row in before.items() if not row.is_settled}
    assert len(waiting) == 17 and len(before) == 23

    computed = [row for row in before.values() if row.terms is not None]
    assert {row.policy for row in computed} == {"testapp.order.cancel_unpaid", "testapp.order.oldauto"}
    assert len(computed) == 3 and all(row.computed_due_at == row.due_at for row in computed)
    assert Counter(row.snoozes for row in before.values())[1] == 1
    assert [row.policy for row in before.values() if row.first_failed_at and not row.is_settled] == [
        "testapp.order.fails"
    ]
    assert [change.held_from is not None for change in PolicyChange.objects.filter(finished_at=None)] == [True]

    start_worker()
    on_hold = Timeout.objects.filter(policy="testapp.order.held")
    wait_until(lambda: Timeout.objects.exclude(policy="testapp.order.held").unsettled().count() == 0)
    assert not Effect.objects.filter(what="held").exists()
    operations.resume("testapp.order.held", by="script:test", reason="the upgrade is over")
    wait_until(lambda: on_hold.get().due_at > timezone.now(), "its deadline has moved by the length of the hold")
    dq.reschedule_timeouts(on_hold, seconds=0)
    wait_until(lambda: not Timeout.objects.unsettled().exists())

    after = {row.pk: row for row in Timeout.objects.all()}
    assert after.keys() == before.keys(), "no second round was begun"
    assert {pk: after[pk].state for pk in waiting} == dict.fromkeys(waiting, "fired")
    for pk in before.keys() - waiting:
        assert (after[pk].state, after[pk].settled_at) == (before[pk].state, before[pk].settled_at)
    effects = Counter(Effect.objects.exclude(timeout_id=None).values_list("timeout_id", flat=True))
    assert effects == Counter(waiting)


def test_the_tables_become_those_of_a_new_installation(former_tables: Any) -> None:
    assert f"{PolicyDay._meta.db_table}.day" not in schema()
    call_command("migrate", verbosity=0)
    upgraded = schema()
    call_command("migrate", APP, "zero", verbosity=0)
    call_command("migrate", verbosity=0)
    fresh = schema()
    different = {name for name in upgraded.keys() | fresh.keys() if upgraded.get(name) != fresh.get(name)}
    assert different == set()


@pytest.mark.usefixtures("policies")
def test_a_renamed_policy_finds_its_rounds_by_its_new_name(former_tables: Any) -> None:
    load(former_tables)
    call_command("migrate", verbosity=0)
    pending = Timeout.objects.pending().get(policy="testapp.order.oldname", key="")
    order = Order.objects.get(pk=pending.object_id)
    assert dq.schedule_timeout(order, "newname", hours=1).pk == pending.pk
    assert dq.cancel_timeout(order, "newname")
    fired = Timeout.objects.get(policy="testapp.order.oldauto", state="fired")
    Order.objects.get(pk=fired.object_id).save()
    assert Timeout.objects.filter(object_id=fired.object_id).count() == 1, "the round that has fired is closed"


@pytest.mark.usefixtures("policies")
def test_the_way_back_keeps_pending_timeouts_and_is_refused_while_a_clock_is_stopped(former_tables: Any) -> None:
    load(former_tables)
    call_command("migrate", verbosity=0)
    row = Timeout.objects.pending().filter(policy="testapp.order.remind", key="k").get()
    order = Order.objects.get(pk=row.object_id)
    dq.reschedule_timeout(order, "remind", key="k", hours=1)
    dq.hold_timeout(order, "remind", key="k")
    with pytest.raises(RuntimeError, match="1 timeouts are on hold"):
        migrate_to("0001_initial")
    dq.resume_timeout(order, "remind", key="k")
    migrate_to("0001_initial")
    assert former_tables.get_model(APP, "Timeout").objects.filter(state="pending").count() == 16
    call_command("migrate", verbosity=0)
    assert MigrationRecorder(connection).applied_migrations().keys() >= {(APP, SQUASHED), (APP, "0004_indexes")}
