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
    from collections.abc import Iterable
    from typing import Self, overload

    from django.db.models import Manager, Model

    from django_delayq.models import RelatedTimeoutQuerySet, Timeout

    class TimeoutRelationManager(Manager[Timeout]):
        """What type checkers see as `order.timeouts`: a manager with the ledger's own filters, to read from."""

        def get_queryset(self) -> RelatedTimeoutQuerySet: ...
        def all(self) -> RelatedTimeoutQuerySet: ...
        def filter(self, *args: Any, **kwargs: Any) -> RelatedTimeoutQuerySet: ...
        def exclude(self, *args: Any, **kwargs: Any) -> RelatedTimeoutQuerySet: ...
        def order_by(self, *field_names: Any) -> RelatedTimeoutQuerySet: ...
        def pending(self) -> RelatedTimeoutQuerySet: ...
        def unsettled(self) -> RelatedTimeoutQuerySet: ...
        def due(self) -> RelatedTimeoutQuerySet: ...
        def of_labels(self, labels: Iterable[str]) -> RelatedTimeoutQuerySet: ...
        def of_key(self, key: str) -> RelatedTimeoutQuerySet: ...


WRITES = (
    *("add", "set", "remove", "clear", "create", "get_or_create", "update_or_create"),
    *("bulk_create", "bulk_update", "update", "delete"),
)


class _ReadOnlyDescriptor(ReverseGenericManyToOneDescriptor):
    """`order.timeouts` whose manager reads and whose writing methods refuse."""

    @cached_property
    def related_manager_cls(self) -> Any:
        # Not at the top: models that have a relation to the ledger may be loaded before it.
        from django_delayq.models import RelatedTimeoutQuerySet, refuse_write

        manager = create_generic_related_manager(self.rel.model._default_manager.__class__, self.rel)
        names = [name for write in WRITES for name in (write, f"a{write}")]
        own: dict[str, Any] = {
            **dict.fromkeys(names, staticmethod(refuse_write)),
            "_queryset_class": RelatedTimeoutQuerySet,
        }
        return type("TimeoutRelationManager", (manager,), own)

    def __set__(self, instance: Any, value: Any) -> NoReturn:
        from django_delayq.models import refuse_write

        refuse_write()


class TimeoutRelation(GenericRelation):
    """A generic relation to the ledger that never cascades and refuses writes, its querysets too.

    Deleting the object cancels what is pending and keeps the rows: the story outlives the object.
    """

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __get__(self, instance: None, owner: Any) -> Self: ...
        @overload
        def __get__(self, instance: Model, owner: Any) -> TimeoutRelationManager: ...
        def __get__(self, instance: Any, owner: Any) -> Any: ...

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
