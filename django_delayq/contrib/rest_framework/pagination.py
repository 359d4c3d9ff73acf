"""Pages by the place of their last row: as quick on the last page as on the first, and nothing is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from rest_framework.exceptions import ValidationError
from rest_framework.pagination import BasePagination
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param

from django_delayq import clock
from django_delayq.ledger import search
from django_delayq.ledger.search import Cursor, Order

if TYPE_CHECKING:
    from rest_framework.request import Request
    from rest_framework.views import APIView

    from django_delayq.models import Timeout, TimeoutQuerySet


class KeysetPagination(BasePagination):
    """`?cursor=` goes on behind the last row of a page, `?page_size=` says how many; `next` is the way on."""

    page_size = 50
    max_page_size = 500

    def paginate_queryset(self, queryset: Any, request: Request, view: APIView | None = None) -> list[Any]:
        """The next rows of `queryset`, which is ordered by an index that ends with `id`."""
        return self.page_of(queryset, Q(), request)

    def page_of(self, rows: TimeoutQuerySet, narrow: Q, request: Request) -> list[Timeout]:
        """The next of `rows` that `narrow` fits.

        `rows` are found by an index in its order. What `narrow` asks for, no index knows: so a page looks at no
        more than `search.MAX_EXAMINED` rows, and may be short, or empty, although there is a `next`.

        Raises:
            ValidationError: the cursor is of another list, or none at all; or the size is no number.
        """
        self.request, start, size = request, None, self._size(request)
        if text := request.query_params.get("cursor"):
            try:
                start = Cursor.decode(text, Order.of(rows))
            except ValueError as error:
                raise ValidationError({"cursor": [_("This is no cursor of this list.")]}) from error
        found, self.following = search.page(rows, narrow, start, size)
        return found

    def _size(self, request: Request) -> int:
        text = request.query_params.get("page_size")
        if not text:
            return self.page_size
        if not text.isascii() or not text.isdigit() or len(text) > 6 or not int(text):
            raise ValidationError({"page_size": [_("A number from 1 on.")]})
        return min(int(text), self.max_page_size)

    def get_next_link(self) -> str | None:
        """The address of the next page; None: this was the last."""
        if self.following is None:
            return None
        url = self.request.build_absolute_uri()
        return replace_query_param(url, "cursor", self.following.encode())

    def get_paginated_response(self, data: Any) -> Response:
        return Response({"server_time": clock.now(), "next": self.get_next_link(), "results": data})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        """How a page looks, for OpenAPI."""
        return {
            "type": "object",
            "required": ["server_time", "next", "results"],
            "properties": {
                "server_time": {"type": "string", "format": "date-time"},
                "next": {"type": "string", "format": "uri", "nullable": True},
                "results": schema,
            },
        }

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        """The query's parameters, for OpenAPI."""
        return [
            {
                "name": "cursor",
                "in": "query",
                "required": False,
                "description": "Where the page begins: as `next` of the page before has it.",
                "schema": {"type": "string"},
            },
            {
                "name": "page_size",
                "in": "query",
                "required": False,
                "description": f"How many; {self.page_size} by default, {self.max_page_size} at most.",
                "schema": {"type": "integer", "minimum": 1, "maximum": 999999},
            },
        ]
