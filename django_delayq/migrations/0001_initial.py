# All tables with all their indexes. Later migrations that add an index to a table use
# `django_delayq.migrations._operations.AddIndexConcurrently` (see CONTRIBUTING).

import uuid
from typing import Any

import django.db.models.deletion
import django_delayq.sql.key_types
import django_delayq.models
from django.db import migrations, models


TABLE = "django_delayq_timeout"
INDEX = "delayq_one_pending_per_slot"


def put_settled_rows_last(apps: Any, schema_editor: Any) -> None:
    """Order the unique index so that, within a slot, settled rows (NULL) follow the pending row.

    A transaction that takes a free slot again makes InnoDB lock the following index entry, too. If that entry were the
    next slot's pending row, which another transaction is about to settle, the two would wait for each other: a
    deadlock between unrelated objects. With this order the entry is a settled row of the same slot. MySQL 8 and
    MariaDB 10.8 keep such an order; older versions ignore the keyword.
    """
    if schema_editor.connection.vendor == "mysql":
        schema_editor.execute(
            f"ALTER TABLE {TABLE} DROP INDEX {INDEX}, ADD UNIQUE INDEX {INDEX} (slot, slot_taken DESC)"
        )


def compare_texts_exactly(apps: Any, schema_editor: Any) -> None:
    """Make MySQL and MariaDB compare the ids of objects, and keys and shares of timeouts, as the other databases do.

    Their default collations ignore case, accents and trailing spaces. With them "a" finds the timeouts of "A", where
    the table of the objects distinguishes the two.

    Also make them accept each character in a reason. The default of the database may be `latin1` or `utf8mb3`. There
    an error whose message has another character could not be recorded, and the handler would run again without end.
    """
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        exact = f"CHARACTER SET utf8mb4 COLLATE {'utf8mb4_nopad_bin' if connection.mysql_is_mariadb else 'utf8mb4_0900_bin'}"
        schema_editor.execute(
            f"ALTER TABLE {TABLE} MODIFY object_id varchar(255) {exact} NOT NULL, MODIFY `key` varchar(200) {exact} NOT NULL"
            f", MODIFY share varchar(64) {exact} NOT NULL, MODIFY reason varchar(255) CHARACTER SET utf8mb4 NOT NULL"
        )
        schema_editor.execute(f"ALTER TABLE django_delayq_rateshare MODIFY share varchar(64) {exact} NOT NULL")
        schema_editor.execute(f"ALTER TABLE django_delayq_policyday MODIFY policy varchar(200) {exact} NOT NULL")


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('contenttypes', '0002_remove_content_type_name'),
    ]

    operations = [
        migrations.CreateModel(
            name='PolicyControl',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('policy', models.CharField(max_length=200, unique=True, verbose_name='policy')),
                ('stop', models.CharField(blank=True, choices=[('', 'not stopped'), ('paused', 'paused'), ('held', 'on hold'), ('releasing', 'being released')], default='', max_length=10, verbose_name='stop')),
                ('stopped_at', models.DateTimeField(blank=True, null=True, verbose_name='stopped at')),
                ('until', models.DateTimeField(blank=True, null=True, verbose_name='until')),
                ('resumed_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('after', models.DurationField(blank=True, null=True, verbose_name='delay in force')),
                ('guards', models.JSONField(blank=True, default=dict, verbose_name='guard rails in force')),
                ('changed_at', models.DateTimeField(verbose_name='changed at')),
                ('by', models.CharField(blank=True, default='', max_length=150, verbose_name='by')),
                ('reason', models.CharField(blank=True, default='', max_length=255, verbose_name='reason')),
            ],
            options={
                'verbose_name': 'policy',
                'verbose_name_plural': 'Policies',
                'permissions': (('pause_policy', 'Can pause, hold and resume policies'), ('change_policy_delay', 'Can change the delay of policies'), ('change_policy_guards', 'Can change the guard rails of policies')),
                'default_permissions': ('view',),
            },
        ),
        migrations.CreateModel(
            name='PolicyMeter',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('policy', models.CharField(max_length=200)),
                ('name', models.CharField(max_length=10)),
                ('state', models.JSONField(default=dict)),
            ],
            options={
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('policy', 'name'), name='delayq_one_meter')],
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
                'constraints': [models.UniqueConstraint(fields=('policy', 'share'), name='delayq_one_share')],
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
                ('timeout_id', models.BigIntegerField(db_index=True, null=True)),
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
        migrations.CreateModel(
            name='Installation',
            fields=[
                ('id', models.PositiveSmallIntegerField(default=1, primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=100)),
                ('since_at', models.DateTimeField()),
            ],
            options={
                'default_permissions': (),
            },
        ),
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
            name='WorkerSeen',
            fields=[
                ('id', models.CharField(max_length=32, primary_key=True, serialize=False)),
                ('host', models.CharField(max_length=100, verbose_name='host')),
                ('pid', models.PositiveIntegerField(verbose_name='process')),
                ('queues', models.JSONField(blank=True, default=None, null=True, verbose_name='queues')),
                ('concurrency', models.PositiveSmallIntegerField(verbose_name='threads')),
                ('version', models.CharField(max_length=50, verbose_name='version')),
                ('uses_redis', models.BooleanField(verbose_name='uses Redis')),
                ('held', models.PositiveIntegerField(default=0, verbose_name='timeouts under way')),
                ('stuck_threads', models.PositiveSmallIntegerField(default=0, verbose_name='stuck threads')),
                ('started_at', models.DateTimeField(verbose_name='started at')),
                ('seen_at', models.DateTimeField(db_index=True, verbose_name='seen at')),
                ('passed_at', models.DateTimeField(verbose_name='last look for due timeouts')),
            ],
            options={
                'verbose_name': 'worker',
                'verbose_name_plural': 'workers',
                'default_permissions': ('view',),
            },
        ),
        migrations.CreateModel(
            name='PolicyChange',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('policy', models.CharField(max_length=200, verbose_name='policy')),
                ('what', models.CharField(choices=[('paused', 'paused'), ('held', 'held'), ('resumed', 'resumed'), ('delay', 'delay changed'), ('late', 'limit of lateness changed'), ('brake', 'brake changed'), ('shadow', 'shadow mode changed'), ('retired', 'retired')], max_length=10, verbose_name='what')),
                ('at', models.DateTimeField(verbose_name='at')),
                ('by', models.CharField(blank=True, default='', max_length=150, verbose_name='by')),
                ('reason', models.CharField(blank=True, default='', max_length=255, verbose_name='reason')),
                ('details', models.JSONField(blank=True, default=dict, verbose_name='details')),
                ('moved', models.PositiveIntegerField(default=0, verbose_name='rows moved')),
                ('unmoved', models.PositiveIntegerField(default=0, verbose_name='rows left as they were')),
                ('finished_at', models.DateTimeField(blank=True, null=True, verbose_name='finished at')),
                ('cursor', models.BigIntegerField(default=0, editable=False)),
                ('last_id', models.BigIntegerField(default=0, editable=False)),
                ('touched_at', models.DateTimeField(editable=False)),
                ('held_from', models.DateTimeField(default=None, editable=False, null=True)),
                ('held_until', models.DateTimeField(default=None, editable=False, null=True)),
                ('shift', models.DurationField(default=None, editable=False, null=True)),
                ('former_delay', models.DurationField(default=None, editable=False, null=True)),
                ('hand_set', models.BooleanField(default=False, editable=False)),
            ],
            options={
                'verbose_name': 'policy change',
                'verbose_name_plural': 'policy changes',
                'default_permissions': ('view',),
                'indexes': [models.Index(fields=['policy', 'id'], name='delayq_changes')],
            },
        ),
        migrations.CreateModel(
            name='PolicyDay',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('policy', models.CharField(max_length=200)),
                ('day', models.DateField()),
                ('zone', models.CharField(max_length=64)),
                ('is_deleted', models.BooleanField(default=False)),
                ('until', models.DateTimeField(default=None, null=True)),
                ('counted_at', models.DateTimeField(default=None, null=True)),
                ('version', models.UUIDField(default=uuid.uuid4)),
                ('in_time', models.BigIntegerField(default=0)),
                ('ended_late', models.BigIntegerField(default=0)),
                ('fired', models.BigIntegerField(default=0)),
                ('shadow', models.BigIntegerField(default=0)),
                ('skipped', models.BigIntegerField(default=0)),
                ('cancelled', models.BigIntegerField(default=0)),
                ('dead', models.BigIntegerField(default=0)),
                ('lateness', models.JSONField(default=dict)),
                ('waits', models.JSONField(default=dict)),
                ('hours', models.JSONField(default=dict)),
            ],
            options={
                'default_permissions': (),
                'constraints': [models.UniqueConstraint(fields=('policy', 'day', 'is_deleted'), name='delayq_one_day')],
            },
        ),
        migrations.CreateModel(
            name='PolicySync',
            fields=[
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('policy', models.CharField(max_length=200, unique=True)),
                ('oldest_label', models.CharField(max_length=200)),
                ('place', models.CharField(blank=True, default='', max_length=255)),
                ('checked', models.PositiveBigIntegerField(default=0)),
                ('total', models.PositiveBigIntegerField(default=None, null=True)),
                ('failed', models.PositiveBigIntegerField(default=0)),
                ('failed_total', models.PositiveBigIntegerField(default=0)),
                ('before_at', models.DateTimeField(default=None, null=True)),
                ('began_at', models.DateTimeField(default=None, null=True)),
                ('finished_at', models.DateTimeField(default=None, null=True)),
                ('claimed_until', models.DateTimeField(default=None, null=True)),
                ('asked_at', models.DateTimeField(default=None, null=True)),
                ('declarations', models.JSONField(default=list)),
                ('confirmed_at', models.DateTimeField(default=None, null=True)),
            ],
            options={
                'default_permissions': (),
            },
        ),
        migrations.CreateModel(
            name='Timeout',
            fields=[
                # Wide columns of a fixed length first: PostgreSQL would otherwise pad them, 10 bytes a row.
                ('id', models.BigAutoField(primary_key=True, serialize=False)),
                ('due_at', models.DateTimeField(verbose_name='deadline')),
                ('run_at', models.DateTimeField(verbose_name='next attempt')),
                ('first_due_at', models.DateTimeField(verbose_name='first deadline')),
                ('created_at', models.DateTimeField(verbose_name='created at')),
                ('since_at', models.DateTimeField(blank=True, null=True, verbose_name='counts from')),
                ('settled_at', models.DateTimeField(blank=True, null=True, verbose_name='settled at')),
                ('ready_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('claimed_until', models.DateTimeField(default=None, editable=False, null=True)),
                ('restarted_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('asked_due_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('hold_ended_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('suspected_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('erased_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('first_failed_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('last_failed_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('held_at', models.DateTimeField(blank=True, default=None, null=True, verbose_name='on hold since')),
                ('held_until', models.DateTimeField(blank=True, default=None, null=True, verbose_name='on hold until')),
                ('remaining', models.DurationField(blank=True, default=None, null=True, verbose_name='rest of its time')),
                ('content_type', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='contenttypes.contenttype', verbose_name='kind of object')),
                ('terms', models.CharField(default=None, editable=False, max_length=200, null=True)),
                ('computed_due_at', models.DateTimeField(default=None, editable=False, null=True)),
                ('step', models.CharField(blank=True, default='', max_length=60, verbose_name='next step')),
                ('steps_over', models.CharField(default='', editable=False, max_length=1200)),
                ('extensions', models.PositiveSmallIntegerField(default=0, verbose_name='extensions')),
                ('attempts', models.PositiveSmallIntegerField(default=0, verbose_name='attempts')),
                ('claims', models.PositiveSmallIntegerField(default=0, editable=False)),
                ('slot_taken', models.PositiveSmallIntegerField(default=1, editable=False, null=True)),
                ('snoozes', models.PositiveSmallIntegerField(default=0, editable=False)),
                ('deaths', models.PositiveSmallIntegerField(default=0, editable=False)),
                ('final_attempt', models.BooleanField(default=False, editable=False)),
                ('is_requested', models.BooleanField(default=False, editable=False)),
                ('is_guarded', models.BooleanField(default=False, editable=False)),
                ('is_due_by_request', models.BooleanField(default=False, editable=False)),
                ('held_by_hand', models.BooleanField(default=False, verbose_name='on hold by hand')),
                ('held_when', models.BooleanField(default=False, editable=False)),
                ('stops', models.JSONField(default=None, editable=False, null=True)),
                ('keeps_deadline', models.BooleanField(default=False, editable=False)),
                ('slot', django_delayq.sql.key_types.HexField(editable=False, max_length=32)),
                ('idempotency_key', django_delayq.sql.key_types.HexField(default=django_delayq.models.new_idempotency_key, editable=False, max_length=32, verbose_name='idempotency key')),
                ('policy', models.CharField(max_length=200, verbose_name='policy')),
                ('object_id', models.CharField(max_length=255, verbose_name='object id')),
                ('queue', models.CharField(default='default', max_length=100, verbose_name='queue')),
                ('state', models.CharField(choices=[('pending', 'pending'), ('held', 'on hold'), ('firing', 'firing'), ('fired', 'fired'), ('skipped', 'skipped'), ('cancelled', 'cancelled'), ('dead', 'dead')], default='pending', max_length=10, verbose_name='state')),
                ('key', models.CharField(blank=True, default='', max_length=200, verbose_name='key')),
                ('share', models.CharField(default='', editable=False, max_length=64)),
                ('trace', models.CharField(default='', editable=False, max_length=55)),
                ('cause', models.CharField(blank=True, choices=[('due', 'it was due'), ('hand', 'by hand'), ('condition', 'the condition stopped holding'), ('gone', 'the object is gone'), ('handler', 'decided by the handler'), ('retries', 'all retries are used up'), ('late', 'it was too late'), ('superseded', 'a newer round took its place'), ('limit', 'a limit of its policy'), ('shadow', 'its policy is in shadow mode'), ('retired', 'its policy was retired')], default='', max_length=12, verbose_name='cause')),
                ('reason', models.CharField(blank=True, default='', max_length=255, verbose_name='reason')),
                ('payload', models.JSONField(blank=True, default=None, null=True, verbose_name='payload')),
                ('history', models.JSONField(blank=True, default=list, verbose_name='history')),
            ],
            options={
                'verbose_name': 'timeout',
                'verbose_name_plural': 'timeouts',
                'permissions': (('cancel_timeout', 'Can cancel timeouts'), ('fire_timeout', 'Can have timeouts fired now'), ('postpone_timeout', 'Can postpone timeouts'), ('hold_timeout', 'Can hold, pause and resume timeouts'), ('retry_timeout', 'Can retry dead timeouts'), ('refire_timeout', 'Can fire settled timeouts again'), ('schedule_timeout', 'Can schedule timeouts for objects'), ('erase_timeout', 'Can erase the personal data of settled timeouts')),
                'default_permissions': ('view',),
                'indexes': [django_delayq.sql.key_types.PartialIndex(fields=['state', 'run_at', 'id'], name='delayq_unsettled', rows=models.Q(('settled_at__isnull', True))), models.Index(fields=['content_type', 'object_id'], name='delayq_object'), django_delayq.sql.key_types.PartialIndex(fields=['settled_at', 'id'], name='delayq_settled', rows=models.Q(('settled_at__isnull', False))), models.Index(fields=['policy', 'state', 'run_at', 'id'], name='delayq_policy'), models.Index(fields=['due_at', 'id'], name='delayq_due'), django_delayq.sql.key_types.PartialIndex(fields=['policy', 'state', 'attempts', 'id'], name='delayq_failing', rows=models.Q(django_delayq.sql.key_types.HAS_FAILED, ('settled_at__isnull', True))), django_delayq.sql.key_types.PartialIndex(fields=['key', 'id'], name='delayq_key', rows=django_delayq.sql.key_types.HAS_KEY), django_delayq.sql.key_types.PartialIndex(fields=['queue', 'state', 'run_at', 'id'], name='delayq_queue', rows=django_delayq.sql.key_types.HAS_OWN_QUEUE), django_delayq.sql.key_types.PartialIndex(fields=['share', 'state', 'run_at', 'id'], name='delayq_share', rows=models.Q(django_delayq.sql.key_types.HAS_SHARE, ('settled_at__isnull', True))), django_delayq.sql.key_types.PartialIndex(fields=['held_until', 'id'], name='delayq_held_until', rows=django_delayq.sql.key_types.HAS_END_OF_HOLD)],
                'constraints': [models.UniqueConstraint(fields=('slot', 'slot_taken'), name='delayq_one_pending_per_slot'), models.CheckConstraint(condition=models.Q(models.Q(models.Q(models.Q(('slot_taken__isnull', True), ('state', 'firing')), models.Q(models.Q(models.Q(('remaining__isnull', True), ('state', 'pending')), models.Q(('remaining__isnull', False), ('state', 'held')), _connector='OR'), ('slot_taken', 1), ('slot_taken__isnull', False)), _connector='OR'), ('cause', ''), ('settled_at__isnull', True)), models.Q(models.Q(('cause', ''), _negated=True), ('settled_at__isnull', False), ('slot_taken__isnull', True), ('state__in', ['fired', 'skipped', 'cancelled', 'dead'])), _connector='OR'), name='delayq_state_fits_its_columns')],
            },
        ),
        migrations.RunPython(put_settled_rows_last, migrations.RunPython.noop, atomic=False),
        migrations.RunPython(compare_texts_exactly, migrations.RunPython.noop, atomic=False),
    ]
