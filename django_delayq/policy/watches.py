"""What a policy reads beside its object: which rows, by which relations, and which of their columns.

Only what lookups and paths name can be watched. A subquery, raw SQL or an annotation of a base manager cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from django.contrib.contenttypes.fields import GenericRelation
from django.core.exceptions import FieldError
from django.db.models import Model, Q
from django.db.models.sql import Query

from django_delayq.policy.policies import TimeoutPolicy, get_policies, registry
from django_delayq.policy.terms import named_paths
from django_delayq.times.paths import named_in


@dataclass(frozen=True, slots=True)
class Hop:
    """One relation from the rows of `source` to those of `target`."""

    source: type[Model]
    target: type[Model]
    field: Any
    """The foreign key: of `source` if `is_forward`, otherwise of `target`; or the generic relation of `source`."""
    is_forward: bool

    @property
    def is_generic(self) -> bool:
        return isinstance(self.field, GenericRelation)

    @property
    def names(self) -> frozenset[str]:
        """Return the columns of `target` by which its rows belong to those of `source`."""
        if self.is_forward:
            return frozenset()
        if self.is_generic:
            kind = self.target._meta.get_field(self.field.content_type_field_name)
            return frozenset((kind.name, cast("Any", kind).attname, self.field.object_id_field_name))
        return frozenset((self.field.name, self.field.attname))


@dataclass(frozen=True, slots=True)
class Watch:
    """The rows of one model that decide about timeouts of a policy."""

    policy: TimeoutPolicy[Any]
    hops: tuple[Hop, ...]
    """From the policy's model to the watched one."""
    names: frozenset[str]
    """The columns that are read. Of a relation without any, only deletions matter."""

    @property
    def model(self) -> type[Model]:
        return self.hops[-1].target

    def may_move(self, names: Collection[str] | None) -> bool:
        """Return whether only the database knows to which objects a row belongs before a write of `names`; None: all.

        Its own columns say to which it will belong, unless other rows refer to it.
        """
        last = self.hops[-1]
        return last.is_forward or names is None or bool(last.names & set(names))


def watches_on(model: type[Model], names: Collection[str] | None = None) -> tuple[Watch, ...]:
    """Return the watches on rows of `model` that a write of the columns `names` concerns; None: of any, or a deletion.

    For policies that are not automatic nothing is armed, but the objects are locked.
    """
    derived = registry.derived
    found: tuple[Watch, ...] | None = derived.get((watches_on, model))
    if found is None:
        concrete = model._meta.concrete_model or model
        each = (watch for policy in get_policies() for watch in watches_of(policy))
        found = derived[watches_on, model] = tuple(watch for watch in each if issubclass(concrete, watch.model))
    return found if names is None else tuple(watch for watch in found if watch.names & set(names))


@lru_cache(maxsize=1000)  # asked for each model at the start
def watches_of(policy: TimeoutPolicy[Any]) -> tuple[Watch, ...]:
    """Return what `policy` watches, the nearest rows first."""
    found = dict[tuple[Hop, ...], set[str]]()
    for path in _paths(policy):
        for hops, names in _steps(policy.concrete_model, path):
            found.setdefault(hops, set()).update(names)
    watches = [Watch(policy, hops, frozenset(names)) for hops, names in found.items()]
    return tuple(sorted(watches, key=lambda watch: len(watch.hops)))


def cannot_watch(policy: TimeoutPolicy[Any]) -> list[str]:
    """Return which options of `policy` read rows that no lookup or path names: `when`, `hold_when` or both."""
    given = {"when": policy.when, "hold_when": policy.hold_when}
    return [option for option, condition in given.items() if _is_opaque(policy, condition)]


def _is_opaque(policy: TimeoutPolicy[Any], condition: Q | None) -> bool:
    try:
        return not all(path and _resolved(policy.concrete_model, path) for path in named_in(condition))
    except FieldError:  # what the base manager annotates
        return True


def _paths(policy: TimeoutPolicy[Any]) -> Iterator[str]:
    """Yield the lookups in the conditions of `policy`, and the paths of its deadline."""
    for condition in (policy.when, policy.hold_when):
        yield from filter(None, named_in(condition))
    if isinstance(policy.since, str):
        yield policy.since
    yield from named_paths(policy)


def _resolved(model: type[Model], path: str) -> tuple[Sequence[Any], Any]:
    """Return the relations on `path`, as Django resolves it, and the last field on it.

    Behind that there may be a lookup, or an attribute of Python. Raises FieldError if `path` begins with no field.
    """
    query: Any = Query(model)
    relations, field, _, _ = query.names_to_path(path.split("__"), model._meta)
    return relations, field


def _steps(model: type[Model], path: str) -> Iterator[tuple[tuple[Hop, ...], frozenset[str]]]:
    """Yield the relations on `path`, each behind those before it, with the columns that are read of its rows."""
    try:
        relations, field = _resolved(model, path)
    except FieldError:
        return
    hops: list[Hop] = []
    for info in relations:
        source, target = (opts.concrete_model for opts in (info.from_opts, info.to_opts))
        forward = bool(info.direct)
        hops.append(Hop(source, target, info.join_field if forward else info.join_field.field, forward))
    for number, hop in enumerate(hops):
        if all(_is_own(each) for each in hops[: number + 1]):  # other columns of the same object
            continue
        names = set(hop.names)
        if number + 1 < len(hops) and hops[number + 1].is_forward:
            names |= {hops[number + 1].field.name, hops[number + 1].field.attname}
        elif number + 1 == len(hops) and not field.is_relation:
            names |= {field.name, field.attname}
        yield tuple(hops[: number + 1]), frozenset(names)


def _is_own(hop: Hop) -> bool:
    """Return whether the row at the end of `hop` is that of the same object in the table of a parent."""
    return hop.is_forward and bool(getattr(hop.field.remote_field, "parent_link", False))
