"""The list of timeouts: it reads a bounded part of the ledger, a *window*, however long the ledger is.

A window is `WINDOW` rows in the order of one index (a `Scan`). The narrowest scan that fits into one window is used,
and the other filters then choose among the ids of the window. So no combination of filters reads the table, and none
depends on the planner. The next window is a link away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList, ChangeListSearchForm
from django.contrib.contenttypes.models import ContentType
from django.core.paginator import InvalidPage, Paginator
from django.db import transaction
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_delayq.admin import filters, render
from django_delayq.arming.holding import Facts
from django_delayq.ledger import search
from django_delayq.ledger.locking import with_keys
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import model_and_pk_of, subject_of
from django_delayq.models import Timeout
from django_delayq.operations import selection
from django_delayq.policy.policies import get_policies
from django_delayq.scheduling.story import condition_values
from django_delayq.sql.key_types import object_id_of
from django_delayq.sql.statements import CHUNK
from django_delayq.times.paths import field_at

WINDOW: Final = 2_500
"""Its ids are parameters of the queries of the page, which take a fraction of a second with so many."""
FURTHER: Final = "further"
ORDER: Final = "order"
"""The parameter by which the rows that have used most of their time come first: `order=used`."""
ORDER_TEXTS: Final = {
    search.NEWEST: gettext_lazy("Newest first."),
    search.SOONEST: gettext_lazy("Ordered by next attempt, soonest first."),
    search.LATEST: gettext_lazy("Ordered by next attempt, latest first."),
    search.LAST_SETTLED: gettext_lazy("Last settled first."),
    search.BY_DEADLINE: gettext_lazy("Ordered by deadline."),
}
URGENT_TEXT: Final = gettext_lazy("Overdue and failing ones first, then the newest.")


def address(site: AdminSite, page: str, *args: Any) -> str:
    """Return the address of a page of this library, such as `timeout_changelist`; empty: `site` does not have it."""
    try:
        return reverse(f"{site.name}:django_delayq_{page}", args=args)
    except NoReverseMatch:
        return ""


def visible_rows(request: HttpRequest, site: AdminSite) -> Any:
    """Return the rows that `site` shows to the visitor: a project may hide some by `get_queryset()` of its admin."""
    model_admin = site._registry.get(Timeout)
    return Timeout.objects.all() if model_admin is None else model_admin.get_queryset(request)


def column(description: Any, shown: Callable[[Any], str]) -> Any:
    """Return the method of an admin that shows a column or field as `shown(row)`."""
    return admin.display(description=description)(lambda _admin, row: shown(row))


class ReadOnlyAdmin:
    """Options of an admin in which no row is added, changed or deleted by a form."""

    class Media:
        css = {"all": ("django_delayq/admin.css",)}
        js = ("django_delayq/admin.js",)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission


@dataclass(frozen=True, slots=True)
class Window:
    """The rows that one page chooses from."""

    ids: Sequence[int]
    further: str = ""
    """Where the next window begins; empty: there is none."""
    limit_per_part: int = 0
    """How many rows of each part were read, if those were not all of them."""

    @property
    def is_whole(self) -> bool:
        return not self.further and not self.limit_per_part


def read_window(scan: filters.Scan, start: str = "") -> Window:
    """Read the ids of the next `WINDOW` rows of `scan` after `start`, the `further` of an earlier window."""
    if scan.parts:
        most = WINDOW // len(scan.parts)
        found = [list(part.values_list("id", flat=True)[: most + 1]) for part in scan.parts]
        ids = sorted((pk for part in found for pk in part[:most]), reverse=True)
        return Window(ids, limit_per_part=most if any(len(part) > most for part in found) else 0)
    order = search.Order.of(scan.rows)
    try:
        cursor = search.Cursor.decode(start, order) if start else None
    except ValueError as error:
        raise IncorrectLookupParameters(error) from error
    rows, end = search.page(scan.rows.values_list(*order.columns, named=True), Q(), cursor, WINDOW)
    return Window([row.id for row in rows], end.encode() if end else "")


class LedgerAdmin(ReadOnlyAdmin, admin.ModelAdmin):  # type: ignore[type-arg]
    """An admin of a table of this library: newest first."""

    ordering = ("-id",)
    sortable_by = ()
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they would count the table for each choice of each filter

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows from the writer, since a replica may be behind."""
        return super().get_queryset(request).using(database_of(Timeout))

    def operating(self, page: type[Any]) -> Any:
        """Return the view of a page of operations.

        Each page of rows is a transaction of its own, with its log, so there must be none around the request.
        """
        return transaction.non_atomic_requests(self.admin_site.admin_view(page.as_view(site=self.admin_site)))


class OwnFiltersChangeList(ChangeList):
    """A change list that filters by the parameters of its own filters only.

    Django accepts look-ups of each column: one asks for what no page shows, others end in errors of the database, and
    a regular expression occupies SQLite for minutes.
    """

    def get_filters(self, request: HttpRequest) -> Any:
        """Return the filters of the address. Raises IncorrectLookupParameters for a parameter of no filter."""
        found = super().get_filters(request)
        if foreign := set(found[2]) - set(filters.DEADLINE):  # those of the date hierarchy are read before as a period
            raise IncorrectLookupParameters(f"No filter has {', '.join(sorted(foreign))}.")
        return found


class ExactSearchForm(ChangeListSearchForm):
    """A search for the text as it was typed: without its blanks it may be the key of another object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields[SEARCH_VAR].strip = False  # type: ignore[attr-defined]


class LedgerChangeList(OwnFiltersChangeList):
    """A change list that reads one window of the ledger."""

    order: search.Order
    window: Window
    urgent: Sequence[int] = ()
    """The ids of rows that come first, if nothing else is asked for."""
    search_form_class = ExactSearchForm

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(request, *args, **kwargs)
        fields = (field_at(model, path) for model, path in selection.searched_fields(request.user))
        names = dict.fromkeys(f"{field.model._meta.verbose_name} {field.verbose_name}" for field in fields)
        text = _("Enter a complete object id, key or {fields}.") if names else _("Enter a complete object id or key.")
        help_text = self.search_help_text or text.format(fields=", ".join(names))
        self.search_help_text = format_html('<span dir="auto">{}</span>', help_text)
        if about := self.params.get(filters.RELATED) or self.params.get(filters.OBJECT):
            self.title = _("Timeouts of {object}").format(object=filters.object_label(about, request.user))

    def get_filters_params(self, params: Any = None) -> Any:
        """Return the filters of the address; the start of the window is not one of them."""
        found = super().get_filters_params(params)
        return {name: value for name, value in found.items() if name not in {FURTHER, ORDER}}

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return the order of the index that is read: any other would sort the table."""
        return self.order.fields

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Choose the window, and return its rows that match all filters."""
        asked = set(self.get_filters_params())
        if any("\0" in str(self.params.get(name)) for name in asked - {filters.OBJECT, filters.RELATED}):
            raise IncorrectLookupParameters("A parameter contains a NUL, which PostgreSQL refuses.")
        if self.query:
            for params in (self.params, self.filter_params):  # search forms send all parameters of the page
                params.pop(FURTHER, None)
            ids = selection.find_ids(self.root_queryset, self.query, request.user)
            self.order, self.window = search.NEWEST, Window(ids)
        else:
            start = self.params.get(FURTHER, "")
            scans = filters.scans(self.params, self.root_queryset)[-1 if start else 0 :]
            for scan in scans:
                self.window = read_window(scan, start)
                if self.window.is_whole:
                    break
            # A whole window may be sorted: by the order of the last scan, which is the expected one.
            self.order = search.Order.of(scans[-1].rows if self.window.is_whole else scan.rows)
            self.urgent = [] if asked or start else filters.urgent(self.root_queryset)
        request.delayq_ids = self.window.ids  # type: ignore[attr-defined] # for `ErrorFilter`
        try:
            rows = super().get_queryset(request, exclude_parameters)
        except OverflowError as error:  # a year that Django passes on to Python
            raise IncorrectLookupParameters(error) from error
        return with_keys(rows, [*self.urgent, *self.window.ids])

    def get_results(self, request: HttpRequest) -> None:
        """Read the ids of all rows that match, at most those of the window, and the rows of one page by their ids."""
        self.most_used = CHUNK if self.params.get(ORDER) == "used" else 0  # how many rows are in this order
        ids = list(dict.fromkeys([*self.urgent, *self.queryset.values_list("pk", flat=True)]))
        ids = selection.most_used_first(ids, self.most_used)
        self.paginator = Paginator(ids, self.list_per_page)
        try:
            shown = self.paginator.page(self.page_num).object_list
        except InvalidPage as error:
            raise IncorrectLookupParameters from error
        rows = self.root_queryset.filter(pk__in=shown).defer("history", "payload")  # which may be large
        self.result_list = sorted(named(rows, request.user), key=lambda row: shown.index(row.pk))
        self.result_count = len(ids)
        # None: the page offers a link to all rows.
        self.full_result_count = None if self.query or self.get_filters_params() else self.result_count
        self.show_full_result_count, self.show_admin_actions = False, True
        self.can_show_all, self.multi_page = False, self.paginator.num_pages > 1
        # For the template: the address of the next window (empty: this is the last one), and that of the first.
        self.further = self.get_query_string({FURTHER: self.window.further}) if self.window.further else ""
        self.from_the_start = self.get_query_string({}, [FURTHER])
        self.order_text = URGENT_TEXT if self.urgent else ORDER_TEXTS[self.order]
        self.other_order = self.get_query_string({ORDER: None if self.most_used else "used", PAGE_VAR: None})
        self.soonest_first = ""  # the address of the rows that are due next, where the list begins with the newest
        if self.order == search.NEWEST and not self.query and not {filters.DUE, filters.STATE} & set(self.params):
            self.soonest_first = self.get_query_string({filters.DUE: "waiting"})
        # Blanks that were pasted with a number look like a number that does not exist.
        self.without_blanks = self.get_query_string({SEARCH_VAR: self.query.strip()})
        self.has_blanks = self.query != self.query.strip()
        self.is_search_capped = bool(self.query) and len(self.window.ids) >= selection.MAX_HITS

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Return an address of this list. Another page stays in the window; another filter starts from the first."""
        stays = new_params is not None and set(new_params) <= {PAGE_VAR, FURTHER}
        return super().get_query_string(new_params, remove if stays else [*(remove or []), FURTHER])


def named(rows: QuerySet[Any] | Iterable[Timeout], user: Any) -> list[Timeout]:
    """Read `rows`, and give each the name of its object, its last error, and how much of its time it has used.

    With a few queries for each model, whatever their number.
    """
    found, using = list[Any](rows), database_of(Timeout)
    names, facts = selection.names_of(found, using, user), Facts(found, using, locks=False)
    failing = Timeout.objects.using(using).filter(pk__in=[row.pk for row in found if row.is_failing])
    errors = {row.pk: row.last_error for row in failing.only("history")}
    for row in found:
        row.delayq_name = names.get((row.content_type_id, row.object_id), "")
        row.delayq_error = errors.get(row.pk, "")
        row.delayq_progress = facts.progress(row)
    return found


def object_column(request: HttpRequest, site: AdminSite) -> Callable[[Timeout], str]:
    """Return the column of objects for one visitor, by name and id. `named` reads the names of many rows together.

    It is a link if the object's model has an admin that the visitor may view. Whether the object still exists is not
    checked. If the content type is gone, only the id is shown.
    """

    @cache  # Django caches existing content types only
    def kind_of(row_kind: int, using: str) -> tuple[ContentType | None, bool]:
        try:
            kind = ContentType.objects.db_manager(using).get_for_id(row_kind)
        except ContentType.DoesNotExist:
            return None, False
        model_admin = site._registry.get(kind.model_class())  # type: ignore[arg-type]
        return kind, model_admin is not None and model_admin.has_view_or_change_permission(request)

    @admin.display(description=gettext_lazy("object"))
    def object_shown(row: Timeout) -> str:
        kind, is_visible = kind_of(row.content_type_id, row._state.db or "default")
        if kind is None:
            return _("unknown content type, {id}").format(id=row.object_id)
        if not hasattr(row, "delayq_name"):
            named([row], request.user)
        name = row.delayq_name  # type: ignore[attr-defined]
        shown = format_html("<bdi>{}</bdi>", render.titled(kind.name, row.object_id, name))
        if is_visible:
            with suppress(NoReverseMatch):
                page = f"{site.name}:{kind.app_label}_{kind.model}_change"
                shown = format_html('<a href="{}">{}</a>', reverse(page, args=[quote(row.object_id)]), shown)
        if not name or selection.is_key_in(name, row.object_id):
            return shown
        return format_html('{} <bdi class="delayq-more">(ID&nbsp;{})</bdi>', shown, row.object_id)

    return object_shown


def story_column(request: HttpRequest) -> Callable[[Timeout], str]:
    """Return the field with the story of a row, with values of the object only for visitors who may view it."""

    @admin.display(description=gettext_lazy("what happened"))
    def story(row: Timeout) -> str:
        subject, values = subject_of(row, None), ""
        is_over = row.cause == Timeout.Cause.CONDITION
        if is_over and subject.model is not None and selection.may_view(request.user, subject.model):
            values = condition_values(subject)
        return render.story(row, values)

    return story


def related_column(request: HttpRequest, site: AdminSite) -> Callable[[Timeout], str]:
    """Return the field with the links to all timeouts of the object, and of its owners, for one visitor."""

    @admin.display(description=gettext_lazy("see also"))
    def related(row: Timeout) -> str:
        model, pk = model_and_pk_of(row, database_of(Timeout))
        links = [] if model is None else related_links(request, site, model, pk)
        return format_html_join(", ", '<a href="{address}">{label}</a>', links) or "-"

    return related


def related_links(request: HttpRequest, site: AdminSite, model: type[Model], pk: Any) -> list[dict[str, str]]:
    """Return labels and addresses of the lists of all timeouts of an object, and of each owner of it.

    An owner is left out if the visitor may not view its model. If timeouts are not in this admin, there are no lists.
    """
    listed = address(site, "timeout_changelist")
    if not listed:
        return []
    own = cast("type[Model]", model._meta.concrete_model)
    is_related = selection.is_related(own) and selection.may_view(request.user, own)
    named = [(filters.RELATED if is_related else filters.OBJECT, own, pk)]
    owners = selection.owners_of(own, pk, database_of(own))
    named += [(filters.RELATED, owner, key) for owner, key in owners if selection.may_view(request.user, owner)]
    found = []
    for parameter, kind, key in named:
        value = f"{kind._meta.label_lower}:{object_id_of(kind, key)}"
        label = _("All timeouts of this object")
        if parameter == filters.RELATED and not (kind is own and get_policies(own)):
            label = _("All timeouts of {object}").format(object=filters.object_label(value, request.user))
        found.append({"label": label, "address": f"{listed}?{urlencode({parameter: value})}"})
    return found
