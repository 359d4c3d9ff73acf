"""Add the indexes of the upgrade, on PostgreSQL without blocking writes, and the check of states."""

from typing import Any

import django_delayq.key_types
from django.db import migrations, models

from django_delayq.migrations._operations import AddIndexConcurrently


def refuse_held(apps: Any, schema_editor: Any) -> None:
    """Refuse to go back while clocks are stopped: the former tables have no state for that."""
    rows = apps.get_model("django_delayq", "Timeout")._base_manager.using(schema_editor.connection.alias)
    if held := rows.filter(state="held").count():
        raise RuntimeError(f"{held} timeouts are on hold, which the former tables cannot store. Resume them first.")


class Migration(migrations.Migration):

    atomic = False

    dependencies = [
        ('django_delayq', '0003_rows'),
    ]

    operations = [
        migrations.AddConstraint(
            model_name='timeout',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('cause', ''), ('remaining__isnull', True), ('settled_at__isnull', True), ('slot_taken', 1), ('slot_taken__isnull', False), ('state', 'pending')), models.Q(('cause', ''), ('remaining__isnull', False), ('settled_at__isnull', True), ('slot_taken', 1), ('slot_taken__isnull', False), ('state', 'held')), models.Q(('cause', ''), ('settled_at__isnull', True), ('slot_taken__isnull', True), ('state', 'firing')), models.Q(models.Q(('cause', ''), _negated=True), ('settled_at__isnull', False), ('slot_taken__isnull', True), ('state__in', ['fired', 'skipped', 'cancelled', 'dead'])), _connector='OR'), name='delayq_state_fits_its_columns'),
        ),
        AddIndexConcurrently(
            model_name='timeout',
            index=django_delayq.key_types.PartialIndex(fields=['policy', 'state', 'attempts', 'id'], name='delayq_failing', rows=models.Q(models.Q(('attempts__gt', django_delayq.key_types._Zero())), ('settled_at__isnull', True))),
        ),
        AddIndexConcurrently(
            model_name='timeout',
            index=django_delayq.key_types.PartialIndex(fields=['share', 'state', 'run_at', 'id'], name='delayq_share', rows=models.Q(models.Q(('share__gt', django_delayq.key_types._Literal(text=''))), ('settled_at__isnull', True))),
        ),
        AddIndexConcurrently(
            model_name='timeout',
            index=django_delayq.key_types.PartialIndex(fields=['held_until', 'id'], name='delayq_held_until', rows=models.Q(('held_until__isnull', False))),
        ),
        migrations.RunPython(migrations.RunPython.noop, refuse_held),  # before all others on the way back
    ]
