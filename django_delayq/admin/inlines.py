"""An object's timeouts on its own page: `inlines = [TimeoutInline]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin
from django.contrib.contenttypes.admin import GenericTabularInline
from django.contrib.contenttypes.forms import BaseGenericInlineFormSet
from django.utils.translation import gettext_lazy as _

from django_delayq.admin.about import of_object
from django_delayq.admin.wording import badge, clamped, deadline
from django_delayq.key_types import object_id_of
from django_delayq.models import Timeout
from django_delayq.scheduling.story import told_reason

if TYPE_CHECKING:
    from django.http import HttpRequest

    _FormSet = BaseGenericInlineFormSet[Any, Any]
else:
    _FormSet = BaseGenericInlineFormSet

NEWEST: Final = 10


class NewestTimeouts(_FormSet):
    """The newest rows of one object, for reading.

    Takes nothing of what was sent: the rows may have changed since the page was made, and a payment that came in
    meanwhile must not keep the form of the object itself from being saved.
    """

    shown = NEWEST

    def __init__(self, data: Any = None, files: Any = None, **kwargs: Any) -> None:
        super().__init__(None, None, **kwargs)
        self.new_objects: list[Any] = []
        self.changed_objects: list[Any] = []
        self.deleted_objects: list[Any] = []

    def get_queryset(self) -> Any:
        """The rows, read once."""
        if not hasattr(self, "_queryset"):
            saved = self.instance is not None and self.instance.pk is not None
            rows = of_object(self.instance) if saved else Timeout.objects.none()
            self._queryset = rows.defer("history", "payload").order_by("-id")[: self.shown]
        return self._queryset

    def is_valid(self) -> bool:
        return True

    def save(self, commit: bool = True) -> list[Any]:
        """Nothing is saved here."""
        return []

    @property
    def object_parameter(self) -> str:
        """How the list of all timeouts is told which object is meant."""
        model = self.instance._meta.concrete_model
        return f"{model._meta.label_lower}:{object_id_of(model, self.instance.pk)}"


class TimeoutInline(GenericTabularInline):
    """The newest timeouts of the object that the page is about, with links to their stories. Read-only.

    `shown` of them, 10 by default. Who may not view timeouts does not see it. Timeouts of the object's parents
    (multi-table inheritance) belong to it too.
    """

    model = Timeout
    formset: Any = NewestTimeouts
    template = "admin/django_delayq/timeouts_inline.html"
    shown = NEWEST
    fields = ("policy_name", "key", "state_badge", "deadline_shown", "attempts", "reason_shown")
    readonly_fields = fields
    verbose_name_plural = _("timeouts, the newest first")
    extra = max_num = 0
    can_delete = False
    show_change_link = True

    class Media:
        css = {"all": ("django_delayq/admin.css",)}
        js = ("django_delayq/admin.js",)

    def get_formset(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        made = super().get_formset(request, obj, **kwargs)
        made.shown = self.shown  # type: ignore[attr-defined]
        return made

    @admin.display(description=_("policy"))
    def policy_name(self, row: Timeout) -> str:
        """The policy without the model's name, which the page says already."""
        return row.policy.rpartition(".")[2]

    @admin.display(description=_("state"))
    def state_badge(self, row: Timeout) -> str:
        return badge(row.state)

    @admin.display(description=_("deadline"))
    def deadline_shown(self, row: Timeout) -> str:
        return deadline(row)

    @admin.display(description=_("reason"))
    def reason_shown(self, row: Timeout) -> str:
        return clamped(told_reason(row.reason)) if row.reason else "-"

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
