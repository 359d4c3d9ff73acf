"""Small deliberate faults in the Python core, each of which a test of its room must notice.

`python tools/mutants.py` plants them one at a time. A fault names the file, a text that occurs in it exactly once, the
text planted instead, and the tests of the room that must fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One fault: `new` in place of `old` in `file` of the package, which `tests` must notice."""

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def complaint(self, package: Path) -> str:
        """Return what is wrong with this entry; empty if its text occurs exactly once."""
        found = (package / self.file).read_text(encoding="utf-8").count(self.old)
        return "" if found == 1 else f"{self.room}: {self.name}: {self.old!r} occurs {found} times in {self.file}"


def _faults(room: str, tests: str, *faults: tuple[str, str, str, str]) -> list[Fault]:
    """Return faults of `room` that `tests`, files under tests/integration, must notice."""
    paths = tuple(f"tests/integration/{path}" for path in tests.split())
    return [Fault(room, name, file, old, new, paths) for name, file, old, new in faults]


BY_HAND = "scheduling/test_by_hand.py scheduling/test_bulk_and_reading.py scheduling/test_pushes.py scheduling/test_lock_order.py"
ARMING = "scheduling/test_arming.py arming scheduling/test_sync.py scheduling/test_pushes.py"
FIRING = (
    "firing/test_single.py firing/test_outcomes.py firing/test_groups.py firing/test_batches.py firing/test_planning.py"
    " firing/test_poison.py firing/test_outside.py firing/test_settling.py firing/test_crashes.py"
)
OPERATIONS = "operations scheduling/test_pushes.py"
RECOVERY = "worker/test_sweep.py worker/test_prune.py worker/test_background_jobs.py"

FAULTS: list[Fault] = [
    *_faults(
        "ledger",
        BY_HAND,
        (
            "a new round keeps the attempts of the old one",
            "ledger/writing.py",
            '    "attempts",\n    "payload",',
            '    "payload",',
        ),
        ("a new round keeps the old payload", "ledger/writing.py", '    "payload",\n    "history",', '    "history",'),
        ("a new round keeps the old key", "ledger/writing.py", '    "idempotency_key",\n    "slot",', '    "slot",'),
        (
            "rows are inserted in any order",
            "ledger/writing.py",
            "chunks(sorted(rows, key=lambda row: row.slot))",
            "chunks(rows)",
        ),
        (
            "what is inserted is not pushed",
            "ledger/writing.py",
            "    push_rows(rows, using, earlier_only=earlier_only)\n",
            "",
        ),
        (
            "what is replaced is not pushed",
            "ledger/writing.py",
            "update_each([row], ROUND_FIELDS, using)\n    push_rows([row], using)",
            "update_each([row], ROUND_FIELDS, using)",
        ),
        (
            "what is moved is not pushed",
            "ledger/writing.py",
            "update_each(rows, (*MOVED_FIELDS, *columns), using)\n    push_rows(rows, using)",
            "update_each(rows, (*MOVED_FIELDS, *columns), using)",
        ),
        (
            "moving keeps claims",
            "ledger/writing.py",
            "        row.claims, row.claimed_until = 0, None\n        rows.append(row)",
            "        rows.append(row)",
        ),
        (
            "extending brings a waiting retry forward",
            "ledger/writing.py",
            "max(row.run_at, due_at) if row.run_at > row.due_at else due_at",
            "due_at",
        ),
        ("extensions are not counted", "ledger/writing.py", "row.extensions + extended", "row.extensions"),
        (
            "cancelling many is not withdrawn from Redis",
            "ledger/writing.py",
            "    withdraw(((queue, row_id) for row_id, queue in entries.items()), using)\n",
            "",
        ),
        (
            "cancelling one is not withdrawn from Redis",
            "ledger/writing.py",
            "    withdraw([(row.queue, row.pk) for row in rows], using)\n",
            "",
        ),
        ("a push ignores the horizon", "ledger/outbox.py", "<= get_settings().horizon", "<= get_settings().retention"),
        (
            "a row beyond the horizon keeps its entry",
            "ledger/outbox.py",
            "return None if earlier_only else Change(timeout.queue, timeout.pk, None)",
            "return None",
        ),
        (
            "a savepoint that rolls back pushes nevertheless",
            "ledger/outbox.py",
            "transaction.on_commit(_Push(connection, changes), using=using, robust=True)",
            "_send(changes)",
        ),
        (
            "rows are locked in the order of their ids",
            "ledger/locking.py",
            '.order_by("slot", "id")',
            '.order_by("id")',
        ),
    ),
    *_faults(
        "ledger",
        "ledger",
        (
            "cancel also cancels settled rows",
            "ledger/writing.py",
            "filter(pk__in=list(entries), slot_taken=1)\n    cancelled",
            "filter(pk__in=list(entries))\n    cancelled",
        ),
        (
            "firing may begin twice",
            "ledger/settling.py",
            "_due([row], using).filter(attempts=row.attempts)",
            "_due([row], using)",
        ),
        (
            "firing does not ask whether it is due",
            "ledger/settling.py",
            "pk__in=ids, slot_taken=1, run_at__lte=DatabaseNow())",
            "pk__in=ids, slot_taken=1)",
        ),
        (
            "firing fires what is settled",
            "ledger/settling.py",
            "pk__in=ids, slot_taken=1, run_at__lte=DatabaseNow())",
            "pk__in=ids, run_at__lte=DatabaseNow())",
        ),
        (
            "a newer round under a former label is not seen",
            "ledger/settling.py",
            "slot__in={row.slot, *slots}",
            "slot__in={row.slot}",
        ),
        (
            "compare-and-set compares no attempts",
            "ledger/settling.py",
            '("state", "attempts", "run_at", "idempotency_key")}\n    if not',
            '("state", "run_at", "idempotency_key")}\n    if not',
        ),
        (
            "compare-and-set compares no state",
            "ledger/settling.py",
            '("state", "attempts", "run_at", "idempotency_key")}\n    if not',
            '("attempts", "run_at", "idempotency_key")}\n    if not',
        ),
        (
            "skipping settles what is settled",
            "ledger/settling.py",
            "filter(pk__in=[row.pk for row in rows], slot_taken=1).update(**values)",
            "filter(pk__in=[row.pk for row in rows]).update(**values)",
        ),
        (
            "an extension revives what has expired elsewhere",
            "ledger/settling.py",
            "firing = in_state(Timeout.objects.using(using).filter(pk__in=ids), State.FIRING, using)",
            "firing = Timeout.objects.using(using).filter(pk__in=ids)",
        ),
        (
            "pruning looks at the settling only",
            "ledger/settling.py",
            "filter(settled_at__lt=before, due_at__lt=before)",
            "filter(settled_at__lt=before)",
        ),
        (
            "extending takes over other workers' claims",
            "ledger/claiming.py",
            "free = _lock_free(Timeout.objects.using(using).filter(pk__in=chunk, claimed_until=until), using)\n            Timeout.objects.using(using).filter(pk__in=free, claimed_until=until)",
            "free = _lock_free(Timeout.objects.using(using).filter(pk__in=chunk), using)\n            Timeout.objects.using(using).filter(pk__in=free)",
        ),
        (
            "releasing gives away other workers' claims",
            "ledger/claiming.py",
            "filter(pk__in=ids, claimed_until=until, claims__gt=0)",
            "filter(pk__in=ids, claims__gt=0)",
        ),
        (
            "a release counts as a delivery",
            "ledger/claiming.py",
            'rows.update(claims=F("claims") - 1, claimed_until=free_from)',
            "rows.update(claimed_until=free_from)",
        ),
        (
            "a claim counts no delivery",
            "ledger/claiming.py",
            'unspent.update(claims=F("claims") + 1, claimed_until=until)',
            "unspent.update(claimed_until=until)",
        ),
        (
            "what is claimed is claimed again",
            "ledger/claiming.py",
            "Timeout.objects.using(using).due().filter(unclaimed)",
            "Timeout.objects.using(using).due()",
        ),
        (
            "rows of stopped policies are claimed",
            "ledger/claiming.py",
            "{*stop_cache.confirmed(using).all_labels(), *without}",
            "{*without}",
        ),
    ),
    *_faults(
        "scheduling",
        BY_HAND + " scheduling/test_guards.py",
        (
            "keep moves what is pending",
            "scheduling/single.py",
            'on_conflict == "keep":\n            return present',
            'on_conflict == "kept":\n            return present',
        ),
        (
            "an error is raised for nothing pending",
            "scheduling/single.py",
            'if present is not None and on_conflict == "error"',
            'if present is None and on_conflict == "error"',
        ),
        (
            "cancelling does not lock the object first",
            "scheduling/single.py",
            "        if subject.model is not None:\n            lock_object(subject.model, subject.pk, subject.using)\n        return cancel_newest",
            "        return cancel_newest",
        ),
        (
            "moving does not lock the object first",
            "scheduling/single.py",
            "    if subject.model is not None:\n        lock_object(subject.model, subject.pk, subject.using)\n    return lock_newest(subject.pending()",
            "    return lock_newest(subject.pending()",
        ),
        (
            "what is firing may be tried again after a cancel",
            "scheduling/single.py",
            "            writing.forbid_attempts(row, reason)\n",
            "            pass\n",
        ),
        (
            "what has fired counts as cancelled in time",
            "scheduling/single.py",
            "return Cancelling(in_time=False, row=row)",
            "return Cancelling(in_time=True, row=row)",
        ),
        (
            "dead timeouts stay dead",
            "scheduling/single.py",
            "if row.state not in (State.PENDING, State.DEAD)",
            "if row.state not in (State.PENDING,)",
        ),
        ("extensions have no limit", "scheduling/single.py", "limit is None or row.extensions < limit", "True"),
        (
            "rescheduling counts as an extension",
            "scheduling/single.py",
            'extended = what == "extended"',
            "extended = True",
        ),
        (
            "one signal too few",
            "scheduling/single.py",
            "            announce(timeout_scheduled, new, subject.using)\n",
            "",
        ),
        ("a payload of any size", "scheduling/single.py", "if size > MAX_PAYLOAD_BYTES", "if False"),
        ("extending many ignores the limit", "scheduling/bulk.py", "may_extend(row, ", "True or may_extend(row, "),
        ("scheduling many keeps nothing", "scheduling/bulk.py", 'on_conflict == "keep"\n', "False\n"),
        (
            "the guard lets the late one pass",
            "scheduling/guards.py",
            "if not cancelling.in_time and row is not None:",
            "if False and row is not None:",
        ),
        (
            "the guard closes a round whose condition ended",
            "scheduling/guards.py",
            "if policy.is_automatic and not condition_holds(",
            "if False and not condition_holds(",
        ),
    ),
    *_faults(
        "arming",
        ARMING,
        (
            "what a save arms is not written",
            "arming/reconcile.py",
            "    if changes.insert:\n        writing.insert(changes.insert, using)\n",
            "",
        ),
        (
            "a round with another start stays",
            "arming/reconcile.py",
            "if state.pending_id is None or state.pending_since != since_at:",
            "if state.pending_id is None:",
        ),
        (
            "a closed round is armed again",
            "arming/reconcile.py",
            "if pending_id is None and (since_at is None or is_closed()):",
            "if pending_id is None and since_at is None:",
        ),
        ("catching up has no limit", "arming/reconcile.py", "clock.now() - due_at >= oldest", "False"),
        (
            "what moves back too far is moved",
            "arming/reconcile.py",
            "    elif is_too_old:\n        changes.cancel[pending_id] = (Cause.LATE, policy.queue)\n",
            "",
        ),
        (
            "a condition that ended cancels nothing",
            "arming/reconcile.py",
            "            changes.cancel[state.pending_id] = (Cause.CONDITION, policy.queue)\n    return changes",
            "            pass\n    return changes",
        ),
        (
            "a save sends no signals",
            "arming/reconcile.py",
            "apply(changes, using, signals=True)",
            "apply(changes, using, signals=False)",
        ),
        (
            "a sync decides without locks",
            "arming/reconcile.py",
            "        if not dry_run:\n            lock_objects(model, pks, using)\n",
            "",
        ),
        (
            "a dry run writes",
            "arming/reconcile.py",
            "        if not dry_run:\n            apply(changes",
            "        if True:\n            apply(changes",
        ),
        (
            "rounds with a key count as automatic",
            "arming/row_state.py",
            'policy__in=policy.labels, key=""',
            "policy__in=policy.labels",
        ),
        (
            "former labels are not seen",
            "arming/row_state.py",
            'policy__in=policy.labels, key=""',
            'policy=policy.label, key=""',
        ),
        (
            "a dead round is open",
            "arming/row_state.py",
            "(State.FIRED, State.DEAD, State.FIRING)",
            "(State.FIRED, State.FIRING)",
        ),
        (
            "a firing round is open",
            "arming/row_state.py",
            "(State.FIRED, State.DEAD, State.FIRING)",
            "(State.FIRED, State.DEAD)",
        ),
        (
            "a round cancelled by hand is open",
            "arming/row_state.py",
            "    | Q(state=State.CANCELLED, cause=Cause.HAND)\n",
            "",
        ),
        (
            "a round skipped by its handler is open",
            "arming/row_state.py",
            "    | Q(state=State.SKIPPED, cause=Cause.HANDLER)\n",
            "",
        ),
        ("NULL in a condition counts as true", "arming/row_state.py", "default=Value(0)", "default=Value(1)"),
        ("saves of fixtures arm", "arming/receivers.py", "    if raw:\n        return\n", ""),
        (
            "update_fields is ignored",
            "arming/receivers.py",
            "if update_fields is not None and fields is not None and not fields & set(update_fields):",
            "if False:",
        ),
        ("CATCH_UP is not read", "arming/receivers.py", "get_settings().catch_up", "get_settings().retention"),
        (
            "deleting cancels nothing",
            "arming/receivers.py",
            "        cancel_of_deleted(_table(sender), pks, using)",
            "        pass",
        ),
    ),
    *_faults(
        "firing",
        FIRING,
        (
            "handlers run although the comparison failed",
            "firing/attempt.py",
            "            raise LostRace\n",
            "            pass\n",
        ),
        (
            "a lost race counts as a failed attempt",
            "firing/attempt.py",
            "elif isinstance(error, LostRace):",
            "elif False:",
        ),
        ("what is not due yet fires", "firing/attempt.py", "elif row.run_at > now:", "elif False:"),
        (
            "the condition is not checked",
            "firing/attempt.py",
            "            elif obj.pk in matching:",
            "            elif True:",
        ),
        (
            "an object that is gone is fired",
            "firing/attempt.py",
            "((gone, Cause.GONE), (unmet, Cause.CONDITION))",
            "((unmet, Cause.CONDITION),)",
        ),
        (
            "a stop between plan and lock is not seen",
            "firing/attempt.py",
            '        if due and vars(due[0])["is_stopped"]:',
            "        if False:",
        ),
        (
            "a forged work fires another row",
            "firing/attempt.py",
            "elif row.object_id != candidate.object_id or row.policy not in self.policy.labels:",
            "elif False:",
        ),
        ("a batch does not sync its objects", "firing/attempt.py", "        sync_timeouts(queryset.all())\n", ""),
        (
            "overlapping handlers go on",
            "firing/attempt.py",
            "                        raise Overlap\n",
            "                        pass\n",
        ),
        (
            "a transient error counts as an attempt",
            "firing/attempt.py",
            "        elif not isinstance(error, Outcome):",
            "        elif False:",
        ),
        (
            "a failed batch is not fired one by one",
            "firing/groups.py",
            "firing_state.group_size(policy.label).fire_alone_for(ALONE_AFTER_BATCH_SECONDS)",
            "pass",
        ),
        ("the plan does not look ahead", "firing/planning.py", "row.database_now + ahead", "row.database_now"),
        (
            "a suspect fires with others",
            "firing/planning.py",
            "is_suspect = deliveries[row.id] > 1",
            "is_suspect = False",
        ),
        (
            "two timeouts of one object in one work",
            "firing/planning.py",
            "if len(piece) < size and row.object_id not in piece:",
            "if len(piece) < size:",
        ),
        (
            "settled rows are planned",
            "firing/planning.py",
            "        if Timeout.State(row.state).is_settled:\n            report.done.append(row.id)\n        elif",
            "        if",
        ),
        (
            "stopped policies are planned",
            "firing/planning.py",
            "        elif policy.label in stopped:\n            report.again[row.id] = stopped.recheck_at(policy.label, row.database_now)\n",
            "",
        ),
        ("no attempt is ever the last", "firing/failures.py", "    if run_at is None:", "    if False:"),
        (
            "a snooze counts as an attempt",
            "firing/failures.py",
            '{**settling.waiting(run_at), "attempts": attempt - 1}, [snoozed]',
            '{**settling.waiting(run_at), "attempts": attempt}, [snoozed]',
        ),
        (
            "a failure overwrites what changed meanwhile",
            "firing/failures.py",
            "    return all(getattr(row, name) == value for name, value in seen.items())",
            "    return True",
        ),
        (
            "a cancelled firing is tried again",
            "firing/failures.py",
            "if state != State.SKIPPED and row.final_attempt:",
            "if False:",
        ),
        (
            "an older firing takes the slot of the next round",
            "firing/failures.py",
            "elif state == State.PENDING and slot_is_taken:",
            "elif False:",
        ),
        (
            "a firing that expired is not counted",
            "firing/failures.py",
            "seen=seen, is_counted=True)",
            "seen=seen, is_counted=False)",
        ),
    ),
    *_faults(
        "recovery",
        RECOVERY,
        ("the sweep looks ahead not far enough", "recovery/sweep.py", "now + 2 * interval)", "now)"),
        (
            "overdue rows are never swept",
            "recovery/sweep.py",
            'return ahead.plus(self._range("full", None, now))',
            "return ahead",
        ),
        (
            "rows just overdue wait for the full sweep",
            "recovery/sweep.py",
            'return ahead.plus(self._range("behind", now - BEHIND, now))',
            "return ahead",
        ),
        (
            "the full sweep runs every six hours",
            "recovery/sweep.py",
            "FULL_INTERVAL: Final = timedelta(seconds=60)",
            "FULL_INTERVAL: Final = timedelta(hours=6)",
        ),
        (
            "the sweep restores entries of stopped policies as due",
            "recovery/sweep.py",
            "due_at = max(due_at, self._deferred_until)",
            "pass",
        ),
        ("expired rows are settled one page at a time", "recovery/sweep.py", "if found < EXPIRED_PAGE:", "if True:"),
        (
            "pruning forgets the setting",
            "recovery/prune.py",
            "before = database_now(using) - (get_settings().retention if older_than is None else older_than)",
            "before = database_now(using) - (older_than or timedelta(days=365))",
        ),
        (
            "a turn lasts for ever",
            "recovery/turns.py",
            "px=milliseconds))\n        if not",
            "px=1000 * milliseconds))\n        if not",
        ),
        (
            "a failed turn stays taken",
            "recovery/turns.py",
            "        if is_ours and engine is not None:",
            "        if False:",
        ),
    ),
    *_faults(
        "worker",
        "worker/test_background_jobs.py worker/test_worker.py",
        (
            "no worker syncs",
            "worker/background.py",
            "lambda: sync_all(self._using, progress=lambda _: between())",
            "lambda: None",
        ),
        ("no worker prunes", "worker/background.py", "lambda: prune(self._using, between=between)", "lambda: None"),
        (
            "leases are extended too late",
            "worker/background.py",
            "return get_settings().lease.total_seconds() / 3",
            "return get_settings().lease.total_seconds() * 7",
        ),
        ("leases in Redis are never extended", "worker/background.py", "        sources.extend()\n", ""),
        (
            "what was resumed waits for a minute",
            "worker/background.py",
            "                requeue_due(policy, self._using)\n",
            "",
        ),
        (
            "a poll claims for ever",
            "worker/sources/ledger.py",
            "room, get_settings().lease, without)",
            "room, 20 * get_settings().lease, without)",
        ),
    ),
    *_faults(
        "operations",
        OPERATIONS,
        (
            "retried rows are not pushed",
            "ledger/writing.py",
            "(State.DEAD,))\n    push_rows(rows, using)",
            "(State.DEAD,))",
        ),
        (
            "a finished change runs again",
            "operations/replan.py",
            "if change.finished_at is not None or policy is None:",
            "if policy is None:",
        ),
        (
            "rows scheduled after a change are moved",
            "operations/replan.py",
            "filter(pk__gt=change.place, pk__lte=change.last_place)",
            "filter(pk__gt=change.place)",
        ),
        (
            "a page is moved twice",
            "operations/replan.py",
            "change.place, change.moved = ids[-1], change.moved + moved",
            "change.moved = change.moved + moved",
        ),
        (
            "a retry that waits is brought forward",
            "operations/replan.py",
            "return due_at, run_at_of(row, due_at)",
            "return due_at, due_at",
        ),
        (
            "what is resumed waits for its next check",
            "operations/replan.py",
            "        claiming.free([row_id for row_id, _, _ in chunk], using)\n",
            "",
        ),
        (
            "what is stopped can be fired by hand",
            "operations/timeouts.py",
            "return Refusal.POLICY_STOPPED if policy.label in context.stopped else None",
            "return None",
        ),
        (
            "what is dead is retried beside a newer round",
            "operations/timeouts.py",
            "if slots & context.slots or slot_is_taken(row, policy.labels, context.using):",
            "if False:",
        ),
        (
            "postponing makes deadlines earlier",
            "operations/timeouts.py",
            "if _postponed(given, row, context.now) > row.due_at else Refusal.NOT_LATER",
            "if True else Refusal.NOT_LATER",
        ),
        (
            "a dry run writes",
            "operations/runner.py",
            "        if not dry_run:\n            action.write(",
            "        if True:\n            action.write(",
        ),
        (
            "anybody may do it without a name",
            "operations/runner.py",
            "if not isinstance(by, str) or not by.strip():",
            "if not isinstance(by, str):",
        ),
        (
            "a stop that was read is never read again",
            "ledger/controls.py",
            "CACHE_SECONDS: Final = 1.0",
            "CACHE_SECONDS: Final = 3600.0",
        ),
    ),
]
