from typing import Any

from django.db import migrations

TABLE = "django_delayq_timeout"
INDEX = "delayq_one_pending_per_slot"


def settled_rows_last(apps: Any, schema_editor: Any) -> None:
    """Within a slot of the unique index, the settled rows (NULL) come behind the one that waits, and not before it.

    Whoever takes a slot again that was given up has InnoDB lock the entry behind it, too. If that was the next slot's
    pending row, which somebody was about to settle, each of the two waited for the other: a deadlock among strangers.
    Now it is a settled row of the same slot. MySQL 8 and MariaDB 10.8 keep such an order; older ones ignore the word.
    """
    _build(schema_editor, "DESC")


def settled_rows_first(apps: Any, schema_editor: Any) -> None:
    _build(schema_editor, "ASC")


def _build(schema_editor: Any, order: str) -> None:
    if schema_editor.connection.vendor == "mysql":
        schema_editor.execute(
            f"ALTER TABLE {TABLE} DROP INDEX {INDEX}, ADD UNIQUE INDEX {INDEX} (slot, slot_taken {order})"
        )


class Migration(migrations.Migration):
    dependencies = [("django_delayq", "0003_workers")]

    operations = [migrations.RunPython(settled_rows_last, settled_rows_first, atomic=False)]
