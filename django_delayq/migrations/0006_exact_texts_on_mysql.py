from typing import Any

from django.db import migrations

TABLE = "django_delayq_timeout"
COLUMNS = (("object_id", 255), ("key", 200))


def compare_exactly(apps: Any, schema_editor: Any) -> None:
    """Make MySQL and MariaDB compare the ids of objects and the keys of timeouts as the other databases do.

    Their default collations ignore case, accents and trailing spaces. With them "a" finds the timeouts of "A", where
    the table of the objects distinguishes the two.
    """
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        _set_collation(schema_editor, "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin")


def compare_by_default(apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@collation_database")
            _set_collation(schema_editor, cursor.fetchone()[0])


def _set_collation(schema_editor: Any, collation: str) -> None:
    charset = collation.partition("_")[0]
    columns = [
        f"MODIFY `{name}` varchar({length}) CHARACTER SET {charset} COLLATE {collation} NOT NULL"
        for name, length in COLUMNS
    ]
    schema_editor.execute(f"ALTER TABLE {TABLE} {', '.join(columns)}")


class Migration(migrations.Migration):
    dependencies = [("django_delayq", "0005_admin_indexes")]

    operations = [migrations.RunPython(compare_exactly, compare_by_default, atomic=False)]
