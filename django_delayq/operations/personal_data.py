"""What the ledger has about a person: `export` returns it, and `erase` empties it.

`related_timeouts(customer, settled=True)` selects the timeouts of the person. The rows stay when their data is erased:
they close the rounds of their objects, and count in statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Unpack

from django.contrib.contenttypes.models import ContentType
from django.db.models import Q

from django_delayq.ledger import writing
from django_delayq.ledger.error_texts import empty_copies
from django_delayq.ledger.paging import Page, each_page
from django_delayq.ledger.shares import forget_shares
from django_delayq.models import StoredAnswer, Timeout
from django_delayq.operations.runner import Action, Context, How, Refusal, Result, Target
from django_delayq.rounds.memory import iso
from django_delayq.signals import timeouts_erasing

_READ_OTHERWISE = frozenset(("id", "content_type_id", "payload"))


def erase(target: Target, **how: Unpack[How]) -> Result:
    """Empty what settled timeouts have of a person: payload, key, reasons, messages and tracebacks of errors.

    Stored answers of REST and messages of webhooks, which show the row, are emptied, too. Receivers of
    `timeouts_erasing` empty the copies of other apps.
    The row stays with its object id, states, times and causes. Its history keeps what happened, when, who did it and
    the types of errors. A key is replaced by `(erased)`. The slot, a digest of the key, stays, so that the round stays
    closed. A handler needs the payload, so an erased timeout cannot be retried or repeated, and those that are not
    settled are refused: cancel them first. A repeated call erases what was added since. Arguments and errors are those
    of `cancel`.

    Args:
        reason: is stored in the history of each row, so it names the request, and not the person.
    """

    def refuse(row: Timeout, context: Context) -> Refusal | None:
        return None if row.is_settled else Refusal.NOT_SETTLED

    def write(rows: list[Timeout], context: Context) -> None:
        forget_shares(rows, context.using)  # whose values the rows have until they are erased
        empty_copies(StoredAnswer.objects.using(context.using), "timeout", rows)
        timeouts_erasing.send(Timeout, timeouts=rows, using=context.using)
        writing.erase(rows, context.using, context.event)

    return Action("erase", None, refuse, write).run(target, **how)


def export(target: Target) -> Iterator[dict[str, Any]]:
    """Yield all that the ledger has of each timeout, page by page: a dict that `json.dumps` accepts.

    It has every column, with times in UTC as ISO strings and durations in seconds; `model` names the kind of object,
    None if it no longer exists. `target` is that of `cancel`.
    """
    kinds = dict[int, str | None]()
    for page in each_page(target, partial(_exported, kinds=kinds), only=Q(), by_id="pk", dry_run=True):
        yield from page


def _exported(page: Page, kinds: dict[int, str | None]) -> list[dict[str, Any]]:
    new = {row.content_type_id for row in page.rows} - set(kinds)
    if new:
        models = ContentType.objects.using(page.using).in_bulk(new)
        kinds |= {pk: f"{kind.app_label}.{kind.model}" if (kind := models.get(pk)) else None for pk in new}
    # Pages that are not locked have none, because nothing else reads them.
    payloads = dict(Timeout.objects.using(page.using).filter(pk__in=page.ids).values_list("pk", "payload"))
    return [_values(row, kinds, payloads.get(row.pk)) for row in sorted(page.rows, key=lambda row: row.pk)]


def _values(row: Timeout, kinds: dict[int, str | None], payload: Any) -> dict[str, Any]:
    first = {"id": row.pk, "policy": row.policy, "model": kinds[row.content_type_id]}
    others = [field.attname for field in Timeout._meta.concrete_fields if field.attname not in _READ_OTHERWISE]
    return {**first, **{name: _json(getattr(row, name)) for name in others}, "payload": payload}


def _json(value: Any) -> Any:
    if isinstance(value, datetime):
        return iso(value)
    return value.total_seconds() if isinstance(value, timedelta) else value
