"""Models with every type of primary key that the ledger supports, each with what a policy needs."""

from __future__ import annotations

import os
import uuid
from typing import Any

from django.contrib.contenttypes.models import ContentType
from django.db import models
from polymorphic.models import PolymorphicModel

from django_delayq import TimeoutRelation

# The default collation of MariaDB regards "a" and "A" as the same key.
EXACT = "utf8mb4_bin" if os.environ.get("DELAYQ_TEST_DB") == "mariadb" else None


class Keyed(models.Model):
    """Begun at some time, and open or done."""

    status = models.CharField(max_length=10, default="open")
    begun_at = models.DateTimeField(null=True)
    timeouts = TimeoutRelation(related_query_name="%(class)s")

    class Meta:
        abstract = True


class BigAutoKey(Keyed):
    id = models.BigAutoField(primary_key=True)


class UUIDKey(Keyed):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)


class HexUUIDField(models.UUIDField):  # type: ignore[type-arg]
    """A column from before MariaDB 10.7, as Django 5.0 recommends to declare it; its collation is not the default."""

    def db_type(self, connection: Any) -> str | None:
        is_old = connection.vendor == "mysql"
        return "char(32) COLLATE utf8mb4_unicode_ci" if is_old else super().db_type(connection)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        found = super().get_db_prep_value(value, connection, prepared)
        return found.hex if connection.vendor == "mysql" and isinstance(found, uuid.UUID) else found


class HexUUIDKey(Keyed):
    id = HexUUIDField(primary_key=True, default=uuid.uuid4)


class DashedUUIDField(models.UUIDField):  # type: ignore[type-arg]
    """A column of another application, which has the dashes where there is no type for UUIDs."""

    def db_type(self, connection: Any) -> str | None:
        return super().db_type(connection) if connection.vendor == "postgresql" else "char(36)"

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        found = self.to_python(value)
        return str(found) if found and connection.vendor != "postgresql" else found


class DashedUUIDKey(Keyed):
    id = DashedUUIDField(primary_key=True, default=uuid.uuid4)


class TextKey(Keyed):
    code = models.CharField(max_length=40, primary_key=True, db_collation=EXACT)


class SlugKey(Keyed):
    slug = models.SlugField(max_length=40, primary_key=True, allow_unicode=True, db_collation=EXACT)


class OneToOneKey(Keyed):
    other = models.OneToOneField(UUIDKey, primary_key=True, on_delete=models.CASCADE)


class ProxyKey(BigAutoKey):
    class Meta:
        proxy = True


class Parent(Keyed):
    """The root of multi-table children, with keys shared and of their own."""


class SharedChild(Parent):
    extra = models.CharField(max_length=10, default="")


class OwnChild(Parent):
    """Its key is another one than that of its row in the parent's table."""

    parent_ptr = models.OneToOneField(Parent, parent_link=True, on_delete=models.CASCADE)
    number = models.IntegerField(primary_key=True)


class OwnGrandchild(OwnChild):
    ownchild_ptr = models.OneToOneField(OwnChild, parent_link=True, on_delete=models.CASCADE)
    code = models.CharField(max_length=10, primary_key=True)


class Holder(models.Model):
    """Refers to a child with a key of its own, so that joins begin elsewhere."""

    child = models.ForeignKey(OwnChild, null=True, on_delete=models.CASCADE)


class PolyBase(PolymorphicModel):
    """Queries return each row as an instance of its own class."""

    # Without a constraint, because the tables of this app are created before those with migrations.
    polymorphic_ctype = models.ForeignKey(
        ContentType, null=True, editable=False, on_delete=models.CASCADE, related_name="+", db_constraint=False
    )
    status = models.CharField(max_length=10, default="open")
    begun_at = models.DateTimeField(null=True)
    timeouts = TimeoutRelation(related_query_name="polybase")


class PolyChild(PolyBase):
    extra = models.CharField(max_length=10, default="")


class PolyGrandchild(PolyChild):
    more = models.CharField(max_length=10, default="")
