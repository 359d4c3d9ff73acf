"""`TimeoutRelation()` on a model gives `order.timeouts`: the ledger's rows of one object, for reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from django.contrib.contenttypes.fields import (
    GenericRelation,
    ReverseGenericManyToOneDescriptor,
    create_generic_related_manager,
)
from django.utils.functional import cached_property

if TYPE_CHECKING:
    from django.db.models import Model


WRITES = (
    *("add", "set", "remove", "clear", "create", "get_or_create", "update_or_create"),
    *("bulk_create", "bulk_update", "update", "delete"),
)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError("Timeouts are not written through a relation: use schedule_timeout, cancel_timeout and the like.")


class _ReadOnlyDescriptor(ReverseGenericManyToOneDescriptor):
    """`order.timeouts` whose manager reads and whose writing methods refuse."""

    @cached_property
    def related_manager_cls(self) -> Any:
        manager = create_generic_related_manager(self.rel.model._default_manager.__class__, self.rel)
        names = [name for write in WRITES for name in (write, f"a{write}")]
        return type("TimeoutRelationManager", (manager,), dict.fromkeys(names, staticmethod(_refuse)))

    def __set__(self, instance: Any, value: Any) -> NoReturn:
        _refuse()


class TimeoutRelation(GenericRelation):
    """A generic relation to the ledger that never cascades and refuses writes.

    Deleting the object cancels what is pending and keeps the rows: the story outlives the object.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("related_query_name", None)
        super().__init__("django_delayq.Timeout", **kwargs)

    def contribute_to_class(self, cls: type[Model], name: str, **kwargs: Any) -> None:  # type: ignore[override]
        super().contribute_to_class(cls, name, **kwargs)
        if not cls._meta.abstract:
            setattr(cls, name, _ReadOnlyDescriptor(cast("Any", self.remote_field)))

    def bulk_related_objects(self, objs: Any, using: str = "default") -> Any:
        """Nothing: what this returns would be deleted together with the object."""
        return self.remote_field.model._base_manager.db_manager(using).none()
