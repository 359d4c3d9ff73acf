"""Operations for the migrations of this app."""

from __future__ import annotations

from typing import Any

from django.db import NotSupportedError
from django.db.migrations import operations

INVALID = "SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(%s) AND NOT indisvalid"


class AddIndexConcurrently(operations.AddIndex):
    """Add an index without blocking writes to its table.

    On PostgreSQL the index is created and removed with `CONCURRENTLY`, which needs `atomic = False` on the migration.
    An invalid index of the same name, which a build that failed leaves behind, is replaced; so the migration can simply
    be repeated. SQLite and MySQL use their ordinary statement: InnoDB permits writes meanwhile.

    Django's operation of this name works on PostgreSQL alone.
    """

    atomic = False

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model(app_label, self.model_name)
        if not self.allow_migrate_model(schema_editor.connection.alias, model):
            return
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        _refuse_transaction(schema_editor)
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(INVALID, [schema_editor.quote_name(self.index.name)])
            is_left_over = cursor.fetchone() is not None
        if is_left_over:
            schema_editor.remove_index(model, self.index, concurrently=True)
        schema_editor.add_index(model, self.index, concurrently=True)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = from_state.apps.get_model(app_label, self.model_name)
        if not self.allow_migrate_model(schema_editor.connection.alias, model):
            return
        if schema_editor.connection.vendor != "postgresql":
            super().database_backwards(app_label, schema_editor, from_state, to_state)
            return
        _refuse_transaction(schema_editor)
        schema_editor.remove_index(model, self.index, concurrently=True)


def _refuse_transaction(schema_editor: Any) -> None:
    if schema_editor.connection.in_atomic_block:
        raise NotSupportedError("AddIndexConcurrently cannot run in a transaction. Set atomic = False on the migration.")
