"""Models whose conditions read everything that SQL can read, and base managers that do everything that they can do."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.db.models import Count, F, Q, QuerySet
from django.db.models.functions import Coalesce


class Tag(models.Model):
    name = models.CharField(max_length=20)


class Task(models.Model):
    """A row with a column, or a relation, for each kind of condition."""

    status = models.CharField(max_length=20, default="open")
    note = models.CharField(max_length=50, null=True)
    remark = models.CharField(max_length=50, default="")
    amount = models.IntegerField(default=0)
    bound = models.IntegerField(null=True)
    begun_at = models.DateTimeField(null=True)
    resumed_at = models.DateTimeField(null=True)
    doubled = models.GeneratedField(expression=F("amount") * 2, output_field=models.IntegerField(), db_persist=True)
    counted_from = models.GeneratedField(
        expression=Coalesce("resumed_at", "begun_at"), output_field=models.DateTimeField(null=True), db_persist=True
    )
    data = models.JSONField(default=dict)
    owner = models.ForeignKey("testapp.Customer", null=True, on_delete=models.SET_NULL)
    parent = models.ForeignKey("self", null=True, on_delete=models.SET_NULL, related_name="kids")
    tags = models.ManyToManyField(Tag)


class Item(models.Model):
    task = models.ForeignKey(Task, on_delete=models.CASCADE, related_name="items")
    is_open = models.BooleanField(default=True)


class WithOwner(models.Manager[Any]):
    def get_queryset(self) -> QuerySet[Any]:
        return super().get_queryset().select_related("owner")


class WithCount(models.Manager[Any]):
    def get_queryset(self) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset()
        counted: QuerySet[Any] = rows.annotate(
            peers=Count("owner__order"), of_vip=F("owner__vip"), size=F("amount") * F("bound")
        )
        return counted


class WithColumns(models.Manager[Any]):
    def get_queryset(self) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset().filter(bound__isnull=True)
        seen: QuerySet[Any] = rows.annotate(of_vip=F("owner__vip"), size=F("amount") + 1)
        return seen


class Distinct(models.Manager[Any]):
    def get_queryset(self) -> QuerySet[Any]:
        return super().get_queryset().distinct()


class NotHidden(models.Manager[Any]):
    def get_queryset(self) -> QuerySet[Any]:
        return super().get_queryset().filter(Q(owner__isnull=True) | Q(owner__vip=False) | Q(amount=1))


class Managed(models.Model):
    """What the models below have in common; each has a base manager that does more than read its table."""

    status = models.CharField(max_length=20, default="open")
    remark = models.CharField(max_length=50, default="")
    amount = models.IntegerField(default=0)
    bound = models.IntegerField(default=2)
    begun_at = models.DateTimeField(null=True)
    owner = models.ForeignKey("testapp.Customer", null=True, on_delete=models.SET_NULL)

    class Meta:
        abstract = True


class ManagedWithOwner(Managed):
    objects = WithOwner()

    class Meta:
        base_manager_name = "objects"


class ManagedWithCount(Managed):
    objects = WithCount()

    class Meta:
        base_manager_name = "objects"


class ManagedDistinct(Managed):
    objects = Distinct()

    class Meta:
        base_manager_name = "objects"


class ManagedNotHidden(Managed):
    objects = NotHidden()

    class Meta:
        base_manager_name = "objects"


class ManagedChild(ManagedWithOwner):
    """A multi-table child whose parent's base manager joins."""

    place = models.CharField(max_length=20, default="")


class ProxyWithColumns(Task):
    """A proxy with a base manager of its own: its policies see what that manager adds, the table's do not."""

    objects: ClassVar[models.Manager[Any]] = WithColumns()

    class Meta:
        proxy = True
        base_manager_name = "objects"


class Removable(Managed):
    """Rows that are marked as deleted, seen by every manager."""

    deleted_at = models.DateTimeField(null=True)


class NotArchived(models.Manager[Any]):
    def get_queryset(self) -> QuerySet[Any]:
        return super().get_queryset().filter(archive="")


class Archived(Managed):
    """Rows that the default manager hides and the base manager shows."""

    archive = models.CharField(max_length=20, default="")
    objects = NotArchived()
