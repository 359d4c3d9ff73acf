"""Admin classes of the other apps together with ours."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from import_export.admin import ImportExportModelAdmin
from import_export.resources import ModelResource
from reversion.admin import VersionAdmin
from simple_history.admin import SimpleHistoryAdmin

from django_delayq.admin import TimeoutAdminMixin, TimeoutInline
from tests.beside.project import models


class ImportedDealResource(ModelResource):
    class Meta:
        model = models.ImportedDeal
        fields = ("id", "status", "begun_at")


@admin.register(models.RecordedDeal)
class RecordedDealAdmin(TimeoutAdminMixin, SimpleHistoryAdmin):
    inlines = [TimeoutInline]


@admin.register(models.VersionedDeal)
class VersionedDealAdmin(TimeoutAdminMixin, VersionAdmin):
    inlines = [TimeoutInline]


@admin.register(models.ImportedDeal)
class ImportedDealAdmin(TimeoutAdminMixin, ImportExportModelAdmin):
    inlines = [TimeoutInline]
    resource_classes: list[Any] = [ImportedDealResource]
