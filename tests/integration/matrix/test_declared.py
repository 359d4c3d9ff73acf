"""Declarations, conditions and primary keys that are refused or reported before the first deadline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import AppConfig, apps
from django.core import checks
from django.core.checks import CheckMessage, run_checks
from django.db import DatabaseError, connection, models, transaction
from django.db.migrations.state import ProjectState
from django.db.models import Exists, F, Func, IntegerField, OuterRef, Q, QuerySet, Value
from django.db.models.expressions import RawSQL
from django.db.models.fields import BooleanField
from django.db.models.functions import Coalesce, Now
from django.db.models.lookups import Exact
from django.test.utils import isolate_apps
from django.utils import timezone

import django_delayq as dq
from django_delayq import TimeoutRelation
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
    Removable,
    Task,
)

pytestmark = pytest.mark.django_db(transaction=True)
Declare = Callable[..., dq.TimeoutPolicy[Any]]
HOUR = timedelta(hours=1)
OTHER_ROWS = Q(Exists(Item.objects.filter(task=OuterRef("pk"))))
WARNINGS = {"W001", "W013", "W014", "W015", "I004"}


def reported(*ids: str, **options: Any) -> list[CheckMessage]:
    """Return what the checks say under these ids."""
    return [each for each in run_checks(**options) if str(each.id).removeprefix("django_delayq.") in ids]


def warnings() -> list[str]:
    return [str(message.id).removeprefix("django_delayq.") for message in reported(*WARNINGS, tags=["django_delayq"])]


RAW_SQL = RawSQL(f"{connection.ops.quote_name('testapp_task')}.status = %s", ["open"], output_field=BooleanField())


@pytest.mark.parametrize(
    ("model", "when", "expected"),
    [
        (Task, Q(parent__id=7), ({"parent", "parent_id"}, [])),
        (Task, Q(status__in=["x", F("note")]), ({"status", "note"}, [])),
        (Task, Q(doubled=2), ({"doubled", "amount"}, [])),
        (Task, Q(data__paid=True), ({"data"}, [])),
        (ManagedWithCount, Q(size=4), ({"amount", "bound"}, [])),
        (ExpressOrder, Q(status="unpaid", courier="x"), ({"status", "courier"}, [])),
        (Task, Q(RAW_SQL), (None, [])),  # which may read any column
        (Task, Q(owner__vip=True), (None, [])),  # other rows, which are watched
        (Task, Q(owner__in=Customer.objects.filter(vip=True)), (None, ["W001"])),
        (Task, OTHER_ROWS, (None, ["W001"])),
        (ManagedWithCount, Q(peers__gt=1), (None, ["W001"])),
        (ManagedWithCount, Q(of_vip=True), (None, ["W001"])),
        (ManagedNotHidden, Q(), (None, ["W001"])),
    ],
)
def test_a_condition_that_reads_more_than_own_columns_is_asked_on_every_save_and_warned_of_if_it_cannot_be_watched(
    declare: Declare, model: Any, when: Q, expected: Any, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):  # a queryset in the condition must not be read while Django starts
        policy = declare(model, name="reads", after=HOUR, since=None, when=when)
    found = columns_read(policy)
    assert (found if found is None else set(found), warnings()) == expected


@pytest.mark.parametrize(
    ("model", "options", "ids"),
    [
        (Task, {"after": HOUR, "when": Q(), "since": "begun_at"}, []),
        (Task, {"after": HOUR, "when": Q()}, ["I004"]),
        (Task, {"after": HOUR, "since": "begun_at"}, ["W013"]),
        (Task, {"when": OTHER_ROWS, "silenced_checks": ["W001"]}, []),
        (Removable, {"when": Q(status="open")}, ["W015"]),
        (Removable, {"when": Q(status="open", deleted_at__isnull=True)}, []),
        (Archived, {"when": Q(status="open")}, ["W015"]),
    ],
)
def test_what_is_forgotten_is_warned_of(declare: Declare, model: Any, options: dict[str, Any], ids: list[str]) -> None:
    """Soft deletion in the condition, `since`, or `when` beside it, without which the policy is not automatic."""
    policy = declare(model, name="forgotten", **options)
    assert warnings() == ids
    for check_id in ids:
        (message,) = reported(check_id)
        assert str(message).count("\n") == 1, "a line and its hint"
        assert (message.obj, message.is_serious()) == (policy, False)
        assert check_id != "W013" or ("not automatic" in message.msg and "when=Q()" in str(message.hint))


CALLED, MISSING = "is called with", "missing a required argument: "
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"handler": lambda task: None}, f"{CALLED} (obj, timeout), but takes (task): too many"),
    ({"handler": lambda task, timeout, *, reason: None}, "'reason'"),
    ({"handler": timedelta}, "is a class"),
    ({"handler": lambda task, timeout: (yield)}, "`yield`"),
    ({"handler": "shop.tasks.cancel"}, "must be a function, not 'shop.tasks.cancel'"),
    ({"handler": lambda tasks: None, "batch": 10}, "(queryset, timeouts), but takes (tasks)"),
    ({"after": lambda task, now: None}, f"{MISSING}'now'"),
    ({"since": lambda task: (yield)}, "`yield`"),
    ({"since": "doubled", "when": Q()}, "'doubled' is not a DateTimeField or DateField of Task"),
    ({"when": Q(begun_at__lt="soon")}, "its when does not fit: "),
    *(({"silenced_checks": each}, "; it may have W001, ") for each in ("W0001", ["W001", "W014"], 1)),
    ({"afte": HOUR}, "Did you mean 'after'?"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_a_wrong_declaration_says_what_is_meant(declare: Declare, options: dict[str, Any], says: str) -> None:
    with pytest.raises(dq.PolicyError) as caught:
        declare(Task, name="wrong", **options)
    assert says in str(caught.value)


def test_checks_go_on_after_a_manager_that_raises(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_a_request(self: Any) -> Any:
        raise RuntimeError("no tenant")

    monkeypatch.setattr(type(Archived._default_manager), "get_queryset", needs_a_request)
    declare(Archived, name="soft", when=Q(status="open"))
    assert warnings() == []


def test_what_is_no_model_and_no_policy_is_refused() -> None:
    def cancel(task: Any, timeout: Any) -> None: ...

    public: Any = dq
    for wrong in (cancel, timedelta):
        with pytest.raises(dq.PolicyError, match=r"not a model.*@timeout_policy\(Order, after=...\)"):
            public.timeout_policy(wrong)
    with pytest.raises(dq.PolicyError, match=r"takes a TimeoutPolicy, not .*cancel.*@timeout_policy\(Order, after="):
        public.register_policy(cancel)
    with pytest.raises(TypeError, match="takes a model class, not "):
        public.get_policies("testapp.Order")
    for unknown in (None, Task, ("testapp.Task", "real")):
        with pytest.raises(dq.UnknownPolicy, match="Name a policy by its name, its label or the policy itself"):
            public.get_policy(unknown)


def test_an_iterator_in_a_condition_matches_each_time(declare: Declare) -> None:
    when = Q(amount=0) & ~Q(Q(note="x") | ~Q(status__in=iter(["open", "asked"])))
    policy = declare(Task, name="iterator", after=HOUR, since="begun_at", when=when)
    for status, is_armed in (("open", True), ("asked", True), ("done", False)):
        task = Task.objects.create(begun_at=timezone.now(), status=status)
        assert dq.pending_timeouts(task, policy).exists() is is_armed


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
    QuerySet(ManagedNotHidden)._raw_delete("default")
    assert "the object no longer exists" in dq.explain_timeout(gone).outlook
    fire(gone)
    assert state(gone)[1] == "gone"


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
    assert warnings() == expected


def test_a_historical_model_is_named_as_the_reason(declare: Declare) -> None:
    policy = declare(Task, name="real", after=HOUR, since="begun_at", when=Q())
    historical: Any = ProjectState.from_apps(apps).apps.get_model("testapp", "Task")
    task = historical.objects.create(begun_at=timezone.now())
    assert not Timeout.objects.exists()
    for named in ("real", policy):
        with pytest.raises(dq.UnknownPolicy, match=r"testapp.Task is a historical model of a migration.*delayq_sync"):
            dq.schedule_timeout(task, named)
    assert dq.sync_timeouts(Task.objects.all()) == 1


@pytest.mark.dialect
@pytest.mark.parametrize("option", ["when", "hold_when"])
def test_what_the_database_refuses_is_reported_by_a_check(declare: Declare, option: str) -> None:
    """Every save fails."""
    options: dict[str, Any] = {"after": HOUR, "since": "begun_at", "when": Q()}
    unknown = Func("status", function="no_such_function", output_field=IntegerField())
    policy = declare(Task, name="refused", **{**options, option: Q(Exact(unknown, 1))})
    assert reported("W007") == []
    (message,) = reported("W007", databases=["default"])
    assert message.obj == policy and f" {option} of {policy.label}" in message.msg
    assert str(message).count("\n") == 1
    with pytest.raises(DatabaseError), transaction.atomic():
        Task.objects.create(begun_at=timezone.now())


AT_START = timezone.now()
TIMES: dict[str, tuple[Q, bool | None]] = {
    "a day": (Q(begun_at__date=AT_START.date()), True),
    "a range": (Q(status="open") & ~Q(begun_at__range=(AT_START, AT_START + HOUR)), True),
    "a value": (Q(begun_at__gt=Coalesce("resumed_at", Value(AT_START))), True),
    "of other rows": (Q(Exists(Task.objects.filter(parent=OuterRef("pk"), begun_at__lt=AT_START))), True),
    "an hour ago": (~Q(begun_at__lt=Now() - HOUR), False),
    "none": (Q(begun_at__lt=F("resumed_at") + HOUR, status="2026-11-28", amount=2026), None),
}


@pytest.mark.parametrize(("option", "kind"), [*(("when", kind) for kind in TIMES), ("hold_when", "a day")])
def test_a_time_in_a_condition_is_warned_of(declare: Declare, option: str, kind: str) -> None:
    """One that Python has computed stays as it was at the start; the database's changes without a save."""
    condition, is_fixed = TIMES[kind]
    options: dict[str, Any] = {"after": HOUR, "since": "begun_at", "when": Q(), option: condition}
    silenced = declare(Task, name="silenced", silenced_checks="W017", **options)
    assert reported("W017") == []
    registry.remove(silenced)
    policy = declare(Task, name="timed", **options)
    messages = reported("W017")
    assert [each.obj for each in messages] == [policy] * (is_fixed is not None)
    for message in messages:
        assert message.msg.startswith(f"{option} of testapp.task.timed compares with ")
        assert ("stays as it is" in message.msg) is is_fixed
        assert "since" in str(message.hint) and str(message).count("\n") == 1


class Reversed(models.CharField):  # type: ignore[type-arg]
    """Stored as another text than Python has."""

    def from_db_value(self, value: Any, *_: Any) -> Any:
        return value[::-1]

    def get_prep_value(self, value: Any) -> Any:
        return value[::-1]


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "date": (models.DateField, {}, "is a DateField, which is not supported"),
    "converted": (Reversed, {"max_length": 10}, "is a Reversed, which is not supported"),
    "long text": (models.CharField, {"max_length": 256}, "set max_length=255"),
}


@pytest.mark.parametrize("kind", REFUSED)
@isolate_apps("tests.testapp")
def test_a_key_without_one_text_is_refused_when_the_policy_is_declared(kind: str, declare: Declare) -> None:
    field, options, words = REFUSED[kind]
    meta = type("Meta", (), {"app_label": "testapp"})
    body = {"__module__": __name__, "Meta": meta, "code": field(primary_key=True, **options)}
    model: Any = type("Odd", (models.Model,), {**body, "timeouts": TimeoutRelation()})
    with pytest.raises(dq.PolicyError) as refused:
        declare(model, name="odd")
    for part in ("testapp.odd.odd", "testapp.Odd", "'code'", words, "use an automatic primary key"):
        assert part in str(refused.value)
    [error] = [found for found in model._meta.get_field("timeouts").check() if found.id == "django_delayq.E010"]
    assert isinstance(error, checks.Error) and words in error.msg


@isolate_apps("tests.testapp")
def test_a_composite_key_is_refused(declare: Declare) -> None:
    class Composite(models.Model):
        pk = models.CompositePrimaryKey("a", "b")
        a = models.IntegerField()
        b = models.IntegerField()

        class Meta:
            app_label = "testapp"

    with pytest.raises(dq.PolicyError, match="composite primary key are not supported. Use a single field"):
        declare(Composite, name="odd")
