"""The tables can be made and removed, and an index can be added to them while they are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import NotSupportedError, connection, models, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.state import ProjectState
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_delayq import Retry, TimeoutPolicy, redis_clients
from django_delayq.migrations._operations import AddIndexConcurrently
from django_delayq.models import Timeout
from tests.integration.firing.conftest import due, fire, state
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db(transaction=True)]

TABLE = "django_delayq_timeout"
NAME = "delayq_test_reason"


@pytest.fixture(autouse=True)
def known_tables() -> Iterator[None]:
    """Let this process read again when the tables were made, by which processes name their keys in Redis."""
    yield
    redis_clients._created.clear()
    redis_clients.forget_engine()


@pytest.fixture
def without_index() -> Iterator[None]:
    yield
    if NAME in indexes():
        with connection.schema_editor() as editor:
            editor.remove_index(Timeout, models.Index(fields=["reason"], name=NAME))


def indexes() -> set[str]:
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, TABLE)
    return {name for name, told in found.items() if told["index"]}


def states() -> tuple[AddIndexConcurrently, ProjectState, ProjectState]:
    """The operation, and the state of the models before and after it."""
    operation = AddIndexConcurrently("timeout", models.Index(fields=["reason"], name=NAME))
    before = MigrationExecutor(connection).loader.project_state()
    after = before.clone()
    operation.state_forwards("django_delayq", after)
    return operation, before, after


def forwards() -> str:
    """The statements of the operation."""
    operation, before, after = states()
    with CaptureQueriesContext(connection) as queries, connection.schema_editor(atomic=False) as editor:
        operation.database_forwards("django_delayq", editor, before, after)
    return " ".join(query["sql"] for query in queries)


def test_an_index_is_added_and_removed_without_blocking_writes(without_index: None) -> None:
    statements = forwards()
    assert NAME in indexes()
    assert ("CREATE INDEX CONCURRENTLY" in statements) is (connection.vendor == "postgresql")
    operation, before, after = states()
    with connection.schema_editor(atomic=False) as editor:
        operation.database_backwards("django_delayq", editor, after, before)
    assert NAME not in indexes()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL leaves invalid indexes behind")
def test_what_a_failed_build_left_behind_is_replaced(without_index: None) -> None:
    later = timezone.now() + timedelta(days=1)
    for number in range(2):
        Timeout.objects.create(
            policy="p", content_type_id=1, object_id=str(number), slot=f"{number:032x}", due_at=later, run_at=later,
            first_due_at=later, created_at=later,
        )  # fmt: skip
    with pytest.raises(Exception, match="duplicate"), connection.cursor() as cursor:
        cursor.execute(f"CREATE UNIQUE INDEX CONCURRENTLY {NAME} ON {TABLE} (reason)")
    assert NAME in indexes(), "it is there, and invalid"
    forwards()
    with connection.cursor() as cursor:
        cursor.execute("SELECT indisvalid, indisunique FROM pg_index WHERE indexrelid = to_regclass(%s)", [NAME])
        assert cursor.fetchone() == (True, False)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL cannot do it in a transaction")
def test_a_migration_that_is_a_transaction_is_refused_with_the_fix() -> None:
    operation, before, after = states()
    with (
        pytest.raises(NotSupportedError, match="Set atomic = False on the migration"),
        transaction.atomic(),
        connection.schema_editor(atomic=False) as editor,
    ):
        operation.database_forwards("django_delayq", editor, before, after)


def test_the_tables_can_be_removed_and_made_again() -> None:
    before = indexes()
    call_command("migrate", "django_delayq", "zero", verbosity=0)
    assert TABLE not in connection.introspection.table_names()
    call_command("migrate", "django_delayq", verbosity=0)
    assert indexes() == before


@pytest.mark.skipif(connection.vendor != "mysql", reason="only MySQL and MariaDB have databases of smaller alphabets")
def test_a_failure_is_recorded_whatever_its_message_in_a_database_of_a_smaller_alphabet(
    order: Order, declare: Callable[..., TimeoutPolicy[Any]]
) -> None:
    """A message that the column refuses would keep the attempt from being counted, and the handler would run again."""

    def handler(obj: Order, timeout: Timeout) -> None:
        raise ValueError("a customer named \N{GRINNING FACE}")

    name = connection.ops.quote_name(connection.settings_dict["NAME"])
    call_command("migrate", "django_delayq", "zero", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER DATABASE {name} CHARACTER SET utf8mb3")
        try:
            call_command("migrate", "django_delayq", verbosity=0)
        finally:
            cursor.execute(f"ALTER DATABASE {name} CHARACTER SET utf8mb4")
    try:
        row = due(order, declare(Order, handler, name="smile", retry=Retry.never()))
        assert fire(row).done == (row.pk,)
        assert (state(row), row.reason) == (("dead", "retries"), "ValueError: a customer named \N{GRINNING FACE}")
    finally:
        call_command("migrate", "django_delayq", "zero", verbosity=0)
        call_command("migrate", "django_delayq", verbosity=0)
