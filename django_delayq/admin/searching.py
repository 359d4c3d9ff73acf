"""Search by object id and by key, each in its own index; both capped, so that a popular word costs no more."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from django_delayq.key_types import object_id_of, pk_of
from django_delayq.ledger.subjects import model_of_kind

if TYPE_CHECKING:
    from django.db.models import QuerySet

MOST_FOUND: Final = 1_000
MOST_KINDS: Final = 200


def found_ids(rows: QuerySet[Any], words: str) -> list[int]:
    """The ids of the newest rows whose object id or key is what was searched for."""
    term = words.strip()
    if not term or "\0" in term:
        return []
    kinds = kinds_in(rows)
    by_object = rows.filter(content_type__in=kinds, object_id__in=_spellings(term, kinds, rows.db)).order_by("-id")
    by_key = rows.of_key(term).order_by("-id")  # type: ignore[attr-defined]
    hits = {pk for found in (by_object, by_key) for pk in found.values_list("pk", flat=True)[:MOST_FOUND]}
    return sorted(hits, reverse=True)


def kinds_in(rows: QuerySet[Any]) -> list[int]:
    """The content types that rows have, by one probe of the index each: also those that exist no more."""
    found: list[int] = []
    kinds = rows.order_by("content_type_id", "object_id").values_list("content_type_id", flat=True)
    while len(found) < MOST_KINDS:
        after = kinds.filter(content_type_id__gt=found[-1]) if found else kinds
        kind = after.first()
        if kind is None:
            break
        found.append(kind)
    return found


def _spellings(term: str, kinds: list[int], using: str) -> set[str]:
    """As it was typed, and as the ledger writes it for each kind of object: a UUID with dashes, 1.5 as 1.50."""
    found = {term}
    for kind in kinds:
        model = model_of_kind(kind, using)
        if model is not None:
            with suppress(ValueError):
                found.add(object_id_of(model, pk_of(model, term)))
    return found
