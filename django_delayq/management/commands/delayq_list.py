"""`manage.py delayq_list`: list timeouts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.contrib.contenttypes.models import ContentType
from django.core.management.base import CommandParser
from django.db import router

from django_delayq.ledger.search import labels_in
from django_delayq.logs import one_line
from django_delayq.management.operating import ReportCommand
from django_delayq.management.options import Selection, add_selection, number
from django_delayq.management.output import Painted, local
from django_delayq.models import Timeout
from django_delayq.monitoring.snapshot import obstacles
from django_delayq.operations.selection import is_key_in, names_of
from django_delayq.policy.policies import registry
from django_delayq.times import clock

State = Timeout.State
COLUMNS = (
    *("id", "policy", "object_id", "key", "queue", "state", "cause", "due_at", "run_at", "step", "since_at"),
    *("first_due_at", "extensions", "attempts", "reason", "payload", "created_at", "settled_at", "erased_at"),
    "idempotency_key",
    *("remaining", "held_at", "held_until", "held_by_hand", "keeps_deadline", "is_computed"),
)
"""Of JSON, beside `failing`, `last_error` and `model`. The history has a command of its own."""
ALWAYS = {"id", "policy", "object", "state", "due"}
"""The columns of the table that are shown also without values."""


class Command(ReportCommand):
    """Lists timeouts by the time of their next attempt; settled ones by that of the last.

    A column without values is omitted. `next attempt` is shown before a timeout is settled, if it differs from the
    deadline. `next step` is empty if the handler is next. `set by` shows which deadlines were set by hand, and do not
    follow their policy. `name` is what people call the object: the first field in `search` of its policies, or what its
    `__str__` returns. JSON has all columns of the ledger but the history, which delayq_explain shows.

    Examples:
      manage.py delayq_list --policy shop.order.cancel_unpaid --due-before 1h
      manage.py delayq_list --model shop.order --object 1234
      manage.py delayq_list --failing
      manage.py delayq_list --state dead --limit 200
      manage.py delayq_list --id 17 --json
    """

    def add_arguments(self, parser: CommandParser) -> None:
        add_selection(parser, tuple(Timeout.State.values), default=("pending", "held", "firing"))
        parser.set_defaults(all=True)  # needs no restriction: it reads at most as many rows as the limit
        words = "only pending ones of which an attempt has failed, and which are tried again"
        parser.add_argument("--failing", action="store_true", help=words)
        parser.add_argument("--limit", default=50, metavar="N", help="at most this many (default: 50)")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        limit = number("--limit", options["limit"], 1)
        deferred = ("history",) if options["json"] else ("history", "payload")
        selected = Selection.of(options)
        if options["failing"]:
            # Label by label, because `delayq_failing` begins with it.
            labels = selected.labels or labels_in(Timeout.objects.using(selected.rows.db))
            selected = replace(selected, rows=selected.rows.failing(), states=[State.PENDING], labels=labels)
        found = selected.first(limit + 1, deferred)
        rows = found[:limit]
        failing = Timeout.objects.using(selected.rows.db).filter(pk__in=[row.pk for row in rows if row.is_failing])
        errors = {row.pk: row.last_error for row in failing.only("history")}
        if options["json"]:
            self.print(_values(rows, errors), (), options)
        elif rows:
            names = names_of(rows, router.db_for_write(Timeout))
            shown = [self._shown(row, names.get((row.content_type_id, row.object_id), ""), errors) for row in rows]
            filled = [name for name in shown[0] if name in ALWAYS or any(row[name] for row in shown)]
            self.print((), self.table(filled, [[row[name] for name in filled] for row in shown]), options)
            for each in obstacles(selected.rows.db, {row.policy for row in rows if row.is_waiting}, ()):
                if each.policy:
                    self.stdout.write(one_line(f"{each.policy} fires nothing now: {each.english()}"))
        else:
            self.stdout.write("No timeouts.")
        if len(found) > limit:
            more = f"... and more: raise --limit, now {limit}, or select fewer"
            (self.stderr if options["json"] else self.stdout).write(more)

    def _shown(self, row: Timeout, name: str, errors: dict[int, str]) -> dict[str, object]:
        style, warning = self.style, self.style.WARNING
        paint = {"dead": style.ERROR, "firing": warning, "fired": style.SUCCESS, "pending, failing": warning}
        state = "pending, failing" if row.is_failing else "paused" if row.is_paused else row.state
        is_overdue = row.state == State.PENDING and row.run_at < clock.now()
        is_moved = not row.is_settled and row.state != State.HELD and row.run_at != row.due_at
        return {
            "id": row.pk,
            "policy": row.policy,
            "object": row.object_id,
            "name": "" if is_key_in(name, row.object_id) else name,
            "key": row.key,
            "state": Painted(state, paint.get(state, str)),
            "due": Painted(local(row.due_at), warning if is_overdue else str),
            "set by": "hand" if _is_set_by_hand(row) else "",
            "next attempt": local(row.run_at) if is_moved else "",
            "next step": "" if row.is_settled else row.step,
            "attempts": row.attempts or "",
            "last error": errors.get(row.pk, ""),
            "reason": row.reason,
        }


def _is_set_by_hand(row: Timeout) -> bool:
    """Return whether the deadline of a waiting row was set by hand, although its policy computes deadlines."""
    policy = registry.get(row.policy)
    return row.is_waiting and not row.is_computed and policy is not None and policy.after is not None


def _values(rows: Sequence[Timeout], errors: dict[int, str]) -> list[dict[str, Any]]:
    """Return all public columns of `rows` but the history; `model` is None if it no longer exists."""
    kinds = ContentType.objects.using(router.db_for_write(Timeout)).in_bulk({row.content_type_id for row in rows})
    models = {pk: f"{kind.app_label}.{kind.model}" for pk, kind in kinds.items()}
    return [
        {name: getattr(row, name) for name in COLUMNS}
        | {"failing": row.is_failing, "last_error": errors.get(row.pk, ""), "model": models.get(row.content_type_id)}
        for row in rows
    ]
