"""Declarations that are refused or reported before the first deadline, and declarations that must keep working."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import AppConfig, apps
from django.core.checks import run_checks
from django.db import connection
from django.db.migrations.state import ProjectState
from django.db.models import Case, Exists, F, OuterRef, Q, QuerySet, When
from django.db.models.expressions import RawSQL
from django.db.models.fields import BooleanField
from django.utils import timezone

import django_delayq as dq
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from django_delayq.policy.reads import columns_read
from tests.integration.firing.conftest import due, fire, state
from tests.testapp.conditions import NotHidden
from tests.testapp.models import (
    Archived,
    Customer,
    ExpressOrder,
    Item,
    ManagedNotHidden,
    ManagedWithCount,
    Order,
    Removable,
    Task,
)

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)


def warnings(*ids: str) -> list[str]:
    """Return those `ids` that the checks report."""
    found = [str(message.id).removeprefix("django_delayq.") for message in run_checks(tags=["django_delayq"])]
    return [name for name in found if name in ids]


@pytest.mark.parametrize(
    ("model", "when", "ids"),
    [
        (Task, Q(kids__isnull=True), []),
        (Task, Q(parent__status="open"), []),
        (Task, ~Q(kids__status="open"), []),
        (Task, Q(owner__vip=True), []),
        (Task, Q(owner__in=Customer.objects.filter(vip=True)), ["W001"]),
        (Task, Q(Exists(Item.objects.filter(task=OuterRef("pk")))), ["W001"]),
        (Task, ~Q(Exists(Customer.objects.all())), ["W001"]),
        (Task, Q(tags__name="late"), []),
        (ManagedWithCount, Q(peers__gt=1), ["W001"]),
        (ManagedWithCount, Q(of_vip=True), ["W001"]),
        (ManagedNotHidden, Q(), ["W001"]),
        (Order, Q(expressorder__courier="x"), []),
    ],
)
def test_a_condition_that_reads_other_rows_is_asked_on_every_save_and_warned_of_if_it_cannot_be_watched(
    declare: Declare, model: Any, when: Q, ids: list[str], django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):  # a queryset in the condition must not be read while Django starts
        policy = declare(model, name="related", after=HOUR, since=None, when=when)
    assert warnings("W001") == ids
    assert columns_read(policy) is None


@pytest.mark.parametrize(
    ("model", "when", "fields"),
    [
        (Task, Q(status="open"), {"status"}),
        (Task, Q(parent__isnull=True), {"parent", "parent_id"}),
        (Task, Q(parent__id=7), {"parent", "parent_id"}),
        (Task, Q(status__in=["x", F("note")]), {"status", "note"}),
        (Task, Q(amount__range=(0, F("bound"))), {"amount", "bound"}),
        (Task, Q(doubled=2), {"doubled", "amount"}),
        (Task, Q(data__paid=True), {"data"}),
        (ManagedWithCount, Q(size=4), {"amount", "bound"}),
        (ExpressOrder, Q(status="unpaid", courier="x"), {"status", "courier"}),
    ],
)
def test_a_condition_on_own_columns_is_not_warned_of(declare: Declare, model: Any, when: Q, fields: set[str]) -> None:
    policy = declare(model, name="own", after=HOUR, when=when)
    assert warnings("W001") == []
    assert set(columns_read(policy) or ()) == fields


def test_raw_sql_may_read_any_column(declare: Declare) -> None:
    raw = RawSQL(f"{connection.ops.quote_name('testapp_task')}.status = %s", ["open"], output_field=BooleanField())
    assert columns_read(declare(Task, name="raw", after=HOUR, when=Q(raw))) is None


def test_since_may_be_a_generated_field_and_follows_the_columns_that_it_is_made_of(declare: Declare) -> None:
    now = timezone.now().replace(microsecond=0)
    policy = declare(Task, name="generated", after=HOUR, since="counted_from", when=Q(doubled__lt=10))
    task = Task.objects.create(begun_at=now)
    assert dq.get_deadline(task, policy) == now + HOUR
    task.resumed_at = now + HOUR
    task.save(update_fields=["resumed_at"])
    assert dq.get_deadline(task, policy) == now + 2 * HOUR
    task.amount = 5
    task.save(update_fields=["amount"])
    assert dq.get_deadline(task, policy) is None
    Task.objects.update(amount=0)
    assert dq.sync_timeouts(Task.objects.all()) == 1
    row = dq.schedule_timeout(task, policy)
    assert row.since_at == now + HOUR


def test_since_that_is_generated_but_no_datetime_is_refused(declare: Declare) -> None:
    with pytest.raises(dq.PolicyError, match="'doubled' is not a DateTimeField or DateField of Task"):
        declare(Task, name="generated", after=HOUR, since="doubled", when=Q())


@pytest.mark.parametrize(
    "condition",
    [
        lambda states: Q(status__in=states),
        lambda states: Q(amount=0) & ~Q(Q(note="x") | ~Q(status__in=states)),
        lambda states: Q(Case(When(status__in=states, then=True), default=False, output_field=BooleanField())),
        lambda states: Q(kids=None) & Q(Exists(Task.objects.filter(pk=OuterRef("pk"), status__in=states))),
    ],
)
@pytest.mark.parametrize("make", [iter, lambda states: map(str, states), lambda states: (each for each in states)])
def test_an_iterator_in_a_condition_matches_each_time_that_it_is_asked(
    declare: Declare, condition: Any, make: Any
) -> None:
    policy = declare(Task, name="iterator", after=HOUR, since="begun_at", when=condition(make(["open", "asked"])))
    open_, asked, other = (
        Task.objects.create(begun_at=timezone.now(), status=status) for status in ("open", "asked", "done")
    )
    assert dq.pending_timeouts(open_, policy).count() == dq.pending_timeouts(asked, policy).count() == 1
    assert dq.pending_timeouts(other, policy).count() == 0
    assert Task._base_manager.filter(policy.when or Q()).count() == 2


def test_an_iterator_that_has_been_read_before_is_refused(declare: Declare) -> None:
    is_open = Q(status__in=map(str, ["open"]))
    declare(Task, name="one", after=HOUR, since="begun_at", when=Q(amount=0) & is_open)
    with pytest.raises(dq.PolicyError, match=r"'two': status__in in its when is an iterator without items.*list"):
        declare(Task, name="two", after=HOUR, since="begun_at", when=Q(amount=1) & is_open)
    shared = Q(status__in=map(str, ["open"]))
    for name in ("three", "four"):
        assert "open" in str(declare(Task, name=name, after=HOUR, since="begun_at", when=shared).when)


def test_a_forgotten_since_is_noted_and_none_that_is_written_out_is_not(declare: Declare) -> None:
    declare(Task, name="by_hand", after=HOUR, when=Q(), since=None)
    declare(Task, name="delay_of_its_own", when=Q())
    declare(Task, name="unconditional", after=HOUR)
    declare(Task, name="automatic", after=HOUR, when=Q(), since="begun_at")
    dq.register_policy(built := dq.TimeoutPolicy(model=Task, name="built", after=HOUR, when=Q(), handler=print))
    registry.remove(built)
    assert warnings("I004") == []
    policy = declare(Task, name="forgotten", after=HOUR, when=Q())
    (message,) = [one for one in run_checks(tags=["django_delayq"]) if one.id == "django_delayq.I004"]
    assert (message.obj, message.is_serious()) == (policy, False)
    assert str(message).count("\n") == 1, "a line and its hint, as each command prints it"
    assert inspect.signature(dq.timeout_policy).parameters["since"].default is None


@pytest.mark.parametrize("silenced", ["W001", "django_delayq.W001", ["W001", "I004"]])
def test_a_policy_silences_a_check_for_itself(declare: Declare, silenced: Any) -> None:
    options: dict[str, Any] = {
        "after": HOUR,
        "since": None,
        "when": Q(Exists(Item.objects.filter(task=OuterRef("pk")))),
    }
    declare(Task, name="known", silenced_checks=silenced, **options)
    assert warnings("W001") == []
    other = declare(Task, name="other", **options)
    (message,) = [one for one in run_checks(tags=["django_delayq"]) if one.id == "django_delayq.W001"]
    assert message.obj == other
    assert "other rows" in str(message)
    assert str(message).count("\n") == 1


@pytest.mark.parametrize("wrong", ["W0001", "E004", ["W001", "W014"], 1, [None]])
def test_only_warnings_of_declarations_can_be_silenced(declare: Declare, wrong: Any) -> None:
    with pytest.raises(dq.PolicyError, match="silenced_checks has .*; it may have W001, "):
        declare(Task, name="known", after=HOUR, silenced_checks=wrong)


def test_since_without_when_is_warned_of(declare: Declare) -> None:
    declare(Task, name="beginner", after=HOUR, since="begun_at")
    assert warnings("W013") == ["W013"]
    (message,) = [one for one in run_checks(tags=["django_delayq"]) if one.id == "django_delayq.W013"]
    assert "not automatic" in message.msg
    assert "when=Q()" in str(message.hint)


def test_with_when_or_without_since_nothing_is_warned_of(declare: Declare) -> None:
    declare(Task, name="automatic", after=HOUR, since="begun_at", when=Q())
    declare(Task, name="by_hand", after=HOUR)
    assert warnings("W013") == []


@pytest.mark.parametrize(
    ("model", "when", "expected"),
    [
        (Removable, Q(status="open"), ["W015"]),
        (Removable, None, ["W015"]),
        (Removable, Q(status="open", deleted_at__isnull=True), []),
        (Archived, Q(status="open"), ["W015"]),
        (Archived, Q(status="open", archive=""), []),
        (ManagedNotHidden, Q(status="open"), []),
        (Task, Q(status="open"), []),
    ],
)
def test_a_condition_that_forgets_soft_deletion_is_warned_of(
    declare: Declare, model: Any, when: Q | None, expected: list[str]
) -> None:
    declare(model, name="soft", after=HOUR, when=when)
    assert warnings("W015") == expected


def test_a_default_manager_that_raises_does_not_stop_the_checks(
    declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_a_request(self: Any) -> Any:
        raise RuntimeError("no tenant")

    monkeypatch.setattr(type(Archived._default_manager), "get_queryset", needs_a_request)
    declare(Archived, name="soft", after=HOUR, when=Q(status="open"))
    assert warnings("W015") == []


class CallableObject:
    def __call__(self, task: Any, timeout: Any) -> None:
        self.ran = task.pk


class AsyncCallable:
    async def __call__(self, task: Any, timeout: Any) -> None:
        self.ran = task.pk


def with_an_extra(extra: list[Any], task: Any, timeout: Any) -> None:
    extra.append(task.pk)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (lambda task: None, "is called with (obj, timeout), but takes (task): too many"),
        (lambda: None, "but takes ()"),
        (lambda self, task, timeout: None, "missing a required argument: 'timeout'"),
        (lambda task, timeout, *, reason: None, "'reason'"),
        (functools.partial(with_an_extra, [], None), "but takes (timeout"),
        (CallableObject, "is a class"),
        (lambda task, timeout: (yield), "`yield`"),
        ("shop.tasks.cancel", "must be a function, not 'shop.tasks.cancel'"),
    ],
)
def test_a_handler_that_cannot_be_called_is_refused_when_it_is_declared(
    declare: Declare, handler: Any, says: str
) -> None:
    with pytest.raises(dq.PolicyError) as caught:
        declare(Task, handler, name="wrong")
    assert says in str(caught.value)
    assert "wrong" in str(caught.value)


def test_a_batch_handler_with_one_argument_is_refused(declare: Declare) -> None:
    with pytest.raises(dq.PolicyError, match=r"\(queryset, timeouts\), but takes \(tasks\)"):
        declare(Task, lambda tasks: None, name="wrong", batch=10)


@pytest.mark.parametrize("name", ["after", "since"])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda: None, "is called with (obj), but takes ()"),
        (lambda task, now: None, "missing a required argument: 'now'"),
        (timedelta, "is a class"),
        (lambda task: (yield), "`yield`"),
    ],
)
def test_a_delay_or_a_beginning_that_cannot_be_called_is_refused(
    declare: Declare, name: str, function: Any, says: str
) -> None:
    with pytest.raises(dq.PolicyError) as caught:
        declare(Task, name="wrong", **{name: function})
    assert f"{name} " in str(caught.value)
    assert says in str(caught.value)


def test_handlers_of_every_callable_kind_run(declare: Declare) -> None:
    ran: list[Any] = []

    async def coroutine(task: Any, timeout: Any) -> None:
        ran.append(task.pk)

    plain, waiting = CallableObject(), AsyncCallable()
    handlers = {
        "function": lambda task, timeout: ran.append(task.pk),
        "any_arguments": lambda *arguments: ran.append(arguments[0].pk),
        "with_default": lambda task, timeout, reason="": ran.append(task.pk),
        "coroutine": coroutine,
        "partial": functools.partial(with_an_extra, ran),
        "object": plain,
        "async_object": waiting,
        "bound": plain.__call__,
    }
    task = Task.objects.create()
    rows = [due(task, declare(Task, handler, name=name)) for name, handler in handlers.items()]
    rows.append(due(task, declare(Task, lambda tasks, rows: ran.append(tasks.get().pk), name="batch", batch=5)))
    fire(*rows)
    assert [state(row)[0] for row in rows] == ["fired"] * len(rows)
    assert ran == [task.pk] * 6
    assert plain.ran == waiting.ran == task.pk


def test_a_base_manager_is_asked_again_by_each_save(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it filters by may differ each time, as the tenant of a request does."""
    declare(ManagedNotHidden, name="own", after=HOUR, since="begun_at", when=Q(status="open"))
    for tenant in ("first", "second"):
        rows: Any = QuerySet(ManagedNotHidden).filter(remark=tenant)
        monkeypatch.setattr(NotHidden, "get_queryset", lambda manager, rows=rows: rows)
        obj = ManagedNotHidden.objects.create(remark=tenant, begun_at=timezone.now())
        assert Timeout.objects.pending().filter(object_id=obj.pk).count() == 1
        obj.status = "done"
        obj.save()
        assert Timeout.objects.get(object_id=obj.pk).state == "cancelled"


def test_an_object_is_explained_although_its_base_manager_hides_all_rows(
    declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As outside a request, where no tenant is known. Django does not even send such a query."""
    policy = declare(ManagedNotHidden, name="own", after=HOUR, since="begun_at", when=Q(status="open"))
    obj = ManagedNotHidden.objects.create(begun_at=timezone.now())
    monkeypatch.setattr(NotHidden, "get_queryset", lambda manager: QuerySet(ManagedNotHidden).none())
    assert "condition of the policy does not hold" in dq.explain_timeout(obj, policy).outlook


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}])
def test_an_object_that_the_base_manager_hides_from_this_thread_is_not_gone(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A handler may have left the tenant of another object behind."""
    policy = declare(ManagedNotHidden, name="own", **options)
    obj = ManagedNotHidden.objects.create()
    row = due(obj, policy)
    with monkeypatch.context() as patched:
        patched.setattr(NotHidden, "get_queryset", lambda manager: QuerySet(ManagedNotHidden).filter(remark="another"))
        assert list(fire(row).again) == [row.pk]
    assert (state(row), row.attempts) == (("pending", ""), 0)
    assert fire(row).fired == (row.pk,)
    gone = due(obj, policy)
    obj.delete()
    fire(gone)
    assert state(gone)[1] == "gone"


def test_a_condition_with_a_value_that_its_field_cannot_have_is_refused(declare: Declare) -> None:
    with pytest.raises(dq.PolicyError, match=r"testapp.task.wrong: its when does not fit: .*“soon”"):
        declare(Task, name="wrong", when=Q(begun_at__lt="soon"))


def test_the_decorator_without_a_model_is_refused() -> None:
    def cancel(task: Any, timeout: Any) -> None: ...

    decorate: Any = dq.timeout_policy
    with pytest.raises(dq.PolicyError, match=r"cancel, which is not a model.*@timeout_policy\(Order, after=...\)"):
        decorate(cancel)
    with pytest.raises(dq.PolicyError, match="not a model"):
        decorate(CallableObject)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("afte", "Did you mean 'after'?"),
        ("sinse", "'since'"),
        ("max_extension", "'max_extensions'"),
        ("x", "options are"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(option: str, says: str) -> None:
    decorate: Any = dq.timeout_policy
    with pytest.raises(dq.PolicyError) as caught:
        decorate(Task, **{option: HOUR})
    assert says in str(caught.value)


def test_the_options_can_be_inspected() -> None:
    parameters = inspect.signature(dq.timeout_policy).parameters
    assert list(parameters) == [
        *("model", "name", "after", "since", "when", "hold_when", "retry", "batch", "batch_by", "together", "atomic"),
        "queue",
        *("max_extensions", "aliases", "limits", "late", "brake", "shadow", "search", "owner", "silenced_checks"),
        *("within", "grace", "retention"),
    ]
    assert parameters["atomic"].default is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [("from django_delayq import timeout_policy\n", ["W014"]), ("TIMEOUT = 3\n", []), (None, [])],
)
def test_policies_in_a_file_that_is_never_imported_are_warned_of(
    text: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = type("Misspelt", (AppConfig,), {"name": "misspelt", "path": str(tmp_path)})("misspelt", sys)
    if text is not None:
        (tmp_path / "timeout.py").write_text(text)
    monkeypatch.setitem(apps.app_configs, "misspelt", config)
    assert warnings("W014") == expected


def test_a_historical_model_is_named_as_the_reason(declare: Declare) -> None:
    policy = declare(Task, name="real", after=HOUR, since="begun_at", when=Q())
    historical: Any = ProjectState.from_apps(apps).apps.get_model("testapp", "Task")
    task = historical.objects.create(begun_at=timezone.now())
    assert not Timeout.objects.exists()
    for named in ("real", policy):
        with pytest.raises(dq.UnknownPolicy, match=r"testapp.Task is a historical model of a migration.*delayq_sync"):
            dq.schedule_timeout(task, named)
    assert dq.sync_timeouts(Task.objects.all()) == 1


@pytest.mark.parametrize("held", [True, False])
def test_the_story_says_that_the_condition_does_not_hold(declare: Declare, held: bool) -> None:
    policy = declare(Task, name="by_hand", when=Q(status="open"))
    task = Task.objects.create()
    dq.schedule_timeout(task, policy, minutes=5)
    Task.objects.update(status="open" if held else "done")
    outlook = dq.explain_timeout(task, policy).outlook
    assert outlook.startswith("It is due at ")
    assert ("the condition of the policy does not hold" in outlook) is not held


def test_the_story_says_that_the_object_is_gone(declare: Declare) -> None:
    policy = declare(Task, name="by_hand")
    task = Task.objects.create()
    row = dq.schedule_timeout(task, policy, minutes=5)
    Task.objects.filter(pk=task.pk)._raw_delete("default")
    assert "the object no longer exists" in dq.explain_timeout(row).outlook
