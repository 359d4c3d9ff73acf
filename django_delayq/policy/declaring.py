"""Declare a policy: `@timeout_policy` checks what it is given, so that a wrong one fails at the start."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, TypedDict, Unpack, cast, overload

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.db import models
from django.db.models import Model, Q, QuerySet
from django.db.models.expressions import BaseExpression
from django.db.models.sql import Query

from django_delayq.exceptions import PolicyError, suggestion
from django_delayq.policy.options import MAX_STORED, Brake, Late, Limits, Retry, misfit
from django_delayq.policy.policies import M, TimeoutPolicy, registry
from django_delayq.policy.reads import resolved
from django_delayq.sql.key_types import refusal
from django_delayq.times.calendars import Calendar, is_calendar
from django_delayq.times.clock import LATEST_YEAR, LONGEST, MAX_DURATION
from django_delayq.times.lengths import (
    UNITS,
    amount_paths_of,
    has_wall_time,
    is_negative,
    is_span,
    length_text,
    paths_of,
)
from django_delayq.times.paths import field_at, is_reference, leads_to_attribute, stored_type
from django_delayq.times.spans import Length

if TYPE_CHECKING:
    from dateutil.relativedelta import relativedelta

    from django_delayq.models import Timeout

_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
NAME = re.compile(rf"{_NAME}\Z")
ALIAS = re.compile(rf"{_NAME}(\.{_NAME}\.{_NAME})?\Z")
MODEL_LABEL = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\Z")
SILENCED_BY_POLICY = ("W001", "W002", "W013", "W015", "W016", "W017", "I004")
"""The system checks that report a policy which works as it is declared, if that is what the developer means."""
MAX_LABEL = 200
"""The columns of the ledger hold no more."""
LENGTHS = "a timedelta, a span such as Working(hours=4, calendar=...), a path to a DurationField"
POSITIVE = "a timedelta or span that is longer than nothing"
SINCE = "the name of a field, a path to one or a callable"
MAX_BATCH = 10_000
"""The objects of a batch are locked together: for more, others wait too long."""


def check_call(model: Any, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise PolicyError for a call of `timeout_policy` without a model or with unknown options."""
    is_model = isinstance(model, type) and issubclass(model, Model)
    if not is_model and (isinstance(model, type) or callable(model)):
        name = getattr(model, "__qualname__", repr(model))
        raise PolicyError(
            f"@timeout_policy is given {name}, which is not a model. The model comes first, in parentheses: "
            "@timeout_policy(Order, after=...)."
        )
    for option in [each for each in options if each not in known]:
        hint = suggestion(option, known, f"The options are {', '.join(known)}.")
        if option in UNITS:  # as calls that schedule have them
            value = options[option] if isinstance(options[option], int | float) else "..."
            hint = f"Write after=timedelta({option}={value})."
        raise PolicyError(f"timeout_policy() has no option {option!r}. {hint}")


def check_declaration(policy: TimeoutPolicy[Any]) -> None:
    """Raise `PolicyError` for anything that is wrong regardless of the model's fields."""
    for wrong, message in _faults(policy):
        if wrong:
            raise PolicyError(f"Timeout policy {policy.name!r}: {message}")
    for option in ("when", "hold_when"):
        _read_iterators(getattr(policy, option), policy.name, option)


def _read_iterators(when: Any, policy: str, option: str) -> None:
    """Replace iterators in a condition, such as `map()` or a generator, by lists.

    Each query would read them again, so that the condition would hold for the first query alone. Raises PolicyError for
    one without items: most likely, another condition has read it.
    """
    for place, child in enumerate(when.children if isinstance(when, Q) else ()):
        name, value = child if isinstance(child, tuple) else ("", child)
        if not isinstance(value, Iterator):
            _read_iterators(value, policy, option)
            continue
        items = list(value)
        if not items:
            words = f"{name} in its {option} is an iterator without items, which matches nothing. Give a list."
            raise PolicyError(f"Timeout policy {policy!r}: {words}")
        when.children[place] = (name, items)
    if isinstance(when, BaseExpression) and not isinstance(when, Query):
        for part in when.get_source_expressions():
            _read_iterators(part, policy, option)


def _faults(policy: TimeoutPolicy[Any]) -> Iterator[tuple[bool, str]]:
    model = policy.model
    yield from _faults_of_callables(policy)
    is_model = isinstance(model, type) and issubclass(model, Model)
    is_label = isinstance(model, str) and MODEL_LABEL.match(model) is not None
    yield not (is_model or is_label), f'the model must be a model class or "app.Model", not {model!r}.'
    yield is_model and model._meta.abstract, f"{model} is abstract and has no table; declare one per concrete model."
    yield not NAME.match(str(policy.name)), "a name has letters, digits, _ and - only, and no digit first; give name=."
    yield (
        not all(isinstance(alias, str) and ALIAS.match(alias) for alias in policy.aliases),
        'aliases are former names ("name") or labels ("app.model.name").',
    )
    unknown = [str(each) for each in policy.silenced_checks if check_id(each) not in SILENCED_BY_POLICY]
    yield bool(unknown), f"silenced_checks has {', '.join(unknown)}; it may have {', '.join(SILENCED_BY_POLICY)}."
    yield any(len(label) > MAX_LABEL for label in policy.labels), f"its label is longer than {MAX_LABEL} characters."
    yield from _faults_of_time(policy)
    yield from _faults_of_conditions(policy)
    yield policy.retry is not None and not isinstance(policy.retry, Retry), "retry must be a Retry: Retry([60, 600])."
    yield from _faults_of_sharing(policy)
    yield not _is_count(policy.max_extensions, 0, MAX_STORED), "max_extensions must be an int, 0 or more, or None."
    for option, type_ in (("limits", Limits), ("late", Late), ("brake", Brake)):
        given = getattr(policy, option)
        yield given is not None and not isinstance(given, type_), f"{option} must be a {type_.__name__}, not {given!r}."
    shares_works = policy.limits is not None and policy.counts_by is not None and policy.transaction_size > 1
    words = "Rate(by=...) counts each timeout by the value of its object: give neither batch nor together with it."
    yield shares_works, words
    kept = policy.retention
    is_fitting = kept is None or (isinstance(kept, timedelta) and timedelta(0) <= kept <= MAX_DURATION)
    words = f"retention must be a timedelta from 0 to {MAX_DURATION.days} days, not {kept!r}."
    yield not is_fitting, words
    yield not isinstance(policy.shadow, bool), f"shadow must be True or False, not {policy.shadow!r}."
    yield not isinstance(policy.atomic, bool), f"atomic must be True or False, not {policy.atomic!r}."
    yield (
        not isinstance(policy.queue, str) or not policy.queue or len(policy.queue) > 100 or "\0" in policy.queue,
        f"queue must be a string of 1 to 100 characters, not {policy.queue!r}.",
    )


def _faults_of_conditions(policy: TimeoutPolicy[Any]) -> Iterator[tuple[bool, str]]:
    # The type and not the repr, which would evaluate a queryset in it.
    for option in ("when", "hold_when"):
        given = getattr(policy, option)
        kind = type(given).__name__
        yield given is not None and not isinstance(given, Q), f"{option} must be a Q, not of type {kind}."
    yield policy.hold_when is not None and not policy.hold_when, "hold_when=Q() would hold every timeout for good."
    is_automatic = policy.when is not None and policy.since is not None
    words = "hold_when needs when and since. The clock of a timeout scheduled by hand is stopped by hold_timeout()."
    yield policy.hold_when is not None and not is_automatic, words


def _faults_of_time(policy: TimeoutPolicy[Any]) -> Iterator[tuple[bool, str]]:
    after, since, length = policy.after, policy.since, policy.fixed_length
    is_path = isinstance(after, str) and all(step.isidentifier() for step in after.split("__"))
    is_fitting = after is None or length is not None or is_path or callable(after)
    yield not is_fitting, f"after must be {LENGTHS} or a callable, not {after!r}."
    yield not (since is None or isinstance(since, str) or callable(since)), f"since must be {SINCE}, not {since!r}."
    negative = length_text(length) if length is not None and is_negative(length) else ""
    yield bool(negative) and since is None, f"after must not be negative without since, but is {negative}."
    within: Any = policy.within
    is_fitting = within is None or isinstance(within, str) or is_calendar(within) or callable(within)
    yield not is_fitting, f"within must be a calendar, a path to one or a callable, not {within!r}."
    too_long = isinstance(after, timedelta) and not -LONGEST < after < LONGEST
    yield too_long, f"after must be shorter than {LONGEST.days // 365} years, or each deadline is after {LATEST_YEAR}."
    yield any(inspect.iscoroutinefunction(one) for one in (after, since)), "after and since cannot be async."
    grace: Any = policy.grace
    is_fitting = grace is None or is_span(grace) or (isinstance(grace, timedelta) and timedelta(0) < grace < LONGEST)
    yield not is_fitting or (grace is not None and is_negative(grace)), f"grace must be {POSITIVE}, not {grace!r}."


def _faults_of_sharing(policy: TimeoutPolicy[Any]) -> Iterator[tuple[bool, str]]:
    for option in ("batch", "together"):
        given = getattr(policy, option)
        yield not _is_count(given, 1, MAX_BATCH), f"{option} must be an int from 1 to {MAX_BATCH}, or None."
        yield (
            given is not None and not policy.atomic,
            f"{option} needs atomic=True: its timeouts share one transaction.",
        )
    both = "give batch, for one call with a queryset, or together, for one call for each object, but not both."
    yield policy.batch is not None and policy.together is not None, both
    by = policy.batch_by
    yield by is not None and not isinstance(by, str), f"batch_by must be the name of a column or a path, not {by!r}."
    yield by is not None and policy.batch is None, "batch_by needs batch: the most objects that one call gets."
    words = "batch_by fires all due timeouts of a value at once, which a rate does not allow: give no Rate with it."
    yield by is not None and isinstance(policy.limits, Limits) and policy.rate is not None, words


def check_id(given: Any) -> str:
    """Return the id of a system check without the label of this app, with which settings have it."""
    return str(given).removeprefix("django_delayq.")


def _faults_of_callables(policy: TimeoutPolicy[Any]) -> Iterator[tuple[bool, str]]:
    handler = policy.handler
    yield not callable(handler), f"the handler must be a function, not {handler!r}."
    arguments = ("queryset", "timeouts") if policy.batch else ("obj", "timeout")
    called: dict[str, tuple[Any, Sequence[str]]] = {"the handler": (handler, arguments)}
    for option in ("after", "since", "within"):
        given = getattr(policy, option)
        is_value = is_span(given) or is_calendar(given)
        called |= {} if is_value else {option: (given, ("obj",))}
    for name, (one, taken) in called.items():
        if callable(one):
            wrong = misfit(one, taken)
            yield bool(wrong), f"{name} {wrong}"


def _is_count(value: Any, least: int, most: int) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most)


def check_against_model(policy: TimeoutPolicy[Any]) -> None:
    """Raise `PolicyError` if an option that names fields does not fit those of the model."""
    model: Any = policy.model
    if isinstance(model, str):
        try:
            model = apps.get_model(model)
        except LookupError as error:
            raise PolicyError(f"Timeout policy {policy.name!r}: there is no model {policy.model!r}.") from error
        object.__setattr__(policy, "model", model)
    if words := refusal(model):
        raise PolicyError(f"Timeout policy {policy.label}: {words}")
    _check_time(policy)
    for option, condition in (("when", policy.when), ("hold_when", policy.hold_when)):
        try:
            resolved(model, condition or Q())
        except (FieldError, ValidationError, ValueError, TypeError) as error:
            # Without the value, whose text would evaluate a queryset in it.
            raise PolicyError(f"Timeout policy {policy.label}: its {option} does not fit: {error}") from error
    values = [(option, path) for option, path in (("by", policy.counts_by), ("batch_by", policy.batch_by)) if path]
    searchable = _of(models.CharField, models.TextField, models.IntegerField, models.UUIDField)
    for path in policy.search:
        _check_field(policy, "search", path, "a field of strings, integers or UUIDs", searchable)
    for option, path in values:
        _check_field(policy, option, path, "a column, or a path over foreign keys to one,", _is_column)
    if policy.owner is not None:
        _check_field(policy, "owner", policy.owner, "a path of foreign keys", is_reference)
        if words := refusal(field_at(model, policy.owner).related_model):
            raise PolicyError(f"Timeout policy {policy.label}: owner={policy.owner!r}: {words}")


def _check_time(policy: TimeoutPolicy[Any]) -> None:
    """Raise `PolicyError` if `since`, `after` or `within` has a wrong path, or `after` cannot count from a date."""
    if isinstance(policy.since, str):
        _check_field(policy, "since", policy.since, "a DateTimeField or DateField", _of(models.DateField))
    length, paths = policy.fixed_length, list[tuple[str, Any]]()
    is_without_time = length is not None and not has_wall_time(length)
    if isinstance(policy.after, str):
        _check_field(policy, "after", policy.after, "a DurationField", _of(models.DurationField))
        is_without_time = True
    number = _of(models.IntegerField, models.FloatField, models.DecimalField)
    for path in amount_paths_of(length) if length is not None else ():
        _check_field(policy, "after", path, "a field of numbers", number)
    if policy.counts_from_date and (policy.after is None or is_without_time):
        words = f"since={policy.since!r} has dates, so after needs a time of day, such as Wall(at=...)."
        raise PolicyError(f"Timeout policy {policy.label}: {words}")
    paths += [("after", path) for path in (paths_of(length) if length is not None else ())]
    paths += [("within", policy.within)] if isinstance(policy.within, str) else []
    for option, path in paths:
        if not leads_to_attribute(policy.model, path):
            words = f"{path!r} in its {option} is neither an attribute of {policy.model.__name__}, nor a path to one."
            raise PolicyError(f"Timeout policy {policy.label}: {words}")


def _check_field(policy: TimeoutPolicy[Any], option: str, path: str, rule: str, accepts: Callable[[Any], bool]) -> None:
    """Raise `PolicyError` unless `path` is a field that `accepts`, or leads to one over foreign keys."""
    model = policy.model
    try:
        fits = accepts(field_at(model, path))
    except (FieldDoesNotExist, AttributeError):  # the latter: not a string
        fits = False
    if not fits:
        known = [field.name for field in model._meta.concrete_fields if accepts(field)]
        hint = suggestion(path, known, f"It has: {', '.join(known) or 'none'}.")
        words = f"{option}={path!r} is not {rule} of {model.__name__}. {hint}"
        raise PolicyError(f"Timeout policy {policy.label}: {words}")


def _of(*kinds: type[models.Field[Any, Any]]) -> Callable[[Any], bool]:
    """Return a function of a field: whether it is a column of one of these types, or of one of their kinds."""
    return lambda field: bool(field.concrete) and isinstance(stored_type(field), kinds)


def _is_column(field: Any) -> bool:
    return bool(field.concrete and not field.many_to_many and not isinstance(stored_type(field), models.BinaryField))


def register_policy(policy: TimeoutPolicy[M]) -> TimeoutPolicy[M]:
    """Declare `policy`, as the decorator does, and return it. Raises PolicyError."""
    if not isinstance(policy, TimeoutPolicy):
        raise PolicyError(
            f"register_policy() takes a TimeoutPolicy, not {policy!r}. To declare a function, decorate it: "
            "@timeout_policy(Order, after=...)."
        )
    check_declaration(policy)
    if apps.models_ready:  # otherwise the app config checks it
        check_against_model(policy)
    registry.add(policy)
    return policy


class _Options(TypedDict, Generic[M], total=False):
    """The options of `timeout_policy` for type checkers, without `batch` and `batch_by`.

    The type of the handler depends on `batch`, which `batch_by` needs.
    """

    name: str | None
    after: Length | relativedelta | str | Callable[[M], Length | None] | None
    since: str | Callable[[M], datetime | None] | None
    when: Q | None
    hold_when: Q | None
    retry: Retry | None
    together: int | None
    atomic: bool
    queue: str
    max_extensions: int | None
    aliases: Iterable[str]
    limits: Limits | None
    late: Late | None
    brake: Brake | None
    shadow: bool
    search: str | Iterable[str]
    owner: str | None
    silenced_checks: str | Iterable[str]
    within: Calendar | str | Callable[[M], Calendar | None] | None
    grace: Length | relativedelta | None
    retention: timedelta | None


@overload
def timeout_policy(
    model: type[M], *, batch: None = None, **options: Unpack[_Options[M]]
) -> Callable[[Callable[[M, Timeout], object]], TimeoutPolicy[M]]: ...
@overload
def timeout_policy(
    model: type[M], *, batch: int, batch_by: str | None = None, **options: Unpack[_Options[M]]
) -> Callable[[Callable[[QuerySet[M], list[Timeout]], object]], TimeoutPolicy[M]]: ...
@overload
def timeout_policy(
    model: str, *, batch: int | None = None, batch_by: str | None = None, **options: Unpack[_Options[Any]]
) -> Callable[[Callable[[Any, Any], object]], TimeoutPolicy[Any]]: ...
def timeout_policy(model: type[Any] | str, **options: Any) -> Callable[[Any], TimeoutPolicy[Any]]:
    """Declare what happens to an object of `model` if something else has not happened by a deadline.

    Put it into `timeouts.py` of any installed app. With both `when` and `since` the policy is automatic:
    saving an object arms it while `when` holds, moves it when the value of `since` changes and cancels it
    when `when` stops holding; deleting the object cancels. Writing a related row that the policy reads does the same.
    Any other policy is scheduled by hand.

    Args:
        model: a model class, or `"app.Model"`; with its proxies and the models that inherit its table.
        name: unique per model, the last part of the label `shop.order.cancel_unpaid`; by default that of the function.
        after: the delay from `since` (without one: from the call that schedules it) to the deadline: a timedelta, a
            span (`Working`, `Wall`, a relativedelta, or an object with `end(since, obj)`), the name of a
            `DurationField` or a path to one over foreign keys, such as `"channel__pay_within"` (NULL: this object is
            exempt), or a callable `obj -> timedelta or span or None`. Negative, only with `since`: the deadline is
            before it. Without `after` each call that schedules needs a delay.
        since: name of a `DateTimeField`, of a `DateField` if `after` has a time of day, a path to one over foreign
            keys, such as `"event__starts_at"`, or a callable `obj -> datetime | None` (None: not yet). Write
            `since=None` for a policy with `when` and `after` that is scheduled by hand: otherwise a check asks for it.
        when: a `Q` on columns of the object or of related rows, checked again on the locked object at the deadline.
            `Q()`: always.
        hold_when: a `Q` like `when`, for an automatic policy: while it holds, the clock of the timeout is stopped, and
            nothing fires. The rest of its time is kept, and counts from when it stops holding.
        retry: when a failed handler is retried; `DELAYQ["RETRY"]` by default.
        batch: the handler gets `(queryset, timeouts)` of up to this many objects instead of one.
        batch_by: a column, or a path over foreign keys to one, such as `"customer"`: each call gets the due timeouts of
            one value, all of them (more than `batch`: several calls). NULL: each is alone. Needs `batch`.
        together: up to this many timeouts share a transaction, for speed: the handler is called for each in due order.
            Only for handlers that change nothing but their own row.
        atomic: False: the handler runs outside a transaction, at least once, for slow external effects.
        queue: which workers serve it (`delayq_worker --queue`).
        max_extensions: how often `extend_timeout` may move one deadline, at most 32,000; None: without limit.
        aliases: former names or labels, the oldest first, so that rows scheduled before a rename are found and fired.
        limits: how long its handler may run, how often attempts may begin, how often a timeout may snooze, how far the
            application may move a deadline.
        late: what happens to a timeout that would fire too long after its deadline.
        brake: pause the policy when too many of its timeouts fire within a period.
        shadow: True: do everything but call the handler; rounds settle as `skipped`, cause `shadow`.
        search: a field, or several, by which people find timeouts, such as `"number"` or `"order__number"`.
        owner: the path to the owner of an object, such as `"customer"`, whose timeouts the admin shows together.
        silenced_checks: ids of system checks that are not to report this policy, such as `"W001"`.
        within: a calendar, a path to one or a callable `obj -> calendar`, outside of whose opening hours nothing fires:
            a due timeout waits for the next opening. The deadline that people see stays.
        grace: a timedelta or span: the handler acts so long after the deadline that people see.
        retention: how long settled rows are kept; `DELAYQ["RETENTION"]` by default.
        **options: another option is refused, with a suggestion.

    Returns:
        A decorator. Handlers take `(obj, timeout)`, or `(queryset, timeouts)` with `batch`, and may be async.

    Raises:
        PolicyError: when the declaration is wrong (fields of models not yet loaded: at start).
    """
    check_call(model, options, list(_OPTIONS))

    def declare(handler: Callable[..., Any]) -> TimeoutPolicy[Any]:
        policy = TimeoutPolicy[Any](model=cast("Any", model), handler=handler, **options)
        object.__setattr__(policy, "names_since", "since" in options)
        return register_policy(policy)

    return declare


# Callers see the model, and the fields of a policy as options.
_SIGNATURE, _OPTIONS = inspect.signature(timeout_policy), dict(inspect.signature(TimeoutPolicy).parameters)
del _OPTIONS["model"], _OPTIONS["handler"]
_SIGNATURE = _SIGNATURE.replace(parameters=[_SIGNATURE.parameters["model"], *_OPTIONS.values()])
timeout_policy.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
