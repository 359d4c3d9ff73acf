"""Find the objects of a table whose timeouts do not fit, page by page and without locks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from django.db.models import F, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Coalesce, Concat, Left
from django.db.models.lookups import Exact, In

from django_delayq.arming.changes import Arming, Failures, is_of_one_object
from django_delayq.arming.reconcile import diff
from django_delayq.arming.row_state import (
    CLOSING,
    RowState,
    condition_value,
    has_none,
    has_some,
    on_hold_among,
    pending_rounds,
)
from django_delayq.conf import get_settings
from django_delayq.ledger.controls import holds_ended, read_delay
from django_delayq.ledger.subjects import key_of, kind_of, object_id
from django_delayq.models import Timeout
from django_delayq.policy.reads import since_name, with_since
from django_delayq.policy.terms import has_column, lacks_none, prefix, terms_column
from django_delayq.sql.key_types import HAS_KEY, keys_in, root_of_key
from django_delayq.sql.statements import CHUNK, chunks
from django_delayq.times import clock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django_delayq.policy.policies import TimeoutPolicy


class Step(NamedTuple):
    """What one page of a scan shows. It was read without locks, so `repair` decides again."""

    wrong: list[Any]
    """The keys of objects whose timeouts do not fit, most likely."""
    place: Any = None
    """The key of the last object of the page, after which another scan can continue; None: it cannot."""
    checked: int = 0
    too_old: int = 0
    may_be_gone: bool = False


def steps(policy: TimeoutPolicy[Any], how: Arming, after: Any = None) -> Iterator[Step]:
    """Compare the table of `policy` with the ledger, page by page and without locks.

    Where `since` is in SQL and `after` a timedelta, the database finds the few rows that do not fit. Where one of them
    is a callable or a span, each object that may lack a round is read, page by page from the one after the key `after`.
    """
    using, oldest = how.using, how.oldest
    is_constant = isinstance(policy.after, timedelta | None) and isinstance(policy.grace, timedelta | None)
    if callable(policy.since) or not is_constant:
        yield from _checked(policy, how, after)
    else:
        delay = _delay(policy, using)
        for ids in () if oldest is None or delay is None else _moved(policy, using, oldest, delay):
            keys = _lacking(policy, using, delay).filter(pk__in=ids).values_list("pk", flat=True)
            yield Step(list(dict.fromkeys(keys)))
        keys = candidates(policy, using, oldest, delay).values_list("pk", flat=True)
        page = list(keys[:CHUNK])
        while page:
            yield Step(list(dict.fromkeys(page)))  # a condition on other rows may repeat a key
            page = list(keys.filter(pk__gt=page[-1])[:CHUNK]) if len(page) == CHUNK else []
    yield from (Step(page, may_be_gone=True) for page in _mismatched(policy, using))
    yield from map(Step, _with_wrong_clock(policy, using))


def _checked(policy: TimeoutPolicy[Any], how: Arming, place: Any) -> Iterator[Step]:
    """Read the objects that may lack a round, or have one of another `since`, and let the callables decide."""
    using = how.using
    rows = candidates(policy, using)
    rows = rows.select_related(*policy.relations) if policy.relations else rows  # without arguments: all of them
    in_force = None if policy.after is None else read_delay(policy, using)
    to_python = root_of_key(policy.concrete_model).to_python
    while True:
        keys, page = _read(rows if place is None else rows.filter(pk__gt=place), how.failures)
        objects = {to_python(obj.pk): obj for obj in page}  # fewer, if a condition on other rows repeats some
        # With a column `since`, the query has left out the objects whose rounds are pending.
        pending = pending_rounds([policy], objects, using) if callable(policy.since) else {}
        states = []
        for pk, obj in objects.items():
            since_at = None if callable(policy.since) else policy.since_of(obj)
            states.append(RowState(pk, policy, True, since_at, in_force, *pending.get((policy.label, pk), ())[:2]))
        changes = diff(states, how, {policy.model: objects})
        place = keys[-1] if len(keys) == CHUNK else None
        yield Step(changes.pks, place, len(set(keys)), changes.too_old)
        if place is None:
            return


def _read(rows: QuerySet[Any], failures: Failures | None) -> tuple[list[Any], list[Any]]:
    """Return the keys of the first page of `rows`, and its objects without those that cannot be read."""
    try:
        page = list(rows[:CHUNK])
    except Exception as error:
        if failures is None or not is_of_one_object(error):
            raise
    else:
        return [obj.pk for obj in page], page
    keys, objects = list(rows.values_list("pk", flat=True)[:CHUNK]), list[Any]()
    for pk in dict.fromkeys(keys):
        with failures.counting(pk):
            objects += rows.filter(pk=pk)[:1]
    return keys, objects


def candidates(
    policy: TimeoutPolicy[Any], using: str, oldest: timedelta | None = None, delay: timedelta | None = None
) -> QuerySet[Any]:
    """Return the rows that match `policy`, by key, without those that fit according to the database.

    Also without those whose rounds are too old to be armed, if `since` is a column and `after` a constant. `delay`: the
    one in force, if the caller has read it.
    """
    delay = delay or _delay(policy, using)
    rows = _lacking(policy, using, delay)
    if oldest is not None and delay is not None:
        begin = clock.now() - delay
        # A round that its condition has ended has a row, and is armed up to CATCH_UP. These rows are looked up only
        # for the objects of that time: there may be very many older ones.
        since = since_name(policy)
        rows = rows.filter(**{f"{since}__gt": begin - max(oldest, get_settings().catch_up)})
        ended = _rounds(policy, using).filter(cause=Timeout.Cause.CONDITION, since_at=OuterRef(str(since)))
        rows = rows.filter(Q(**{f"{since}__gt": begin - oldest}) | Q(has_some(ended)))
    return rows


def _delay(policy: TimeoutPolicy[Any], using: str) -> timedelta | None:
    """Return the constant delay in force, with the grace; None: there is none, or `since` is not a column."""
    grace = policy.grace or timedelta(0)
    if not (isinstance(policy.since, str) and isinstance(policy.after, timedelta) and isinstance(grace, timedelta)):
        return None
    in_force = read_delay(policy, using)
    return (policy.after if in_force is None else in_force) + min(grace, get_settings().retention / 2)


def _lacking(policy: TimeoutPolicy[Any], using: str, delay: timedelta | None) -> QuerySet[Any]:
    """Return the rows that match `policy`, by key; without a callable `since`, those that lack a round, of any age.

    `delay`: see `candidates`.
    """
    rows: QuerySet[Any] = policy.model._base_manager.using(using).filter(policy.when or Q()).order_by("pk")
    since = since_name(policy)
    if since is None:
        return rows
    rows = with_since(rows, policy)
    fitting = Q(slot_taken=1) | CLOSING & Q(since_at=OuterRef(since))
    # Without NULL, and without datetimes that mean "never": each sync would lock and check such rows again.
    rows = rows.filter(lacks_none(policy))
    latest = clock.latest_start(max(delay or timedelta(0), timedelta(0)))
    rows = rows.filter(**{f"{since}__lt": latest})
    return rows.filter(has_none(_rounds(policy, using).filter(fitting)))


def _rounds(policy: TimeoutPolicy[Any], using: str) -> QuerySet[Any]:
    """Return the rounds of the object of the surrounding query."""
    model = policy.concrete_model
    rows: QuerySet[Any] = Timeout.objects.using(using).filter(
        In(Concat("policy", Value("")), policy.labels),  # not by `delayq_policy`, which has all rows of the policy
        content_type=kind_of(model, using),
        object_id=object_id(OuterRef(cast("Any", model._meta.pk).name), model, using),
        key="",
    )
    return rows


def _moved(policy: TimeoutPolicy[Any], using: str, oldest: timedelta, delay: timedelta) -> Iterator[Sequence[Any]]:
    """Yield pages of keys of objects whose condition has ended a round with a deadline beyond those of `candidates`.

    That deadline was moved, which the ledger shows, and not the table of the objects.
    """
    now = clock.now()
    latest = now - max(oldest, get_settings().catch_up)
    held = holds_ended(policy, now - get_settings().kept_for(policy.retention), using)
    due = latest - sum((end - begin for begin, end in held), timedelta(0))  # these have not moved the settled rows
    states = (Timeout.State.CANCELLED, Timeout.State.SKIPPED)
    rows = Timeout.objects.using(using).of_labels(policy.labels).filter(state__in=states, run_at__gt=due, key="")
    rows = rows.filter(since_at__lte=latest - delay, cause=Timeout.Cause.CONDITION)
    yield from chunks(list(keys_in(policy.concrete_model, rows.values_list("object_id", flat=True)).values()))


def _mismatched(policy: TimeoutPolicy[Any], using: str) -> Iterator[list[Any]]:
    """Yield pages of keys of rows that no longer fit their pending round."""
    model, since = policy.concrete_model, since_name(policy)
    text = object_id(F(cast("Any", model._meta.pk).name), model, using)
    for waiting, on_hold in _by_clock(policy, using):
        rows: QuerySet[Any] = policy.model._base_manager.using(using).filter(policy.when or Q())
        if on_hold is not None:
            rows = rows.filter(Exact(condition_value(policy, policy.hold_when, using), int(on_hold)))
        if since is not None:
            rows = with_since(rows, policy).filter(**{since: OuterRef("since_at")})
        rows = _with_same_data(policy, rows, using).filter(pk=key_of(OuterRef("object_id"), model, using))
        rows = rows.filter(Exact(text, OuterRef("object_id")))  # several ids may have one key
        yield from filter(None, _pages(policy, waiting.filter(has_none(rows))))


def _with_same_data(policy: TimeoutPolicy[Any], rows: QuerySet[Any], using: str) -> QuerySet[Any]:
    """Return those of `rows` whose data is that of the deadline of the pending round, the surrounding query."""
    if not has_column(policy):
        return rows
    is_other_code = ~Exact(Left(Coalesce(OuterRef("terms"), Value("")), len(prefix(policy))), prefix(policy))
    rows = rows.alias(delayq_terms=terms_column(policy, using))
    is_same: QuerySet[Any] = rows.filter(Q(delayq_terms=OuterRef("terms")) | is_other_code)
    return is_same


def _by_clock(policy: TimeoutPolicy[Any], using: str) -> Iterator[tuple[QuerySet[Any], bool | None]]:
    """Yield the waiting rounds of `policy`, and what `hold_when` must be for their objects; None: either."""
    rows = Timeout.objects.using(using).of_labels(policy.labels).filter(key="")
    if policy.hold_when is None:
        yield rows.waiting(), None
        return
    yield rows.pending(), False
    yield rows.held().filter(Q(held_by_hand=False) | Q(held_when=True)), True
    yield rows.held().filter(held_by_hand=True, held_when=False), False


def _with_wrong_clock(policy: TimeoutPolicy[Any], using: str) -> Iterator[list[Any]]:
    """Yield pages of keys of objects that have rounds with a key whose clock must be stopped, or must run."""
    rows = Timeout.objects.using(using).of_labels(policy.labels).filter(HAS_KEY, held_by_hand=False)
    for clocks, is_stopped in () if policy.hold_when is None else ((rows.pending(), False), (rows.held(), True)):
        for page in _pages(policy, clocks):
            on_hold = set(on_hold_among(policy, page, using))
            if wrong := [pk for pk in page if (pk in on_hold) != is_stopped]:
                yield wrong


def _pages(policy: TimeoutPolicy[Any], rounds: QuerySet[Any]) -> Iterator[list[Any]]:
    """Yield the keys of the objects of `rounds`, page by page; firing settles those that no object can have."""
    last = 0
    while page := list(rounds.filter(pk__gt=last).order_by("id").values_list("id", "object_id")[:CHUNK]):
        last = page[-1][0]
        yield list(keys_in(policy.concrete_model, [object_id_ for _, object_id_ in page]).values())
