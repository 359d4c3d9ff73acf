"""Each operation has the same parameters, permission and refusals as a function, in the admin, by REST and by command.

The registry declares them once. The tests go through every operation and every edge, so that a new operation is tested
when it is declared and has an example here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command, load_command_class
from django.db import transaction
from django.test import Client
from django.urls import include, path, reverse
from django.utils import timezone
from rest_framework.test import APIClient

from django_delayq import DelayqError, operations
from django_delayq.admin.forms import OperationForm
from django_delayq.contrib.rest_framework import inputs
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations.parameters import Flag, Length, Moment, Parameter
from django_delayq.operations.registry import OPERATIONS, TIMEOUT_OPERATIONS, Operation
from tests.integration.operations.conftest import BY, dead, pending
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]
urlpatterns = [path("", include("tests.urls")), path("", include("tests.integration.rest.urls"))]

REMIND, UNPAID = "testapp.order.remind", "testapp.order.cancel_unpaid"
HOUR, CENTURIES = timedelta(hours=1), timedelta(days=1_000_000)
NOW = timezone.now().replace(second=0, microsecond=0)
TOMORROW, YESTERDAY, TOO_FAR = NOW + 24 * HOUR, NOW - 24 * HOUR, datetime(9999, 12, 31, tzinfo=NOW.tzinfo)
Values = dict[str, Any]
GOOD: dict[str, list[Values]] = {
    **{name: [{}] for name in ("cancel", "fire", "retry", "erase")},
    "postpone": [{"after": 2 * HOUR}, {"at": TOMORROW}],
    "reschedule": [{"shift": 2 * HOUR}, {"shift": -HOUR / 2}, {"at": TOMORROW}],
    "replan": [{"hand_set": False}, {"hand_set": True}],
    "hold_timeout": [{}, {"until": TOMORROW}],
    "pause_timeout": [{}, {"until": TOMORROW}],
    "resume_timeout": [{}],
    "refire": [{}, {"at": TOMORROW}],
    "pause": [{}, {"until": TOMORROW}],
    "hold": [{}, {"until": TOMORROW}],
    "resume": [{"shift": True}, {"shift": False}],
    "delay": [
        {"after": 2 * HOUR, "mode": "keep"},
        {"after": None, "mode": "recompute"},
        {"after": HOUR, "mode": "shift"},
        {"after": HOUR, "mode": "recompute", "hand_set": True},
    ],
    "late": [{"after": HOUR}, {"after": HOUR, "then": "dead"}],
    "brake": [{"most": 5, "per": HOUR}],
    "shadow": [{"share": 10}],
}
"""What each operation accepts."""
BAD: dict[str, list[Values]] = {
    **{name: [] for name in ("cancel", "fire", "retry", "resume", "erase")},
    "postpone": [
        *({}, {"after": 2 * HOUR, "at": TOMORROW}, {"after": timedelta(0)}, {"after": -HOUR}, {"after": "soon"}),
        *({"after": CENTURIES}, {"at": YESTERDAY}, {"at": TOO_FAR}, {"at": "soon"}),
    ],
    "reschedule": [
        *({}, {"shift": HOUR, "at": TOMORROW}, {"shift": "soon"}, {"shift": CENTURIES}),
        *({"at": TOO_FAR}, {"at": "soon"}),
    ],
    "replan": [],
    "hold_timeout": [{"until": YESTERDAY}, {"until": TOO_FAR}, {"until": "soon"}],
    "pause_timeout": [{"until": YESTERDAY}, {"until": TOO_FAR}, {"until": "soon"}],
    "resume_timeout": [],
    "refire": [{"at": TOO_FAR}, {"at": "soon"}],
    "pause": [{"until": YESTERDAY}, {"until": TOO_FAR}, {"until": "soon"}],
    "hold": [{"until": YESTERDAY}, {"until": TOO_FAR}, {"until": "soon"}],
    "delay": [
        *({"after": "soon", "mode": "keep"}, {"after": CENTURIES, "mode": "keep"}),
        *({"after": HOUR, "mode": "guess"}, {"mode": "keep"}),
    ],
    "late": [
        *({"after": value} for value in (-HOUR, timedelta(days=400), "soon")),
        {"after": HOUR, "then": "explode"},
    ],
    "brake": [
        *({"most": 5}, {"per": HOUR}, {"most": 5, "per": timedelta(0)}, {"most": 5, "per": "soon"}),
        *({"most": value, "per": HOUR} for value in (0, 1_000_001, "many")),
    ],
    "shadow": [{"share": value} for value in (-1, 101, "all")],
}
"""What each operation refuses."""


def of(table: dict[str, list[Values]]) -> pytest.MarkDecorator:
    cases = [pytest.param(OPERATIONS[name], values, id=f"{name}-{values}") for name in table for values in table[name]]
    return pytest.mark.parametrize(("operation", "values"), cases)


COMMANDS = {"delay": "replan", "replan": "replan_timeout"}
"""The commands that are not named as their operation: operators know the first of them by this name."""
each_operation = pytest.mark.parametrize(
    "operation", [pytest.param(each, id=each.name) for each in OPERATIONS.values()]
)


def kind_of(operation: Operation, name: str) -> Parameter:
    return next(each for each in operation.parameters if each.name == name)


def in_seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


def target_of(operation: Operation) -> Any:
    return Timeout.objects.order_by("pk").first() if operation.name in TIMEOUT_OPERATIONS else UNPAID


def by_function(operation: Operation, values: Values, reason: str = "x") -> bool:
    try:
        done = operation.call(target_of(operation), by=BY, reason=reason, **values)
    except (DelayqError, TypeError, ValueError):
        return False
    return bool(done is not None and getattr(done, "changed", True))


def in_form(parameter: Parameter, value: Any) -> dict[str, Any]:
    """Return what a visitor enters."""
    if isinstance(parameter, Length):
        if value is None:
            return {"declared": "on"}
        seconds = in_seconds(value)
        if not parameter.has_direction or isinstance(seconds, str):
            return {"amount": seconds, "unit": "seconds"}
        return {"amount": abs(seconds), "unit": "seconds", "direction": "later" if seconds > 0 else "earlier"}
    if isinstance(parameter, Moment) and isinstance(value, datetime):
        return {parameter.name: timezone.localtime(value).strftime("%Y-%m-%dT%H:%M")}
    return {} if value is False else {parameter.name: value}


def admin_user(*permissions: str, is_staff: bool = True) -> User:
    user = User.objects.create_user(f"user{User.objects.count()}", is_staff=is_staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return user


def address_in_admin(operation: Operation) -> str:
    if operation.name in TIMEOUT_OPERATIONS:
        return reverse("admin:django_delayq_timeout_operate", args=[operation.name])
    return reverse("admin:django_delayq_policycontrol_operate", args=[UNPAID, operation.name])


def post_in_admin(user: User, operation: Operation, values: Values, reason: str = "x") -> Any:
    client = Client()
    client.force_login(user)
    entered: dict[str, Any] = {"reason": reason, "confirmed": "yes", "setting": "on", "mode": ""}
    if operation.name in TIMEOUT_OPERATIONS:
        entered["ids"] = target_of(operation).pk
    for name, value in values.items():
        entered |= in_form(kind_of(operation, name), value)
    return client.post(address_in_admin(operation), entered)


def in_admin(operation: Operation, values: Values, reason: str = "x") -> bool:
    before = stored()
    answer = post_in_admin(User.objects.create_superuser(f"boss{User.objects.count()}"), operation, values, reason)
    assert answer.status_code == (200 if b"errorlist" in answer.content else 302)
    return bool(answer.status_code == 302 and stored() != before)


def post_by_rest(user: User, operation: Operation, values: Values, reason: str = "x") -> Any:
    client = APIClient()
    client.force_login(user)
    body: dict[str, Any] = {"reason": reason}
    for name, value in values.items():
        parameter = kind_of(operation, name)
        field = "seconds" if isinstance(parameter, Length) and parameter.in_units else inputs.name_of(parameter)
        body[field] = value.isoformat() if isinstance(value, datetime) else in_seconds(value)
    if operation.name in TIMEOUT_OPERATIONS:
        return client.post(f"/api/timeouts/{target_of(operation).pk}/{operation.name}/", body, format="json")
    return client.post(f"/api/policies/{UNPAID}/{operation.name}/", body, format="json")


def by_rest(operation: Operation, values: Values, reason: str = "x") -> bool:
    user = User.objects.create_superuser(f"boss{User.objects.count()}")
    return bool(post_by_rest(user, operation, values, reason).status_code == 200)


def by_command(operation: Operation, values: Values, reason: str = "x") -> bool:
    name = COMMANDS.get(operation.name, operation.name)
    before = stored()
    given = [f"--id={target_of(operation).pk}"] if operation.name in TIMEOUT_OPERATIONS else [UNPAID]
    for parameter in operation.parameters:
        value = values.get(parameter.name)
        if parameter.name not in values or (isinstance(parameter, Flag) and value == parameter.default):
            continue
        text = value.isoformat() if isinstance(value, datetime) else str(in_seconds(value))
        text = f"{text}s" if isinstance(value, timedelta) else text
        if value is None or isinstance(parameter, Flag):
            given.append("--declared" if value is None else parameter.option)
        else:
            given.append(f"{parameter.option}={text}" if parameter.option.startswith("-") else text)
    try:
        call_command(f"delayq_{name}", *given, f"--reason={reason}", "--yes", verbosity=0)
    except CommandError:
        return False
    return bool(stored() != before)


EDGES: dict[str, Callable[..., bool]] = {
    "function": by_function,
    "admin": in_admin,
    "rest": by_rest,
    "command": by_command,
}
each_edge = pytest.mark.parametrize("edge", EDGES)


def stored() -> Any:
    """Return what an operation changes, without its actor."""
    rows = Timeout.objects.order_by("pk").values("state", "due_at", "run_at", "attempts")
    erased = [row.erased_at is not None for row in Timeout.objects.order_by("pk")]
    controls = PolicyControl.objects.order_by("policy").values("policy", "stop", "until", "after", "guards", "reason")
    for each in controls:
        each["guards"].pop("by", None)
        each["stop"] = each["stop"].replace("releasing", "")  # until the rows have moved, after the commit
    changes = [(each.what, each.reason, sorted(each.details)) for each in PolicyChange.objects.order_by("id")]
    return [[*rows], erased, [*controls], changes]


@pytest.fixture
def ready(operation: Operation, controls_are_read_again: None) -> None:
    """One row to which the operation can be done, and a policy in the state that it needs."""
    dead(Order.objects.create()) if operation.name in {"retry", "refire", "erase"} else pending(Order.objects.create())
    if operation.name == "replan":
        Timeout.objects.all().delete()
        Order.objects.create(status="unpaid", created_at=timezone.now())
        Timeout.objects.update(due_at=TOMORROW, run_at=TOMORROW, computed_due_at=TOMORROW)
    if operation.name == "resume_timeout":
        operations.hold_timeout(Timeout.objects.all(), by=BY, reason="before")
    if operation.name == "resume":
        operations.hold(UNPAID, by=BY, reason="before")


def skip_what_rest_does_not_have(edge: str, operation: Operation) -> None:
    if edge == "rest" and operation.name == "delay":
        pytest.skip("a delay is changed with a preview, which REST does not have")


@each_operation
def test_each_edge_asks_for_what_the_registry_declares(operation: Operation) -> None:
    names = {each.name for each in operation.parameters}
    assert operation.name in GOOD and operation.name in BAD, "a new operation needs examples"
    taken = inspect.signature(operation.call).parameters
    assert names <= {*taken} or "delay" in taken
    asked = {"amount" if isinstance(each, Length) else each.name for each in operation.parameters}
    beside = {"reason", "setting", "unit", "direction", "declared"}
    assert {*OperationForm(operation).fields} - beside == asked
    body = inputs.BODIES[operation.name]()
    assert names <= {*(field.source for field in body.fields.values()), "after"}
    command = load_command_class("django_delayq", f"delayq_{COMMANDS.get(operation.name, operation.name)}")
    actions = command.create_parser("manage.py", "x")._actions
    options = {option for action in actions for option in [*action.option_strings, action.dest]}
    assert {each.option for each in operation.parameters} <= options


@each_edge
@of(GOOD)
@pytest.mark.usefixtures("ready")
def test_each_edge_accepts_it_and_does_the_same(operation: Operation, values: Values, edge: str) -> None:
    skip_what_rest_does_not_have(edge, operation)
    with transaction.atomic():
        assert by_function(operation, values)
        rows, *others = stored()
        transaction.set_rollback(True)
    stop_cache.forget()
    assert EDGES[edge](operation, values)
    now = stored()
    assert now[1:] == others
    if operation.name != "resume":  # which moves the rows after the commit
        assert [(row["state"], row["attempts"]) for row in now[0]] == [(row["state"], row["attempts"]) for row in rows]
        assert all(abs(one["due_at"] - other["due_at"]) < HOUR / 6 for one, other in zip(now[0], rows, strict=True))


@each_edge
@of(BAD)
@pytest.mark.usefixtures("ready")
def test_each_edge_refuses_it_and_changes_nothing(operation: Operation, values: Values, edge: str) -> None:
    skip_what_rest_does_not_have(edge, operation)
    before = stored()
    assert not EDGES[edge](operation, values)
    assert stored() == before


@each_operation
@pytest.mark.usefixtures("ready")
def test_a_reason_is_required_in_the_admin_and_may_be_empty_elsewhere(operation: Operation) -> None:
    values = GOOD[operation.name][0]
    assert not in_admin(operation, values, reason="")
    for edge in ("function", "rest", "command"):
        if (edge, operation.name) != ("rest", "delay"):
            with transaction.atomic():
                assert EDGES[edge](operation, values, reason="")
                transaction.set_rollback(True)
            stop_cache.forget()


@each_operation
@pytest.mark.usefixtures("ready")
def test_admin_and_rest_need_the_permission_of_the_operation(operation: Operation) -> None:
    values, before = GOOD[operation.name][0], stored()
    views = ("view_timeout", "view_policycontrol")
    others = {each.permission for each in OPERATIONS.values()} - {operation.permission}
    post: Any
    for post in (post_in_admin, post_by_rest):
        if (post, operation.name) == (post_by_rest, "delay"):
            continue
        assert post(admin_user(*views, *others), operation, values).status_code == 403
        assert stored() == before
        with transaction.atomic():
            assert post(admin_user(*views, operation.permission), operation, values).status_code in (200, 302)
            assert stored() != before
            transaction.set_rollback(True)
        stop_cache.forget()
