"""Add the tables and columns that the state before the first release lacked.

Only for installations of that state, see `0003_rows`. A new one gets all tables from `0001_squashed_0004_indexes`.
"""

from typing import Any

import django_delayq.key_types
from django.db import migrations, models


def compare_texts_exactly(apps: Any, schema_editor: Any) -> None:
    """Make MySQL and MariaDB compare the new texts as the other databases do: see the first migration."""
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        exact = f"CHARACTER SET utf8mb4 COLLATE {'utf8mb4_nopad_bin' if connection.mysql_is_mariadb else 'utf8mb4_0900_bin'}"
        schema_editor.execute(f"ALTER TABLE django_delayq_timeout MODIFY share varchar(64) {exact} NOT NULL")
        schema_editor.execute(f"ALTER TABLE django_delayq_rateshare MODIFY share varchar(64) {exact} NOT NULL")
        schema_editor.execute(f"ALTER TABLE django_delayq_policyday MODIFY policy varchar(200) {exact} NOT NULL")


class Migration(migrations.Migration):

    dependencies = [
        ('contenttypes', '0002_remove_content_type_name'),
        ('django_delayq', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='ClockAdvance',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('at', models.DateTimeField()),
                ('length', models.DurationField()),
                ('by', models.CharField(max_length=150)),
                ('reason', models.CharField(blank=True, default='', max_length=255)),
            ],
            options={
                'default_permissions': (),
            },
        ),
        migrations.CreateModel(
            name='PolicyDay',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('policy', models.CharField(max_length=200)),
                ('day', models.DateField()),
                ('zone', models.CharField(max_length=64)),
                ('begins_at', models.DateTimeField()),
                ('ends_at', models.DateTimeField()),
                ('counted_at', models.DateTimeField()),
                ('is_final', models.BooleanField(default=False)),
                ('changes', models.PositiveIntegerField(default=0)),
                ('in_time', models.BigIntegerField(default=0)),
                ('ended_late', models.BigIntegerField(default=0)),
                ('fired', models.BigIntegerField(default=0)),
                ('shadow', models.BigIntegerField(default=0)),
                ('skipped', models.BigIntegerField(default=0)),
                ('cancelled', models.BigIntegerField(default=0)),
                ('dead', models.BigIntegerField(default=0)),
                ('lateness', models.JSONField(default=dict)),
                ('waits', models.JSONField(default=dict)),
            ],
            options={
                'default_permissions': (),
            },
        ),
        migrations.CreateModel(
            name='RateShare',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('policy', models.CharField(max_length=200)),
                ('share', models.CharField(max_length=64)),
                ('free_at', models.DateTimeField()),
            ],
            options={
                'default_permissions': (),
            },
        ),
        migrations.CreateModel(
            name='StoredAnswer',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('digest', models.CharField(max_length=32, unique=True)),
                ('request', models.CharField(max_length=32)),
                ('status', models.PositiveSmallIntegerField(default=None, null=True)),
                ('body', models.TextField(blank=True, default='')),
                ('at', models.DateTimeField(db_index=True)),
            ],
            options={
                'default_permissions': (),
            },
        ),
        migrations.CreateModel(
            name='UnfinishedRun',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('verb', models.CharField(max_length=20)),
                ('digest', models.CharField(max_length=64, unique=True)),
                ('by', models.CharField(max_length=150)),
                ('at', models.DateTimeField()),
                ('touched_at', models.DateTimeField()),
                ('cursor', models.BigIntegerField()),
                ('newest_id', models.BigIntegerField()),
                ('changed', models.PositiveBigIntegerField(default=0)),
            ],
            options={
                'default_permissions': (),
            },
        ),
        migrations.AlterModelOptions(
            name='timeout',
            options={'default_permissions': ('view',), 'permissions': (('cancel_timeout', 'Can cancel timeouts'), ('fire_timeout', 'Can have timeouts fired now'), ('postpone_timeout', 'Can postpone timeouts'), ('hold_timeout', 'Can stop and resume the clocks of timeouts'), ('retry_timeout', 'Can retry dead timeouts'), ('refire_timeout', 'Can fire settled timeouts again'), ('schedule_timeout', 'Can schedule timeouts for objects'), ('erase_timeout', 'Can erase the personal data of settled timeouts')), 'verbose_name': 'timeout', 'verbose_name_plural': 'timeouts'},
        ),
        migrations.RemoveConstraint(
            model_name='timeout',
            name='delayq_state_fits_its_columns',
        ),
        migrations.RenameField(model_name='policychange', old_name='place', new_name='cursor'),
        migrations.RenameField(model_name='policychange', old_name='last_place', new_name='last_id'),
        migrations.AddField(
            model_name='policychange',
            name='former_delay',
            field=models.DurationField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='policychange',
            name='hand_set',
            field=models.BooleanField(default=False, editable=False),
        ),
        migrations.AddField(
            model_name='policychange',
            name='held_from',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='policychange',
            name='held_until',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='policychange',
            name='shift',
            field=models.DurationField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='policysync',
            name='asked_at',
            field=models.DateTimeField(default=None, null=True),
        ),
        migrations.AddField(
            model_name='policysync',
            name='confirmed_at',
            field=models.DateTimeField(default=None, null=True),
        ),
        migrations.AddField(
            model_name='policysync',
            name='declarations',
            field=models.JSONField(default=list),
        ),
        migrations.AddField(
            model_name='policysync',
            name='oldest_label',
            field=models.CharField(default='', max_length=200),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name='timeout',
            name='asked_due_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='computed_due_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='deaths',
            field=models.PositiveSmallIntegerField(default=0, editable=False),
        ),
        migrations.AddField(
            model_name='timeout',
            name='erased_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='first_failed_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='held_at',
            field=models.DateTimeField(blank=True, default=None, null=True, verbose_name='on hold since'),
        ),
        migrations.AddField(
            model_name='timeout',
            name='held_by_hand',
            field=models.BooleanField(default=False, verbose_name='on hold by hand'),
        ),
        migrations.AddField(
            model_name='timeout',
            name='held_until',
            field=models.DateTimeField(blank=True, default=None, null=True, verbose_name='on hold until'),
        ),
        migrations.AddField(
            model_name='timeout',
            name='hold_ended_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='is_due_by_request',
            field=models.BooleanField(default=False, editable=False),
        ),
        migrations.AddField(
            model_name='timeout',
            name='is_guarded',
            field=models.BooleanField(default=False, editable=False),
        ),
        migrations.AddField(
            model_name='timeout',
            name='is_requested',
            field=models.BooleanField(default=False, editable=False),
        ),
        migrations.AddField(
            model_name='timeout',
            name='held_when',
            field=models.BooleanField(default=False, editable=False),
        ),
        migrations.AddField(
            model_name='timeout',
            name='stops',
            field=models.JSONField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='keeps_deadline',
            field=models.BooleanField(default=False, editable=False),
        ),
        migrations.AddField(
            model_name='timeout',
            name='last_failed_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='ready_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='remaining',
            field=models.DurationField(blank=True, default=None, null=True, verbose_name='rest of its time'),
        ),
        migrations.AddField(
            model_name='timeout',
            name='restarted_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='retried_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='share',
            field=models.CharField(default='', editable=False, max_length=64),
        ),
        migrations.AddField(
            model_name='timeout',
            name='snoozes',
            field=models.PositiveSmallIntegerField(default=0, editable=False),
        ),
        migrations.AddField(
            model_name='timeout',
            name='step',
            field=models.CharField(blank=True, default='', max_length=60, verbose_name='next step'),
        ),
        migrations.AddField(
            model_name='timeout',
            name='steps_over',
            field=models.CharField(default='', editable=False, max_length=1200),
        ),
        migrations.AddField(
            model_name='timeout',
            name='suspected_at',
            field=models.DateTimeField(default=None, editable=False, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='terms',
            field=models.CharField(default=None, editable=False, max_length=200, null=True),
        ),
        migrations.AddField(
            model_name='timeout',
            name='trace',
            field=models.CharField(default='', editable=False, max_length=55),
        ),
        migrations.AlterField(
            model_name='timeout',
            name='state',
            field=models.CharField(choices=[('pending', 'pending'), ('held', 'on hold'), ('firing', 'firing'), ('fired', 'fired'), ('skipped', 'skipped'), ('cancelled', 'cancelled'), ('dead', 'dead')], default='pending', max_length=10, verbose_name='state'),
        ),
        migrations.AddIndex(
            model_name='policyday',
            index=models.Index(fields=['policy', 'ends_at'], name='delayq_days'),
        ),
        migrations.AddConstraint(
            model_name='policyday',
            constraint=models.UniqueConstraint(fields=('policy', 'begins_at'), name='delayq_one_part_of_a_day'),
        ),
        migrations.AddConstraint(
            model_name='rateshare',
            constraint=models.UniqueConstraint(fields=('policy', 'share'), name='delayq_one_share'),
        ),
        migrations.RunPython(compare_texts_exactly, migrations.RunPython.noop, atomic=False),
    ]
