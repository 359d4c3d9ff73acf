"""A queryset and a manager whose bulk writes arm, move and cancel timeouts, as saving each object would.

`bulk_update` and the async methods call `bulk_create` and `update`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models import Manager, QuerySet, UniqueConstraint

from django_delayq.arming.receivers import concerned_by, has_timeouts
from django_delayq.arming.sync import sync_timeouts
from django_delayq.ledger.locking import locking_rows, rows_of, transaction_of
from django_delayq.ledger.paging import chunks
from django_delayq.policies import M

if TYPE_CHECKING:
    from collections.abc import Iterable


class ArmingQuerySet(QuerySet[M]):
    """A queryset that arms after `bulk_create`, `bulk_update` and `update`, in the same transaction.

    Use `ArmingManager`, or make it the first base class of your own queryset. Models without automatic policies, and
    updates of columns that no policy reads, cost nothing. Sends no signals.
    """

    def bulk_create(  # noqa: PLR0917 - Django's signature
        self,
        objs: Iterable[M],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Collection[str] | None = None,
        unique_fields: Collection[str] | None = None,
    ) -> list[M]:
        """Insert `objs` and arm their timeouts.

        Raises:
            ValueError: the keys of the written rows would be unknown; nothing is written.
        """
        objects = list(objs)
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "ignore_conflicts": ignore_conflicts,
            "update_conflicts": update_conflicts,
            "update_fields": update_fields,
            "unique_fields": unique_fields,
        }
        using = self._armed_in(None)
        if using is None:
            return super().bulk_create(objects, **options)
        self._check_keys(objects, using, ignore_conflicts, update_conflicts and not self._is_key(unique_fields))
        with _together(using):
            created = super().bulk_create(objects, **options)
            sync_timeouts(objects)
        return created

    def update(self, **values: Any) -> int:
        """Update the rows; arm, move and cancel their timeouts.

        The rows are locked first, in the order of their keys, as everywhere. A row that begins to match while they are
        being locked is not updated, or, with more than 500 rows, its timeouts are left to the workers' next sync.
        """
        using = self._armed_in(values.keys())
        if using is None or self.query.is_sliced or self.query.combinator:
            return super().update(**values)
        with _together(using):
            keys = sorted(set(self.using(using).order_by().values_list("pk", flat=True)))
            pages = list(chunks(keys))
            for page in pages:
                list(locking_rows(self.model, page, using).values_list("pk", flat=True))
            # One statement, because the condition may read what the statement changes. It is evaluated again on the
            # locked rows.
            rows = self.filter(pk__in=keys) if len(pages) <= 1 else self
            updated = super(ArmingQuerySet, rows).update(**values)
            for page in pages:
                sync_timeouts(rows_of(self.model, using).filter(pk__in=page))
        self._result_cache = None
        return updated

    def _armed_in(self, names: Collection[str] | None) -> str | None:
        """Return the database to which this queryset writes; None: no timeouts depend on the fields `names` there."""
        self._for_write = True
        if not concerned_by(self.model, names):
            return None
        row = self.model()
        row._state.db = self.db
        return self.db if has_timeouts(self.model, row, self.db) else None

    def _is_key(self, target: Collection[str] | None) -> bool:
        """Return whether only the primary key can conflict in an upsert with the unique fields `target`."""
        meta: Any = self.model._meta
        if target:
            return {*target} <= {"pk", meta.pk.name, meta.pk.attname}
        constraints = [each for each in meta.constraints if isinstance(each, UniqueConstraint)]
        return not (constraints or meta.unique_together or any(x.unique for x in meta.concrete_fields if x != meta.pk))

    def _check_keys(self, objects: list[M], using: str, ignore_conflicts: bool, may_have_other_key: bool) -> None:
        """Raise ValueError if the keys of the rows would be unknown."""
        has_key = [obj.pk is not None and not hasattr(obj.pk, "resolve_expression") for obj in objects]
        returns_keys = connections[using].features.can_return_rows_from_bulk_insert and not ignore_conflicts
        if not all(has_key) and not returns_keys:
            source = "ignore_conflicts=True" if ignore_conflicts else f"database {using!r}"
            words = f"the keys of the new rows are unknown, because {source} does not return them"
        elif any(has_key) and may_have_other_key:
            words = "a row that exists keeps its own key, and not that of the object"
        else:
            return
        name = self.model.__name__
        raise ValueError(
            f"bulk_create() of {name} cannot arm timeouts: {words}. Use {name}._base_manager.bulk_create(), and then "
            "sync_timeouts() with a queryset that finds the rows."
        )


@contextmanager
def _together(using: str) -> Iterator[None]:
    """Write rows and their timeouts in one transaction; after an error the caller's must be rolled back."""
    with transaction_of(using), transaction.atomic(using=using, savepoint=False):
        yield


class ArmingManager(Manager[M]):
    """A manager with the methods of `ArmingQuerySet`: `objects = ArmingManager()`."""

    def get_queryset(self) -> ArmingQuerySet[M]:
        hints = self._hints  # type: ignore[attr-defined] # the stubs lack it
        return ArmingQuerySet(self.model, using=self._db, hints=hints)
