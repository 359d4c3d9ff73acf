"""Whom a row is about, as a link, without loading a single object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib.admin.utils import quote
from django.contrib.contenttypes.models import ContentType
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

if TYPE_CHECKING:
    from django.contrib.admin import AdminSite
    from django.http import HttpRequest

    from django_delayq.models import Timeout


class ObjectColumn:
    """Renders the objects of one page's rows for one visitor: one query for all kinds, none for any object.

    The link is there where the object's model has an admin that the visitor may look at. An object that is gone
    is not noticed here: its page says so. A kind that is gone leaves the bare id.
    """

    __name__ = "object_shown"
    short_description = gettext_lazy("object")

    def __init__(self, request: HttpRequest, site: AdminSite) -> None:
        self.request, self.site = request, site
        self._kinds: dict[int, ContentType] | None = None
        self._visible: dict[int, bool] = {}

    def __call__(self, row: Timeout) -> str:
        kind = self._kind(row)
        if kind is None:
            return _("unknown kind, {id}").format(id=row.object_id)
        words = f"{kind.name} {row.object_id}"
        address = self._address(kind, row.object_id)
        return format_html('<a href="{}">{}</a>', address, words) if address else words

    def _kind(self, row: Timeout) -> ContentType | None:
        if self._kinds is None:
            database = row._state.db or "default"
            self._kinds = {kind.pk: kind for kind in ContentType.objects.using(database)}
        return self._kinds.get(row.content_type_id)

    def _address(self, kind: ContentType, object_id: str) -> str:
        if kind.pk not in self._visible:
            model = kind.model_class()
            shown = self.site._registry.get(model) if model else None
            self._visible[kind.pk] = shown is not None and shown.has_view_or_change_permission(self.request)
        if not self._visible[kind.pk]:
            return ""
        name = f"{self.site.name}:{kind.app_label}_{kind.model}_change"
        try:
            return reverse(name, args=[quote(object_id)], current_app=self.site.name)
        except NoReverseMatch:
            return ""
