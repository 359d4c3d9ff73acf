"""Declare: `@timeout_policy` makes a `TimeoutPolicy` of a handler, and the registry knows them all."""

from __future__ import annotations

import difflib
import functools
import inspect
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast, overload

from django.apps import apps
from django.db.models import Model

from django_delayq.delays import check_length, check_moment, shifted
from django_delayq.exceptions import PolicyError, UnknownPolicy
from django_delayq.policy_rules import check_against_model, check_call, check_declaration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from django.db.models import Q, QuerySet

    from django_delayq.models import Timeout
    from django_delayq.retries import Retry

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, eq=False, kw_only=True)
class TimeoutPolicy(Generic[M]):
    """A declared rule: if the object has not moved on by the deadline, the handler runs, once.

    Immutable, compared by identity, and callable like the function that it decorates. `timeout_policy`
    documents the attributes.
    """

    model: type[M]
    """The model class the handler gets. May be given as `"app.Model"`; a class once the models are loaded."""
    handler: Callable[..., Any]
    name: str = ""
    after: timedelta | Callable[[M], timedelta | None] | None = None
    since: str | Callable[[M], datetime | None] | None = None
    when: Q | None = None
    retry: Retry | None = None
    batch: int | None = None
    atomic: bool = True
    queue: str = "default"
    max_extensions: int | None = None
    aliases: tuple[str, ...] = ()

    do_not_call_in_templates: ClassVar[bool] = True
    """A template that is given a policy means the policy, and not what its handler returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<TimeoutPolicy {self.label}>"

    def __post_init__(self) -> None:
        # Frozen for everybody else: these complete what was given.
        object.__setattr__(self, "name", self.name or getattr(self.handler, "__name__", ""))
        former = (self.aliases,) if isinstance(self.aliases, str) else tuple(self.aliases)
        object.__setattr__(self, "aliases", former)
        # So that `inspect.signature` and documentation tools see through the policy; not on the class, whose own
        # signature they would no longer find.
        object.__setattr__(self, "__wrapped__", self.handler)
        for attribute in ("__name__", "__qualname__", "__doc__"):
            if hasattr(self.handler, attribute):
                object.__setattr__(self, attribute, getattr(self.handler, attribute))

    @functools.cached_property
    def concrete_model(self) -> type[Model]:
        """The model that owns the table: what the ledger's content type names, also for a proxy."""
        return cast("type[Model]", self.model._meta.concrete_model)

    @functools.cached_property
    def label(self) -> str:
        """`app_label.model_name.name`: how rows of the ledger name this policy."""
        given: type[M] | str = self.model
        return f"{given.lower() if isinstance(given, str) else given._meta.label_lower}.{self.name}"

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The label and then every former one: rows under any of them are this policy's."""
        prefix = self.label.rpartition(".")[0]
        return (self.label, *(alias if "." in alias else f"{prefix}.{alias}" for alias in self.aliases))

    @property
    def is_automatic(self) -> bool:
        """Whether saving an object arms and cancels by itself: if and only if `when` and `since` are given."""
        return self.when is not None and self.since is not None

    def since_of(self, obj: M) -> datetime | None:
        """The moment that `after` counts from for `obj`, in UTC if aware; None: not yet, or no `since`."""
        if self.since is None:
            return None
        value = getattr(obj, self.since) if isinstance(self.since, str) else self.since(obj)
        return None if value is None else check_moment(value, f"since of {self.label}")

    def due_of(self, obj: M | None, since_at: datetime | None, in_force: timedelta | None = None) -> datetime | None:
        """The deadline of the round that began at `since_at`; None: exempt, or nothing to count from.

        `obj` may be None only where `after` is no callable. `in_force`: the delay that an operator has put in the
        place of `after`; objects that are exempt stay so.
        """
        if since_at is None or self.after is None:
            return None
        after = self.after if isinstance(self.after, timedelta) else self.after(cast("M", obj))
        if after is None:
            return None
        return shifted(since_at, check_length(after if in_force is None else in_force, f"after of {self.label}"))

    def fits(self, model: type[Model]) -> bool:
        """Whether rows of `model` (the model itself, a proxy of it, a multi-table child) are this policy's."""
        concrete = model._meta.concrete_model
        return concrete is not None and issubclass(concrete, self.concrete_model)

    def pk_of(self, obj: Model) -> Any:
        """The key of `obj` in this policy's table; a multi-table child may have another of its own."""
        pk = self.concrete_model._meta.pk
        return getattr(obj, pk.attname) if pk is not None else obj.pk


class _Registry:
    """Every declared policy by its labels, current and former."""

    def __init__(self) -> None:
        self._by_label: dict[str, TimeoutPolicy[Any]] = {}
        self._unchecked: list[TimeoutPolicy[Any]] = []
        self.version = 0
        """Changes whenever a policy comes or goes, so that what was derived from them can be made anew."""

    def add(self, policy: TimeoutPolicy[Any]) -> None:
        check_declaration(policy)
        for label in policy.labels:
            other = self._by_label.get(label)
            if other is not None:
                raise PolicyError(
                    f"{label} is declared twice: by {_where(other)} and by {_where(policy)}. "
                    "Give one of them another name=, or take the name out of aliases=."
                )
        if apps.models_ready:
            check_against_model(policy)
        else:
            self._unchecked.append(policy)
        self._by_label.update(dict.fromkeys(policy.labels, policy))
        self.version += 1

    def remove(self, policy: TimeoutPolicy[Any]) -> None:
        for label in policy.labels:
            if self._by_label.get(label) is policy:
                del self._by_label[label]
        self.version += 1

    def check_postponed(self) -> None:
        """Check what was declared before the models were loaded; called once they are."""
        while self._unchecked:
            check_against_model(self._unchecked.pop())

    def get(self, label: str) -> TimeoutPolicy[Any] | None:
        return self._by_label.get(label)

    def __iter__(self) -> Iterator[TimeoutPolicy[Any]]:
        yield from dict.fromkeys(self._by_label.values())


registry = _Registry()
_NO_NAME = "A policy is named by a text or by itself, not by {}."


def _where(policy: TimeoutPolicy[Any]) -> str:
    return f"{getattr(policy.handler, '__module__', '?')}.{getattr(policy.handler, '__qualname__', policy.name)}"


def register_policy(policy: TimeoutPolicy[M]) -> TimeoutPolicy[M]:
    """Make `policy` known, as the decorator does; returns it.

    Raises:
        PolicyError: the declaration is wrong, or one of its labels is taken.
    """
    registry.add(policy)
    return policy


def get_policies(model: type[Model] | None = None) -> list[TimeoutPolicy[Any]]:
    """All declared policies in order of declaration, or those that saves of `model` concern."""
    return [policy for policy in registry if model is None or policy.fits(model)]


def declared_queues() -> list[str]:
    """Return the default queue and those of all declared policies, each once."""
    return list(dict.fromkeys(["default", *(policy.queue for policy in registry)]))


def get_policy(policy: str | tuple[type[Model], str] | TimeoutPolicy[Any]) -> TimeoutPolicy[Any]:
    """The policy of a label (`"shop.order.cancel_unpaid"`) or of `(Order, "cancel_unpaid")`; aliases serve too.

    A policy itself is returned as it is.

    Raises:
        UnknownPolicy: no such policy; the message offers near names.
    """
    if isinstance(policy, TimeoutPolicy):
        return policy
    if isinstance(policy, tuple):
        return resolve_policy(policy[1], policy[0])
    if not isinstance(policy, str):
        raise UnknownPolicy(_NO_NAME.format(type(policy).__name__))
    found = registry.get(policy)
    if found is None:
        raise UnknownPolicy(_unknown(policy, [label for known in registry for label in known.labels]))
    return found


def resolve_policy(policy: str | TimeoutPolicy[M], model: type[Model]) -> TimeoutPolicy[M]:
    """The policy that `"name"`, a label or the policy itself means for objects of `model`.

    Raises:
        UnknownPolicy: there is none, or it is declared for another model.
    """
    if isinstance(policy, TimeoutPolicy):
        if policy.fits(model):
            return policy
        raise UnknownPolicy(
            _historical(model) or f"{policy.label} is declared for {policy.model.__name__}, not for {model.__name__}."
        )
    if not isinstance(policy, str):
        raise UnknownPolicy(_NO_NAME.format(type(policy).__name__))
    fitting = get_policies(model)
    named = [known for known in fitting if policy in known.labels or policy in _bare_names(known)]
    # A child's own policy wins over its parent's of the same name, as an overriding method would.
    mro = list(model.__mro__)
    named.sort(key=lambda known: mro.index(known.model) if known.model in mro else len(mro))
    if not named:
        names = [name for known in fitting for name in (known.name, *known.labels)]
        raise UnknownPolicy(_historical(model) or _unknown(policy, names, of=model.__name__))
    return named[0]


def _historical(model: type[Model]) -> str:
    """Return why no policy concerns `model`, if it is what `apps.get_model` returns in a migration; otherwise ""."""
    if model.__module__ != "__fake__":  # how Django's migrations name the module of such classes
        return ""
    return (
        f"{model._meta.label} is a historical model of a migration: policies are declared for the model of the code, "
        "and in a migration nothing is scheduled or armed. Workers arm automatic policies within SYNC_INTERVAL after "
        "the migration, and `manage.py delayq_sync` at once; schedule others in a management command."
    )


def _bare_names(policy: TimeoutPolicy[Any]) -> Iterable[str]:
    return (policy.name, *(alias.rpartition(".")[2] for alias in policy.aliases))


def _unknown(name: str, known: list[str], of: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(sorted(known)) or 'none'}."
    return f"No timeout policy {name!r}{f' for {of}' if of else ''}. {hint}"


_Single = TypeVar("_Single", bound="Callable[..., object]")


@overload
def timeout_policy(
    model: type[M],
    *,
    batch: None = None,
    name: str | None = None,
    after: timedelta | Callable[[M], timedelta | None] | None = None,
    since: str | Callable[[M], datetime | None] | None = None,
    when: Q | None = None,
    retry: Retry | None = None,
    atomic: bool = True,
    queue: str = "default",
    max_extensions: int | None = None,
    aliases: Iterable[str] = (),
) -> Callable[[Callable[[M, Timeout], object]], TimeoutPolicy[M]]: ...
@overload
def timeout_policy(
    model: type[M],
    *,
    batch: int,
    name: str | None = None,
    after: timedelta | Callable[[M], timedelta | None] | None = None,
    since: str | Callable[[M], datetime | None] | None = None,
    when: Q | None = None,
    retry: Retry | None = None,
    atomic: bool = True,
    queue: str = "default",
    max_extensions: int | None = None,
    aliases: Iterable[str] = (),
) -> Callable[[Callable[[QuerySet[M], list[Timeout]], object]], TimeoutPolicy[M]]: ...
@overload
def timeout_policy(
    model: str,
    *,
    batch: int | None = None,
    name: str | None = None,
    after: timedelta | Callable[[Any], timedelta | None] | None = None,
    since: str | Callable[[Any], datetime | None] | None = None,
    when: Q | None = None,
    retry: Retry | None = None,
    atomic: bool = True,
    queue: str = "default",
    max_extensions: int | None = None,
    aliases: Iterable[str] = (),
) -> Callable[[Callable[[Any, Any], object]], TimeoutPolicy[Any]]: ...
def timeout_policy(
    model: type[Any] | str,
    *,
    name: str | None = None,
    after: timedelta | Callable[[Any], timedelta | None] | None = None,
    since: str | Callable[[Any], datetime | None] | None = None,
    when: Q | None = None,
    retry: Retry | None = None,
    batch: int | None = None,
    atomic: bool = True,
    queue: str = "default",
    max_extensions: int | None = None,
    aliases: Iterable[str] = (),
    **unknown: Any,
) -> Callable[[Any], TimeoutPolicy[Any]]:
    """Declare what happens to a `model` object when something else has not happened in time.

    Put it into `timeouts.py` of any installed app. With both `when` and `since` the policy is automatic:
    saving an object arms it while `when` holds, moves it when the value of `since` changes and cancels it
    when `when` stops holding; deleting the object cancels. Any other policy is scheduled by hand.

    Args:
        model: a model class, or `"app.Model"`.
        name: unique per model; the function's name by default.
        after: how long after `since` (without one: after the call that schedules it) it is due: a timedelta,
            or a callable `obj -> timedelta | None` (None: this object is exempt). Without `after` each
            scheduling needs a delay of its own.
        since: name of a `DateTimeField`, or a callable `obj -> datetime | None` (None: not yet).
        when: a `Q` on the object's own columns, checked again on the locked row at due time. `Q()`: always.
        retry: what follows a handler that raised; `DELAYQ["RETRY"]` by default.
        batch: the handler gets `(queryset, timeouts)` of up to this many objects instead of one.
        atomic: False: the handler runs outside a transaction, at least once, for slow outside effects.
        queue: which workers serve it (`delayq_worker --queue`).
        max_extensions: how often `extend_timeout` may move one deadline; None: without limit.
        aliases: former names or labels, so that rows scheduled before a rename are still found and fired.
        **unknown: refused, with the option that was probably meant.

    Returns:
        A decorator. Handlers take `(obj, timeout)`, or `(queryset, timeouts)` with `batch`, and may be async.

    Raises:
        PolicyError: when the declaration is wrong (fields of models not yet loaded: at start).
    """
    check_call(model, unknown, _OPTIONS)

    def declare(handler: Callable[..., Any]) -> TimeoutPolicy[Any]:
        return register_policy(
            TimeoutPolicy[Any](
                model=cast("type[Any]", model),
                handler=handler,
                name=name or "",
                after=after,
                since=since,
                when=when,
                retry=retry,
                batch=batch,
                atomic=atomic,
                queue=queue,
                max_extensions=max_extensions,
                aliases=cast("tuple[str, ...]", aliases),
            )
        )

    return declare


def _without_unknown(signature: inspect.Signature) -> inspect.Signature:
    """Return `signature` as callers should see it: `**unknown` is there to be refused."""
    named = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    return signature.replace(parameters=named)


_SIGNATURE = _without_unknown(inspect.signature(timeout_policy))
_OPTIONS = [name for name in _SIGNATURE.parameters if name != "model"]
timeout_policy.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
