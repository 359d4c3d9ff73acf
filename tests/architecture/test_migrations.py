"""Migrations after the first one do not block writes to a table that may be large."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader

from django_delayq.migrations._operations import AddIndexConcurrently

INDEX = models.Index(fields=["reason"], name="delayq_reason")


def blocking(migration: type[migrations.Migration] | migrations.Migration) -> Iterator[str]:
    """Return the operations of `migration` that block writes to build an index, except on its own new tables."""
    new = {operation.name_lower for operation in migration.operations if isinstance(operation, migrations.CreateModel)}
    for operation in migration.operations:
        if getattr(operation, "model_name_lower", None) in new:
            continue
        if isinstance(operation, AddIndexConcurrently):
            if migration.atomic:
                yield f"{operation.describe()}: set atomic = False on the migration"
        elif isinstance(operation, migrations.AddIndex | migrations.AlterUniqueTogether):
            yield f"{operation.describe()}: use AddIndexConcurrently"
        elif isinstance(operation, migrations.AddConstraint) and isinstance(
            operation.constraint, models.UniqueConstraint
        ):
            yield f"{operation.describe()}: build its index concurrently first"
        elif isinstance(operation, migrations.AddField | migrations.AlterField) and (
            getattr(operation.field, "db_index", False) or operation.field.unique
        ):
            yield f"{operation.describe()}: use AddIndexConcurrently in place of db_index or unique"


def migration(*operations: object, atomic: bool = True) -> type[migrations.Migration]:
    return type("Migration", (migrations.Migration,), {"operations": list(operations), "atomic": atomic})


def test_no_migration_after_the_first_blocks_writes_while_it_builds_an_index() -> None:
    ours = {key: found for key, found in MigrationLoader(None).disk_migrations.items() if key[0] == "django_delayq"}
    assert ("django_delayq", "0001_initial") in ours
    later = {name: found for (_, name), found in ours.items() if name != "0001_initial"}
    assert [f"{name}: {fault}" for name, found in later.items() for fault in blocking(found)] == []


@pytest.mark.parametrize(
    ("planted", "fix"),
    [
        (migration(migrations.AddIndex("timeout", INDEX)), "use AddIndexConcurrently"),
        (migration(AddIndexConcurrently("timeout", INDEX)), "set atomic = False"),
        (migration(migrations.AddField("timeout", "zone", models.CharField(db_index=True))), "use AddIndexConcurr"),
    ],
)
def test_a_planted_index_is_noticed_with_the_fix(planted: type[migrations.Migration], fix: str) -> None:
    (found,) = blocking(planted)
    assert fix in found
