"""`manage.py delayq_list`: list timeouts."""

from typing import Any

from django.core.management.base import CommandParser

from django_delayq import clock
from django_delayq.management.operating import ReportCommand
from django_delayq.management.options import Selection, add_selection, number
from django_delayq.management.output import Painted, local
from django_delayq.models import Timeout

State = Timeout.State
COLUMNS = ("id", "policy", "object_id", "key", "state", "due_at", "run_at", "attempts", "reason")
SHOWN = ("id", "policy", "object", "key", "state", "due", "next attempt", "attempts", "reason")
ALWAYS = {"id", "policy", "object", "state", "due"}


class Command(ReportCommand):
    """Lists timeouts by the time of their next attempt; settled ones by that of the last.

    A column without values is omitted. `next attempt` is shown where it differs from the deadline.
    """

    help = __doc__
    examples = (
        "--policy shop.order.cancel_unpaid --due-before 1h",
        "--model shop.order --object 1234",
        "--state dead --limit 200",
        "--id 17 --json",
    )

    def add_arguments(self, parser: CommandParser) -> None:
        add_selection(parser, tuple(Timeout.State.values), default=("pending", "firing"))
        parser.set_defaults(all=True)  # needs no restriction: it reads at most as many rows as the limit
        parser.add_argument("--limit", default=50, metavar="N", help="at most this many (default: 50)")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        limit = number("--limit", options["limit"])
        found = Selection.of(options).first(limit + 1)
        rows = [{name: getattr(row, name) for name in COLUMNS} for row in found[:limit]]
        shown = [self._shown(row) for row in found[:limit]]
        filled = [name for name in SHOWN if name in ALWAYS or any(row[name] for row in shown)]
        lines = self.table(filled, [[row[name] for name in filled] for row in shown])
        more = [f"... and more: raise --limit, now {limit}, or select fewer"] if len(found) > limit else []
        self.print(rows, lines + more, options)

    def _shown(self, row: Timeout) -> dict[str, object]:
        style = self.style
        paint = {State.DEAD: style.ERROR, State.FIRING: style.WARNING, State.FIRED: style.SUCCESS}
        is_overdue = row.state == State.PENDING and row.run_at < clock.now()
        due = Painted(local(row.due_at), style.WARNING if is_overdue else str)
        again = local(row.run_at) if row.run_at != row.due_at else ""
        cells = (
            row.pk,
            row.policy,
            row.object_id,
            row.key,
            Painted(row.state, paint.get(State(row.state), str)),
            due,
            again,
        )
        return dict(zip(SHOWN, (*cells, row.attempts or "", row.reason), strict=True))
