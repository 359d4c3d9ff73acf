"""The list of timeouts: one window of the ledger, and what lies around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.paginator import InvalidPage

from django_delayq.admin import dates
from django_delayq.admin.filters import leads
from django_delayq.admin.reading import NEWEST, Order, Window, choose
from django_delayq.admin.searching import MOST_FOUND, found_ids

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

FURTHER: Final = "further"


class LedgerChangeList(ChangeList):
    """A list that reads one window of the ledger (`reading.py`), whatever it is asked for."""

    order: Order
    window: Window
    date_range: dates.DateRange | None
    is_all_of_the_window: bool
    """Whether the window's rows are the list's, so that nothing is left to be filtered or sorted."""

    def get_filters_params(self, params: Any = None) -> Any:
        """The filters of the address; where its window begins is none of them, and the dates are our own."""
        found = super().get_filters_params(params)
        for name in (FURTHER, dates.YEAR, dates.MONTH, dates.DAY):
            found.pop(name, None)
        return found

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """The order of the index that the list is read by: any other would sort the table."""
        return self.order.fields

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """The rows of this window that fit all filters."""
        self.order, self.window = self._choose()
        rows = super().get_queryset(request, exclude_parameters).filter(pk__in=self.window.ids)
        return rows.filter(dates.condition(self.date_range))

    def get_results(self, request: HttpRequest) -> None:
        """The rows of one page, read by their ids."""
        paginator = self.model_admin.get_paginator(request, self.queryset, self.list_per_page)
        if self.is_all_of_the_window:
            paginator.ids_known = self.window.ids  # type: ignore[attr-defined]
        try:
            page = paginator.page(self.page_num)
        except InvalidPage as error:
            raise IncorrectLookupParameters from error
        self.result_count = paginator.count
        narrowed = bool(self.query or self.date_range or self.get_filters_params())
        self.full_result_count = None if narrowed else self.result_count  # None: offers the way back to all
        self.show_full_result_count, self.show_admin_actions = False, True
        self.can_show_all, self.multi_page = False, paginator.count > self.list_per_page
        self.result_list, self.paginator = page.object_list, paginator

    def _choose(self) -> tuple[Order, Window]:
        self.date_range = dates.chosen(self.params)
        asked = set(self.get_filters_params()) | ({dates.FIELD} if self.date_range else set())
        if self.query:
            self.is_all_of_the_window = not asked
            return NEWEST, Window(found_ids(self.root_queryset, self.query), "")
        ways = leads(self.params, self.date_range, self.root_queryset)
        lead, window = choose(self.root_queryset, ways, self.params.get(FURTHER, ""))
        # What fits into one window may be sorted: by the order that the last way has, which is the one expected.
        order = ways[-1].order if window.is_whole else lead.order
        self.is_all_of_the_window = order is lead.order and asked <= lead.parameters
        return order, window

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """An address of this list. Another page stays in the window; other filters begin anew."""
        stays = new_params is not None and set(new_params) <= {PAGE_VAR, FURTHER}
        return super().get_query_string(new_params, remove if stays else [*(remove or []), FURTHER])

    @property
    def further(self) -> str:
        """The address of the next window; empty: this was the last one."""
        return self.get_query_string({FURTHER: self.window.further}) if self.window.further else ""

    @property
    def is_further(self) -> bool:
        """Whether this is not the first window."""
        return bool(self.params.get(FURTHER))

    @property
    def from_the_start(self) -> str:
        """The address of the first window."""
        return self.get_query_string({}, [FURTHER])

    @property
    def found_too_much(self) -> int:
        """The number of hits that a search shows at most, if there are that many; else 0."""
        return MOST_FOUND if self.query and len(self.window.ids) >= MOST_FOUND else 0

    @property
    def looked_at(self) -> int:
        """How many rows the window has."""
        return len(self.window.ids)

    @property
    def date_links(self) -> list[dates.DateLink]:
        """The dates to go to."""
        return dates.links(self.root_queryset, self.params, self.get_query_string)
