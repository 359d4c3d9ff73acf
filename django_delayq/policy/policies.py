"""The declared policies, each found by its label or by the models that it concerns."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, cast

from django.conf import settings
from django.db.models import DateField, DateTimeField, Model, Q

from django_delayq.exceptions import InvalidDelay, PolicyError, UnknownPolicy
from django_delayq.policy.options import Brake, Confirmation, Late, Limits, Rate, Retry
from django_delayq.policy.steps import HasPlan, Step
from django_delayq.times.calendars import Calendar, is_calendar
from django_delayq.times.clock import aware, check_awareness, fitting, shifted, within_calendar
from django_delayq.times.lengths import (
    OwnTime,
    as_length,
    as_span,
    end_of,
    is_negative,
    is_span,
    length_text,
    needs_object,
    relations_of,
    resized,
)
from django_delayq.times.paths import field_at, found_at, relations_on, stored_type
from django_delayq.times.spans import Length, resolved

if TYPE_CHECKING:
    from django_delayq.models import Timeout
    from django_delayq.policy.outcomes import Outcome

M = TypeVar("M", bound=Model)
Ask: TypeAlias = "Callable[[M, Timeout], Outcome | Awaitable[Outcome | None] | None]"


@dataclass(frozen=True, eq=False, kw_only=True)
class TimeoutPolicy(HasPlan, Generic[M]):
    """A declared rule: if `when` still holds at the deadline, the handler runs, once.

    Immutable, compared by identity, and callable like its handler. `timeout_policy` documents the attributes.
    """

    model: type[M]
    """The model class; a string `"app.Model"` is replaced by it when the models are loaded."""
    handler: Callable[..., Any]
    name: str = cast("str", None)
    """By default the name of the handler."""
    after: Length | str | Callable[[M], Length | None] | None = None
    since: str | Callable[[M], datetime | None] | None = None
    when: Q | None = None
    hold_when: Q | None = None
    retry: Retry | None = None
    batch: int | None = None
    batch_by: str | None = None
    together: int | None = None
    atomic: bool = True
    queue: str = "default"
    max_extensions: int | None = None
    aliases: tuple[str, ...] = ()
    limits: Limits | None = None
    late: Late | None = None
    brake: Brake | None = None
    shadow: bool = False
    search: tuple[str, ...] = ()
    owner: str | None = None
    silenced_checks: tuple[str, ...] = ()
    within: Calendar | str | Callable[[M], Calendar | None] | None = None
    grace: Length | None = None
    retention: timedelta | None = None
    steps: tuple[Step, ...] = field(default=(), init=False)
    """What happens before the handler acts, in order of declaration: see `step`."""
    names_since = True  # without a type, because it is not a field
    """Whether the decorator was given `since`, also None. Otherwise a check asks whether it was forgotten."""
    confirmation: ClassVar[Confirmation | None] = None
    """What is asked before the handler is called: see `confirm`. Each policy may have its own."""

    do_not_call_in_templates: ClassVar[bool] = True
    """Templates show a policy in their context, instead of calling its handler."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<TimeoutPolicy {self.label}>"

    def __post_init__(self) -> None:
        # Complete the given values; afterwards the policy is frozen.
        object.__setattr__(self, "name", self.name or getattr(self.handler, "__name__", ""))
        for option in ("after", "grace"):
            object.__setattr__(self, option, as_span(getattr(self, option)))
        for option in ("aliases", "search", "silenced_checks"):
            given = getattr(self, option)
            is_several = isinstance(given, Iterable) and not isinstance(given, str)
            object.__setattr__(self, option, tuple(given) if is_several else (given,))
        # `inspect.signature` and documentation tools show the handler. Set on the instance, because on the class
        # it would hide the signature of the class.
        object.__setattr__(self, "__wrapped__", self.handler)
        for attribute in ("__name__", "__qualname__", "__doc__"):
            if hasattr(self.handler, attribute):
                object.__setattr__(self, attribute, getattr(self.handler, attribute))

    def confirm(self, *, timeout: timedelta = timedelta(seconds=10)) -> Callable[[Ask[M]], Ask[M]]:
        """Declare the function that is asked at the deadline, before the handler is called: "has the customer paid?".

        It is called with `(obj, timeout)` outside of any transaction, while nothing is locked. If it returns None, the
        timeout fires as always, within 30 seconds after the answer: the object is locked, the condition is checked
        again, the handler is called. If it returns (or raises) `Skip`, `Snooze` or `GiveUp`, that is the outcome, and
        the handler is not called. Without an answer it is never called: any other exception, any other value or no
        answer within `timeout` is a failed attempt, which is retried as one of the handler.

        Args:
            timeout: how long it may take.

        Returns:
            A decorator, which returns the function. It may be async.

        Raises:
            PolicyError: the policy has one already, the function cannot be called like that, or `timeout` is not a
                timedelta from 50 ms to a year.
        """

        def declare(function: Ask[M]) -> Ask[M]:
            if self.confirmation is not None:
                raise PolicyError(f"{self.label} has a confirm function already: {self.confirmation.function!r}.")
            try:
                object.__setattr__(self, "confirmation", Confirmation(function, timeout))
            except (TypeError, ValueError) as error:
                raise PolicyError(f"Timeout policy {self.label}: {error}") from error
            return function

        return declare

    @functools.cached_property
    def concrete_model(self) -> type[Model]:
        """Return the model that owns the table, also for a proxy; the ledger's content type names it."""
        return cast("type[Model]", self.model._meta.concrete_model)

    @functools.cached_property
    def label(self) -> str:
        """Return `app_label.model_name.name`, by which rows of the ledger name this policy."""
        given: type[M] | str = self.model
        app, _, model = (given if isinstance(given, str) else given._meta.label).partition(".")
        return f"{app}.{model.lower()}.{self.name}"

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the label and then all former labels, each once; rows under any of them belong to this policy."""
        return tuple(dict.fromkeys((self.label, *map(self._label_of, self.aliases))))

    @functools.cached_property
    def oldest_label(self) -> str:
        """Return the label that this policy had first: that of the first of `aliases`, without any its own.

        The slots of its rounds are digests of it, so that each release of the application computes the same ones.
        """
        return next(map(self._label_of, self.aliases), self.label)

    def _label_of(self, alias: str) -> str:
        return alias if "." in alias else f"{self.label.rpartition('.')[0]}.{alias}"

    @property
    def transaction_size(self) -> int:
        """Return how many timeouts may share a transaction: one, unless `batch` or `together` declares more."""
        return self.batch or self.together or 1

    @property
    def handler_path(self) -> str:
        return f"{getattr(self.handler, '__module__', '?')}.{getattr(self.handler, '__qualname__', self.name)}"

    @property
    def rate(self) -> Rate | None:
        """Return the rate that limits its attempts; None: there is none."""
        return self.limits.rate if self.limits else None

    @property
    def counts_by(self) -> str | None:
        """Return the path by whose values its rate counts; None: it has no rate, or one for all."""
        return self.rate.by if self.rate else None

    @property
    def share_path(self) -> str | None:
        """Return the path to the `share` of a timeout, by which its rate counts or its batches are cut; None: none."""
        return self.batch_by or self.counts_by

    @property
    def total(self) -> Length | None:
        """Return how much later than its first deadline the application may move a timeout; None: without limit."""
        return self.limits.total if self.limits else None

    @property
    def is_automatic(self) -> bool:
        """Return whether saving an object arms and cancels: if and only if `when` and `since` are given."""
        return self.when is not None and self.since is not None

    def since_of(self, obj: M) -> datetime | None:
        """Return the datetime that `after` counts from, in UTC if aware; None: not yet, never, or no `since`."""
        if self.since is None:
            return None
        return self.checked_since(found_at(self.since, obj))

    def checked_since(self, value: Any) -> datetime | None:
        """Return a value of `since` in UTC if it is aware. Raises InvalidDelay for other types than datetime.

        A date of a `DateField` becomes its midnight in UTC, or without `USE_TZ` its midnight, by which the ledger knows
        its round. None also for one beyond the supported years, such as 31 December 9999, which means "never".
        """
        if value is not None and self.counts_from_date:
            value = datetime(value.year, value.month, value.day, tzinfo=UTC if settings.USE_TZ else None)
        return None if value is None else within_calendar(check_awareness(value, f"since of {self.label}"))

    @functools.cached_property
    def counts_from_date(self) -> bool:
        """Return whether `since` names a field that has dates without a time."""
        field = stored_type(field_at(self.model, self.since)) if isinstance(self.since, str) else None
        return isinstance(field, DateField) and not isinstance(field, DateTimeField)

    @functools.cached_property
    def has_plain_since(self) -> bool:
        """Return whether `since` is a column with a time in the table of the object, or there is none.

        Then a statement can copy it into the ledger.
        """
        is_own = isinstance(self.since, str) and "__" not in self.since and not self.counts_from_date
        return self.since is None or is_own

    @functools.cached_property
    def fixed_length(self) -> Length | None:
        """Return `after` if it is a timedelta or a span; None if it is a path or a callable, or missing."""
        return cast("Length", self.after) if isinstance(self.after, timedelta) or is_span(self.after) else None

    @functools.cached_property
    def needs_object(self) -> bool:
        """Return whether the deadline of an object depends on more than its `since` and constants."""
        return self.after is not None if self.fixed_length is None else needs_object(self.fixed_length)

    @functools.cached_property
    def has_plan(self) -> bool:
        """Return whether more happens than that the handler acts at the deadline: it has steps, or grace."""
        return bool(self.steps) or self.grace is not None

    @functools.cached_property
    def relations(self) -> tuple[str, ...]:
        """Return what `select_related` takes, so that computing a deadline needs no query for the object."""
        return _relations_on((self.since, self.after))

    @functools.cached_property
    def followed(self) -> tuple[str, ...]:
        """Return the same for `read_relations`, also those on paths of grace, steps and limits, of any attributes."""
        lengths = [each for step in self.steps for each in (step.offset, step.every)]
        return _relations_on((self.since, self.after, self.grace, self.total, *lengths))

    def length_of(self, obj: M | None, in_force: timedelta | None = None) -> Length | None:
        """Return the delay of an object, a timedelta or a span; None: it is exempt, or `after` is missing.

        `obj` and `in_force`: see `due_of`. Raises InvalidDelay.
        """
        length = self.fixed_length
        if length is not None:
            length = resolved(length, obj)
        elif self.after is not None:
            found = found_at(cast("Any", self.after), obj)
            length = None if found is None else as_length(found, f"after of {self.label}")
        return length if length is None or in_force is None else resized(length, in_force)

    def own_time(self, obj: Any, in_force: timedelta | None = None) -> OwnTime:
        """Return the time by which the clock of a timeout runs. `obj`: its object, or the values that `after` reads.

        That of `length_of`; real time also for a timeout whose object is gone, or for which `after` raises.
        """
        length = None
        if obj is not None or not self.needs_object:
            with suppress(Exception):  # `after` of the application: the clock runs on in real time
                length = self.length_of(obj, in_force)
        return OwnTime(length, obj, self.grace is not None)

    def due_of(self, obj: M | None, since_at: datetime | None, in_force: timedelta | None = None) -> datetime | None:
        """Return the deadline of the round that began at `since_at`; None: there is none.

        In a staging installation it is earlier by how much the clock was advanced since then. The arguments and errors
        are those of `declared_due_of`.
        """
        due_at = self.declared_due_of(obj, since_at, in_force)
        ahead = None if due_at is None or since_at is None else registry.advanced(self.concrete_model, since_at)
        return due_at if due_at is None or not ahead else within_calendar(due_at, -ahead)

    def declared_due_of(
        self, obj: M | None, since_at: datetime | None, in_force: timedelta | None = None
    ) -> datetime | None:
        """Return the deadline of the round that began at `since_at` as the policy declares it; None: there is none.

        The object is exempt, `since_at` is None, or the deadline is beyond the supported years: otherwise each save of
        the object would raise. Without `since` that raises InvalidDelay.

        `obj`: an object, the `Values` at all paths of `after`, or None unless the policy `needs_object`. `in_force`:
        the delay by which an operator has replaced `after`; exempt objects stay exempt.
        """
        length = None if since_at is None else self.length_of(obj, in_force)
        if since_at is None or length is None:
            return None
        if self.since is None and is_negative(length):
            raise InvalidDelay(f"after of {self.label} must not be negative, but is {length_text(length)}.")
        start = check_awareness(since_at, f"since of {self.label}")
        if self.since is None and isinstance(length, timedelta):
            return shifted(start, length)
        return end_of(length, start.date() if self.counts_from_date else start, obj)

    def opening(self, moment: datetime, obj: M | None = None) -> datetime:
        """Return when a timeout that would run at `moment` may run by `within`: then, or at the next opening.

        Without `obj`, a calendar that depends on the object does not count: a firing asks again, with it. Raises
        InvalidDelay if the calendar is not open within a year.
        """
        calendar: Any = self.within
        if not is_calendar(calendar):
            calendar = None if obj is None or calendar is None else found_at(calendar, obj)
        return moment if calendar is None else fitting(calendar.next_open(aware(moment)))

    def fits(self, model: type[Model]) -> bool:
        """Return whether rows of `model` (the model itself, a proxy, a multi-table child) belong to this policy."""
        concrete = model._meta.concrete_model
        return concrete is not None and issubclass(concrete, self.concrete_model)

    def is_named(self, name: str) -> bool:
        """Return whether `name` is the name of this policy, or a former one."""
        return name == self.name or name in [alias.rpartition(".")[2] for alias in self.aliases]

    def pk_of(self, obj: Model) -> Any:
        """Return the key of `obj` in this policy's table; a multi-table child may have a different key of its own."""
        return getattr(obj, cast("Any", self.concrete_model._meta.pk).attname)


def _relations_on(given: Iterable[Any]) -> tuple[str, ...]:
    found = [relations_on(each) if isinstance(each, str) else relations_of(each) for each in given]
    return tuple(dict.fromkeys(relation for relations in found for relation in relations))


class _Registry:
    """All declared policies by their labels, current and former."""

    def __init__(self) -> None:
        self._by_label: dict[str, TimeoutPolicy[Any]] = {}
        self.derived: dict[Any, Any] = {}
        """What has been derived from the policies, by the model or the name that was asked for.

        A change sets a new one: a thread that is deriving now may still write its answer into the former one.
        """
        self.advanced: Callable[[type[Model], datetime], timedelta] = lambda _model, _start: timedelta(0)
        """Return by how much the clock was advanced since a time. Set by the app config: see `ledger.advances`."""
        self.connect: Callable[[], object] = lambda: None
        """Connect to the models of the policies. Set by the app config after it has done so itself."""

    def add(self, policy: TimeoutPolicy[Any]) -> None:
        replaced = None
        for label in policy.labels:
            other = self._by_label.get(label)
            if other is not None and _is_reloaded(other, policy):
                replaced = other
            elif other is not None:
                raise PolicyError(
                    f"{label} is declared twice: by {_place(other)} and by {_place(policy)}. "
                    "Give one of them another name=, or take the name out of aliases=."
                )
        if replaced is not None:
            self.remove(replaced)
        self._by_label.update(dict.fromkeys(policy.labels, policy))
        self.derived = {}
        self.connect()

    def remove(self, policy: TimeoutPolicy[Any]) -> None:
        for label in policy.labels:
            if self._by_label.get(label) is policy:
                del self._by_label[label]
        self.derived = {}

    def get(self, label: str) -> TimeoutPolicy[Any] | None:
        return self._by_label.get(label)

    def __iter__(self) -> Iterator[TimeoutPolicy[Any]]:
        return iter(dict.fromkeys(self._by_label.values()))


def _is_reloaded(other: TimeoutPolicy[Any], policy: TimeoutPolicy[Any]) -> bool:
    """Return whether both are one declaration, of a module that `importlib.reload` has executed again.

    Then the handler is another function of the same name. Two functions of one name in one file, of which one was
    copied, begin at different lines.
    """
    is_same = other.label == policy.label and _place(other) == _place(policy)
    return is_same and other.handler is not policy.handler


def _place(policy: TimeoutPolicy[Any]) -> str:
    """Return where the handler of `policy` is, with its line if it is a function of Python."""
    code = getattr(policy.handler, "__code__", None)
    return f"{policy.handler_path}{f' (line {code.co_firstlineno})' if code is not None else ''}"


registry = _Registry()
_NOT_A_NAME = "Name a policy by its name, its label or the policy itself, not by a value of type {}."


def get_policies(model: type[Model] | None = None) -> list[TimeoutPolicy[Any]]:
    """Return all declared policies in order of declaration, or those that saves of `model` concern."""
    if not (model is None or (isinstance(model, type) and issubclass(model, Model))):
        raise TypeError(f"get_policies() takes a model class, not {model!r}.")
    return [policy for policy in registry if model is None or policy.fits(model)]


def declared_queues() -> list[str]:
    """Return the default queue and those of all declared policies, each once."""
    return list(dict.fromkeys(["default", *(policy.queue for policy in registry)]))


def get_policy(policy: str | tuple[type[Model], str] | TimeoutPolicy[Any]) -> TimeoutPolicy[Any]:
    """Return the policy of a label (`"shop.order.cancel_unpaid"`), of `(Order, "cancel_unpaid")` or of an alias.

    A policy itself is returned as it is. Raises UnknownPolicy, whose message suggests similar names.
    """
    if isinstance(policy, TimeoutPolicy):
        return policy
    if isinstance(policy, tuple) and len(policy) == 2 and isinstance(policy[0], type):
        return resolve_policy(policy[1], policy[0])
    if not isinstance(policy, str):
        raise UnknownPolicy(_NOT_A_NAME.format(type(policy).__name__))
    found = registry.get(policy)
    if found is None:
        raise UnknownPolicy(_unknown(policy, [known.label for known in registry]))
    return found


def policies_named(name: str) -> list[TimeoutPolicy[Any]]:
    """Return the policies of all models with this name. Raises UnknownPolicy if there is none."""
    named = [policy for policy in registry if policy.is_named(name)]
    if not named:
        raise UnknownPolicy(_unknown(name, [known.name for known in registry]))
    return named


def resolve_policy(policy: str | TimeoutPolicy[M], model: type[Model]) -> TimeoutPolicy[M]:
    """Return the policy that a name, a label or the policy itself means for `model`. Raises UnknownPolicy."""
    if isinstance(policy, TimeoutPolicy):
        if policy.fits(model):
            return policy
        raise UnknownPolicy(
            _historical(model) or f"{policy.label} is declared for {policy.model.__name__}, not for {model.__name__}."
        )
    if not isinstance(policy, str):
        raise UnknownPolicy(_NOT_A_NAME.format(type(policy).__name__))
    derived = registry.derived
    found: TimeoutPolicy[M] | None = derived.get((policy, model))
    if found is not None:
        return found
    fitting = get_policies(model)
    named = [known for known in fitting if policy in known.labels or known.is_named(policy)]
    # A child's own policy overrides its parent's policy of the same name, like a method; a name overrides an alias.
    mro = list(model.__mro__)
    named.sort(key=lambda known: (mro.index(known.model) if known.model in mro else len(mro), policy != known.name))
    if not named:
        others = [known.model._meta.label for known in registry if policy in known.labels or known.is_named(policy)]
        names = [known.label if "." in policy else known.name for known in fitting]
        words = f"{policy!r} is declared for {' and '.join(dict.fromkeys(others))}, not for {model._meta.label}."
        raise UnknownPolicy(_historical(model) or (words if others else _unknown(policy, names, of=model.__name__)))
    derived[policy, model] = named[0]
    return named[0]


def _historical(model: type[Model]) -> str:
    """Return why no policy concerns `model`, if it is what `apps.get_model` returns in a migration; otherwise ""."""
    if model.__module__ != "__fake__":  # how Django's migrations name the module of such classes
        return ""
    return (
        f"{model._meta.label} is a historical model of a migration: policies are declared for the model of the code, "
        "and in a migration nothing is scheduled or armed. Workers arm automatic policies within SYNC_INTERVAL after "
        "the migration, `manage.py delayq_sync` immediately; schedule others in a management command."
    )


def _unknown(name: str, known: list[str], of: str = "") -> str:
    """Return the message that `name` is not one of `known`, names or labels; it suggests those with a similar name."""
    names = {each: each.rpartition(".")[2] for each in sorted(known)}
    similar = difflib.get_close_matches(name.rpartition(".")[2], {*names.values()})
    near = difflib.get_close_matches(name, [each for each in names if names[each] in similar], cutoff=0)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(names) or 'none'}."
    return f"No timeout policy {name!r}{f' for {of}' if of else ''}. {hint}"


def labels_of(label: str) -> tuple[str, ...]:
    """Return the present label of the policy with `label`, then its former ones; only `label` if it is not declared."""
    policy = registry.get(label)
    return policy.labels if policy else (label,)
