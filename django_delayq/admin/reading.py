"""How the list reads a ledger of any length: never more than a window of it for one page.

A window is `WINDOW` rows in the order of one index. What narrows the list most decides which index that is; the other
filters then choose among the ids of the window. So no combination of filters reads the table, and none depends on what
the planner makes of it. What lies beyond the window is a link away: *look further*.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from django.contrib.admin.options import IncorrectLookupParameters
from django.core.paginator import Page, Paginator
from django.db.models import Q
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.db.models import QuerySet
    from django_stubs_ext import StrPromise

    _Paginator = Paginator[Any]
else:
    _Paginator = Paginator

WINDOW: Final = 2_500


@dataclass(frozen=True, slots=True)
class Order:
    """An order in which an index gives the rows."""

    column: str
    descending: bool
    words: StrPromise

    @property
    def fields(self) -> list[str]:
        """For `order_by`; ids break ties, as in the index."""
        sign = "-" if self.descending else ""
        return list(dict.fromkeys([f"{sign}{self.column}", f"{sign}id"]))


NEWEST = Order("id", True, _("Newest first."))
SOONEST = Order("run_at", False, _("What is due soonest comes first."))
LATEST = Order("run_at", True, _("What was due last comes first."))
LATELY = Order("settled_at", True, _("What was settled last comes first."))
BY_DEADLINE = Order("due_at", False, _("Ordered by deadline."))


@dataclass(frozen=True, slots=True)
class Lead:
    """A condition that an index answers in this order."""

    condition: Q
    order: Order
    parameters: frozenset[str] = frozenset()
    """What in an address it answers in full: nothing of that is left to be filtered."""
    parts: tuple[Q, ...] = ()
    """Given where the index has this order only within each of them: then some of each are read."""


@dataclass(frozen=True, slots=True)
class Window:
    """The rows that one page chooses from."""

    ids: Sequence[int]
    further: str
    """Where the next window begins; empty: there is none."""
    of_each: int = 0
    """How many rows of each part were read, if that were not all of them."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing lies beyond it."""
        return not self.further and not self.of_each


def choose(rows: QuerySet[Any], leads: Sequence[Lead], start: str) -> tuple[Lead, Window]:
    """The window of the first lead that fits into one; of the last one if none does.

    Raises:
        IncorrectLookupParameters: `start` is not what an earlier window gave as `further`.
    """
    if not start:
        for lead in leads[:-1]:
            found = read(rows, lead, "")
            if found.is_whole:
                return lead, found
    return leads[-1], read(rows, leads[-1], start)


def read(rows: QuerySet[Any], lead: Lead, start: str) -> Window:
    """The ids of the next `WINDOW` rows of this lead after `start`."""
    if lead.parts:
        return _read_parts(rows, lead)
    column = lead.order.column
    wanted = rows.filter(lead.condition).order_by(*lead.order.fields)
    if start:
        wanted = wanted.filter(_behind(lead.order, start))
    found = list(wanted.values_list("id", column)[: WINDOW + 1])
    ids = [pk for pk, _value in found[:WINDOW]]
    if len(found) <= WINDOW:
        return Window(ids, "")
    last, value = found[WINDOW - 1]
    return Window(ids, str(last) if column == "id" else f"{value.isoformat()}_{last}")


def _read_parts(rows: QuerySet[Any], lead: Lead) -> Window:
    """The first ids of each part, in the order of the list."""
    most = WINDOW // len(lead.parts)
    found = [
        list(rows.filter(lead.condition & part).order_by("-run_at", "-id").values_list("id", flat=True)[: most + 1])
        for part in lead.parts
    ]
    ids = sorted((pk for part in found for pk in part[:most]), reverse=True)
    return Window(ids, "", of_each=most if any(len(part) > most for part in found) else 0)


def _behind(order: Order, start: str) -> Q:
    """What comes after the row that `start` names. Of many rows at one moment none is passed over."""
    text, _sign, last = start.rpartition("_")
    try:
        pk = int(last)
        if order.column == "id":
            return Q(id__lt=pk)
        value = datetime.fromisoformat(text)
    except ValueError as error:
        raise IncorrectLookupParameters(error) from error
    if timezone.is_aware(value) != timezone.is_aware(timezone.now()):
        raise IncorrectLookupParameters(start)
    here, beyond, after = ("lte", "lt", "lt") if order.descending else ("gte", "gt", "gt")
    # The first part lets every database begin at the right place in its index.
    return Q(**{f"{order.column}__{here}": value}) & (
        Q(**{f"{order.column}__{beyond}": value}) | Q(**{order.column: value, f"id__{after}": pk})
    )


class WindowPaginator(_Paginator):
    """Pages of the rows that a queryset has among a window's ids: no COUNT(*), and each page read by its ids."""

    ids_known: Sequence[int] | None = None
    """The keys of all rows, in order, if the window has been read so already."""

    @cached_property
    def ids(self) -> Sequence[int]:
        """The keys of all rows, in order."""
        rows: Any = self.object_list
        return self.ids_known if self.ids_known is not None else list(rows.values_list("pk", flat=True)[:WINDOW])

    @cached_property
    def count(self) -> int:
        """The number of rows in the window."""
        return len(self.ids)

    def page(self, number: int | str) -> Page[Any]:
        """The rows of one page. Raises InvalidPage."""
        place = self.validate_number(number)
        bottom = (place - 1) * self.per_page
        rows: Any = self.object_list
        wanted = self.ids[bottom : bottom + self.per_page]
        kept = rows.model._default_manager.using(rows.db).filter(pk__in=wanted).order_by(*rows.query.order_by)
        kept.query.deferred_loading = rows.query.deferred_loading
        return Page(kept, place, self)
