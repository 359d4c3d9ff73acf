"""Each operation has the same parameters, permission and refusals as a function, in the admin, by REST and by command.

The registry declares them once. The tests go through every operation and every edge, so that a new operation is tested
when it is declared and has an example here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command, load_command_class
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from rest_framework.test import APIClient

from django_delayq import DelayqError, operations
from django_delayq.admin.forms import OperationForm
from django_delayq.contrib.rest_framework import inputs
from django_delayq.ledger.controls import stop_cache
from django_delayq.models import PolicyChange, PolicyControl, Timeout
from django_delayq.operations.parameters import Flag, Length, Moment, Number, Parameter
from django_delayq.operations.registry import NOT_MOVING, OPERATIONS, POLICY_OPERATIONS, TIMEOUT_OPERATIONS, Operation
from tests.integration.management.conftest import CLI
from tests.integration.operations.conftest import BY, as_if, contents, dead, pending, said
from tests.integration.operations.names import HOUR, UNPAID
from tests.testapp.models import Order

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("admin_and_rest")]

CENTURIES = timedelta(days=1_000_000)
NOW = timezone.now().replace(second=0, microsecond=0)
TOMORROW, YESTERDAY, TOO_FAR = NOW + 24 * HOUR, NOW - 24 * HOUR, datetime(9999, 12, 31, tzinfo=NOW.tzinfo)
SOONER = NOW + HOUR / 2  # than the row, which is due after an hour
DECLARED, CHANGED = HOUR / 2, 3 * HOUR / 4
"""The delay of the policy, and the one that is in force when another one is tried."""
Values = dict[str, Any]
GOOD: dict[str, list[Values]] = {
    **{name: [{}] for name in ("cancel", "fire", "retry", "erase", "resume_timeout")},
    **{name: [{}, {"until": TOMORROW}] for name in ("hold_timeout", "pause_timeout", "pause", "hold")},
    "postpone": [{"after": 2 * HOUR}, {"at": TOMORROW}],
    "reschedule": [{"shift": 2 * HOUR}, {"shift": -HOUR / 2}, {"at": TOMORROW}],
    "replan": [{"hand_set": False}, {"hand_set": True}],
    "refire": [{}, {"at": TOMORROW}],
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
    **{name: [] for name in ("cancel", "fire", "retry", "resume", "erase", "replan", "resume_timeout")},
    **{
        name: [{"until": YESTERDAY}, {"until": TOO_FAR}, {"until": "soon"}]
        for name in ("hold_timeout", "pause_timeout", "pause", "hold")
    },
    "postpone": [
        *({}, {"after": 2 * HOUR, "at": TOMORROW}, {"after": timedelta(0)}, {"after": -HOUR}, {"after": "soon"}),
        *({"after": CENTURIES}, {"at": SOONER}, {"at": YESTERDAY}, {"at": TOO_FAR}, {"at": "soon"}),
    ],
    "reschedule": [
        *({}, {"shift": HOUR, "at": TOMORROW}, {"shift": "soon"}, {"shift": CENTURIES}),
        *({"at": TOO_FAR}, {"at": "soon"}),
    ],
    "refire": [{"at": TOO_FAR}, {"at": "soon"}],
    "delay": [
        *({"after": value, "mode": "keep"} for value in ("soon", "nan", CENTURIES, -CENTURIES)),
        *({"after": HOUR, "mode": "guess"}, {"mode": "keep"}),
    ],
    "late": [
        *({"after": value} for value in (-HOUR, timedelta(days=400), CENTURIES, "soon", "nan", "inf")),
        *({}, {"then": "dead"}, {"after": HOUR, "then": "explode"}),
    ],
    "brake": [
        *({}, {"most": 5}, {"per": HOUR}),
        *({"most": 5, "per": value} for value in (timedelta(0), timedelta(seconds=0.5), CENTURIES, "soon")),
        *({"most": value, "per": HOUR} for value in (0, 1.5, 1_000_001, "many")),
    ],
    "shadow": [{}, *({"share": value} for value in (-1, 0.5, 101, "all"))],
}
"""What each operation refuses."""
SETTINGS: dict[str, Values] = {
    **{name: {"off": {"off": True}, "declared": {}} for name in ("late", "brake")},
    "shadow": {"off": {"share": 0}, "declared": {"share": None}},
}
"""What switches a guard rail off, and back to what is declared, in a call of the function."""
each_example = pytest.mark.parametrize(
    ("operation", "values"),
    [pytest.param(OPERATIONS[name], values, id=f"{name}-{values}") for name in GOOD for values in GOOD[name]],
)
COMMANDS = {"delay": "replan", "replan": "replan_timeout"}
"""The commands that are not named as their operation: operators know the first of them by this name."""


def each_of(*operations: Operation) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operation", [pytest.param(each, id=each.name) for each in operations])


each_operation = each_of(*OPERATIONS.values())


def kind_of(operation: Operation, name: str) -> Parameter:
    return next(each for each in operation.parameters if each.name == name)


def in_seconds(value: Any) -> Any:
    return value.total_seconds() if isinstance(value, timedelta) else value


def target_of(operation: Operation) -> Any:
    return Timeout.objects.order_by("pk").first() if operation.name in TIMEOUT_OPERATIONS else UNPAID


def boss() -> User:
    return User.objects.get_or_create(username="boss", is_superuser=True, is_staff=True)[0]


def by_function(operation: Operation, values: Values, reason: str = "x") -> bool:
    values = SETTINGS[operation.name][values["setting"]] if "setting" in values else values
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


def entered(operation: Operation, values: Values, reason: str = "x") -> dict[str, Any]:
    """Return what a browser sends of the form."""
    sent: dict[str, Any] = {"reason": reason, "setting": "on", "mode": ""}
    for parameter in operation.parameters:  # also the fields that are empty
        if isinstance(parameter, Length):
            sent |= {"amount": "", "unit": "hours", "direction": "later"}
        elif isinstance(parameter, (Moment, Number)):
            sent[parameter.name] = ""
    if operation.name in TIMEOUT_OPERATIONS:
        sent["ids"] = target_of(operation).pk
    for name, value in values.items():
        sent |= {name: value} if name == "setting" else in_form(kind_of(operation, name), value)
    return sent


def post_in_admin(
    user: User | None, operation: Operation, values: Values, reason: str = "x", method: str = "post"
) -> Any:
    client = Client()
    if user is not None:
        client.force_login(user)
    sent = entered(operation, values, reason) | {"confirmed": "yes"}
    return getattr(client, method)(address_in_admin(operation), sent)


def in_admin(operation: Operation, values: Values, reason: str = "x") -> bool:
    before, answer = written(), post_in_admin(boss(), operation, values, reason)
    assert answer.status_code == (200 if b"errorlist" in answer.content else 302)
    return bool(answer.status_code == 302 and written() != before)


def post_by_rest(user: User | None, operation: Operation, values: Values, reason: str = "x") -> Any:
    client = APIClient()
    client.force_authenticate(user)
    body: dict[str, Any] = {"reason": reason}
    if "setting" in values:
        values = SETTINGS[operation.name][values["setting"]] or {"declared": True}
        body, values = (body, values) if operation.name == "shadow" else (body | values, {})
    for name, value in values.items():
        parameter = kind_of(operation, name)
        field = "seconds" if isinstance(parameter, Length) and parameter.in_units else inputs.name_of(parameter)
        body[field] = value.isoformat() if isinstance(value, datetime) else in_seconds(value)
    if operation.name in TIMEOUT_OPERATIONS:
        return client.post(f"/api/timeouts/{target_of(operation).pk}/{operation.name}/", body, format="json")
    return client.post(f"/api/policies/{UNPAID}/{operation.name}/", body, format="json")


def by_rest(operation: Operation, values: Values, reason: str = "x") -> bool:
    return bool(post_by_rest(boss(), operation, values, reason).status_code == 200)


def command_of(operation: Operation, values: Values) -> list[str]:
    """Return its name and arguments."""
    given = [f"delayq_{COMMANDS.get(operation.name, operation.name)}"]
    given += [f"--id={target_of(operation).pk}"] if operation.name in TIMEOUT_OPERATIONS else [UNPAID]
    given += [values["setting"]] if "setting" in values else []
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
    return given


def by_command(operation: Operation, values: Values, reason: str = "x") -> bool:
    before = written()
    try:
        call_command(*command_of(operation, values), f"--reason={reason}", "--yes", verbosity=0)
    except CommandError:
        return False
    return bool(written() != before)


EDGES: dict[str, Callable[..., bool]] = {
    "function": by_function,
    "admin": in_admin,
    "rest": by_rest,
    "command": by_command,
}
ACTORS = {"function": BY, "admin": "admin:boss", "rest": "rest:boss", "command": CLI}


def edges_of(operation: Operation) -> dict[str, Callable[..., bool]]:
    """Return the edges that have `operation`: a delay is changed with a preview, which REST does not have."""
    return {name: edge for name, edge in EDGES.items() if (name, operation.name) != ("rest", "delay")}


def stored() -> Any:
    """Return what an operation changes, without its actor."""
    rows = Timeout.objects.order_by("pk").values("state", "cause", "due_at", "run_at", "attempts")
    erased = [row.erased_at is not None for row in Timeout.objects.order_by("pk")]
    controls = PolicyControl.objects.order_by("policy").values("policy", "stop", "until", "after", "guards", "reason")
    for each in controls:
        each["guards"].pop("by", None)
        each["stop"] = each["stop"].replace("releasing", "")  # until the rows have moved, after the commit
    changes = [(each.what, each.reason, sorted(each.details)) for each in PolicyChange.objects.order_by("id")]
    return [[*rows], erased, [*controls], changes]


def written() -> Any:
    """Return what differs after a change, in two queries, because each edge asks for it often."""
    return list(Timeout.objects.values_list("due_at", "history")), PolicyChange.objects.count()


@contextmanager
def undone() -> Iterator[None]:
    """Roll back what is done in the block, and forget what it has stopped."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)
    stop_cache.forget()


def prepare(operation: Operation) -> None:
    """One row to which the operation can be done, and a policy in the state that it needs. Nothing else is stored."""
    for model in (Timeout, PolicyControl, PolicyChange, Order):
        model._default_manager.all().delete()
    stop_cache.forget()
    now = timezone.now()
    if operation.name in {"retry", "refire", "erase"}:
        dead(Order.objects.create())
    elif operation.name in POLICY_OPERATIONS or operation.name == "replan":
        Order.objects.create(status="unpaid", created_at=now)
    else:
        pending(Order.objects.create())
    if operation.name == "replan":
        Timeout.objects.update(due_at=TOMORROW, run_at=TOMORROW, computed_due_at=TOMORROW)
    if operation.name == "resume_timeout":
        operations.hold_timeout(Timeout.objects.all(), by=BY, reason="before")
    if operation.name == "delay":
        operations.change_delay(UNPAID, CHANGED, by=BY, reason="before", mode="recompute")
    if operation.name == "resume":
        operations.hold(UNPAID, by=BY, reason="before")
        PolicyControl.objects.update(stopped_at=now - HOUR)
        Timeout.objects.update(created_at=now - 2 * HOUR)


@pytest.fixture
def ready(operation: Operation) -> None:
    prepare(operation)


def moved_by(operation: Operation, values: Values) -> timedelta:
    """Return by how much an operation that moves rows, after its commit, moves that of `ready`."""
    if operation.name == "resume":
        return HOUR if values["shift"] else timedelta(0)
    return timedelta(0) if values["mode"] == "keep" else (values["after"] or DECLARED) - CHANGED


def told_of(operation: Operation) -> tuple[str, str]:
    """Return who did the last operation, and why, as it is stored."""
    if operation.name in POLICY_OPERATIONS:
        change = PolicyChange.objects.latest("id")
        return change.by, change.reason
    _what, *actor_and_reason = said(target_of(operation))[-1]
    return actor_and_reason[0], actor_and_reason[1]


def test_each_edge_asks_for_what_the_registry_declares() -> None:
    assert {*GOOD} == {*BAD} == {*OPERATIONS}, "a new operation needs examples"
    for name, operation in OPERATIONS.items():
        names = {each.name for each in operation.parameters}
        taken = inspect.signature(operation.call).parameters
        assert names <= {*taken} or "delay" in taken
        asked = {"amount" if isinstance(each, Length) else each.name for each in operation.parameters}
        beside = {"reason", "setting", "unit", "direction", "declared"}
        assert {*OperationForm(operation).fields} - beside == asked
        body = inputs.BODIES[name]()
        assert names <= {*(field.source for field in body.fields.values()), "after"}
        command = load_command_class("django_delayq", f"delayq_{COMMANDS.get(name, name)}")
        actions = command.create_parser("manage.py", "x")._actions
        options = {option for action in actions for option in [*action.option_strings, action.dest]}
        assert {each.option for each in operation.parameters} <= options


@each_example
@pytest.mark.usefixtures("ready")
def test_each_edge_accepts_it_and_does_the_same(operation: Operation, values: Values) -> None:
    with undone():
        assert by_function(operation, values, reason="a storm")
        rows, *others = stored()
    for name, edge in edges_of(operation).items():
        if not operation.moves_rows:
            with undone():
                assert edge(operation, values, reason="a storm"), name
                now = has_done_the_same(operation, name, others)
                for one, other in zip(now, rows, strict=True):
                    assert all(one[key] == other[key] for key in ("state", "cause", "attempts")), name
                    assert all(abs(one[key] - other[key]) < HOUR / 6 for key in ("due_at", "run_at")), name
                assert "at" not in values or now[-1]["due_at"] == values["at"], "to the minute, whatever the time zone"
            continue
        prepare(operation)  # its rows are moved after the commit
        due_at = Timeout.objects.get().due_at
        assert edge(operation, values, reason="a storm"), name
        [row] = has_done_the_same(operation, name, others)
        assert abs(row["due_at"] - due_at - moved_by(operation, values)) < HOUR / 6, name


def has_done_the_same(operation: Operation, edge: str, others: Any) -> Any:
    """Return the rows, after `edge` has stored its actor and reason, and all else as the function."""
    assert told_of(operation) == (ACTORS[edge], "a storm")
    rows, *now = stored()
    assert now == others, edge
    return rows


@each_of(*(OPERATIONS[name] for name in BAD if BAD[name]))
@pytest.mark.usefixtures("ready")
def test_each_edge_refuses_it_and_changes_nothing(operation: Operation) -> None:
    before = stored()
    for name, edge in edges_of(operation).items():
        for values in BAD[operation.name]:
            assert not edge(operation, values), (name, values)
        assert stored() == before, name


def in_state(state: str) -> None:
    """One row, or the policy, in this state."""
    if state in PolicyControl.Stop:
        stops = {PolicyControl.Stop.PAUSED: operations.pause, PolicyControl.Stop.HELD: operations.hold}
        stops.get(PolicyControl.Stop(state), operations.resume)(UNPAID, by=BY)
        return
    Timeout.objects.all().delete()
    order = Order.objects.create()
    row = dead(order) if state == Timeout.State.DEAD else pending(order)
    if state == Timeout.State.HELD:
        operations.hold_timeout(row, by=BY)
    elif state not in {Timeout.State.PENDING, Timeout.State.DEAD}:
        as_if(row, state, "" if state == Timeout.State.FIRING else "due")


STATES: dict[str, list[str]] = {
    **{name: sorted({*Timeout.State} - each.states) for name, each in TIMEOUT_OPERATIONS.items()},
    **{name: sorted(NOT_MOVING - each.states) for name, each in POLICY_OPERATIONS.items()},
}
"""In which states each operation cannot succeed."""


@each_of(*(OPERATIONS[name] for name in STATES if STATES[name]))
def test_each_edge_refuses_it_in_another_state(operation: Operation) -> None:
    values = GOOD[operation.name][0]
    for state in STATES[operation.name]:
        in_state(state)
        before = stored()
        for name, edge in edges_of(operation).items():
            assert not edge(operation, values), (name, state)
        assert stored() == before, state


@each_of(*(OPERATIONS[name] for name in SETTINGS))
@pytest.mark.usefixtures("ready")
def test_each_edge_switches_a_guard_rail_off_and_back(operation: Operation) -> None:
    for setting in ("off", "declared"):
        with undone():
            assert by_function(operation, {"setting": setting})
            expected = stored()
        for name, edge in EDGES.items():
            with undone():
                assert edge(operation, {"setting": setting}), name
                assert stored() == expected, name
                assert not edge(operation, {"setting": setting}), name
        assert by_function(operation, {"setting": setting})
    assert PolicyControl.objects.get().guards == {}


@each_operation
@pytest.mark.usefixtures("ready")
def test_a_reason_is_required_in_the_admin_alone_and_nobody_is_anonymous(operation: Operation) -> None:
    values, before = GOOD[operation.name][0], stored()
    assert not in_admin(operation, values, reason="")
    for by in ("", "  ", None):
        with pytest.raises(ValueError, match="who does it"):
            operation.call(target_of(operation), by=by, **values)
    assert stored() == before
    no_reason: Any = None  # as of an optional field: never the word None
    for name, reason in (("function", ""), ("function", no_reason), ("rest", ""), ("command", "")):
        if name in edges_of(operation):
            with undone():
                assert EDGES[name](operation, values, reason=reason), name
                assert told_of(operation) == (ACTORS[name], "")


@each_of(*TIMEOUT_OPERATIONS.values())
@pytest.mark.usefixtures("ready")
def test_a_dry_run_counts_the_same_and_writes_nothing(operation: Operation) -> None:
    as_if(pending(Order.objects.create(), "linger"), "firing")
    before, values = contents(), GOOD[operation.name][0]
    dry = operation.call(Timeout.objects.all(), by=BY, dry_run=True, **values)
    assert dry.dry_run and contents() == before
    real = operation.call(Timeout.objects.all(), by=BY, **values)
    assert (dry.changed, dry.refused, dry.ids) == (real.changed, real.refused, real.ids)
    assert (real.changed, real.unchanged) == (1, 1)


def is_refused(answer: Any) -> bool:
    """Return whether a visitor was refused, or sent to log in."""
    is_sent_away = answer.status_code == 302 and answer.url.startswith(reverse("admin:login"))
    return is_sent_away or answer.status_code in (401, 403)


@each_operation
@pytest.mark.usefixtures("ready")
def test_admin_and_rest_need_the_permission_of_the_operation(operation: Operation) -> None:
    values, before = GOOD[operation.name][0], stored()
    views = ("view_timeout", "view_policycontrol")
    others = {each.permission for each in OPERATIONS.values()} - {operation.permission}
    outsiders = [None, admin_user(*views, operation.permission, *others, is_staff=False)]
    staff = [admin_user(), admin_user(*views), admin_user(*views, *others)]
    # The admin shows what is about to change, so its pages need the permission to view that, too.
    post: Any
    for post, needed in ((post_in_admin, views), (post_by_rest, ())):
        if (post, operation.name) == (post_by_rest, "delay"):
            continue
        for user in (*outsiders, *staff):
            answer = post(user, operation, values)
            assert is_refused(answer) and (user not in staff or answer.status_code == 403)
        assert stored() == before
        with undone():
            assert post(admin_user(*needed, operation.permission), operation, values).status_code in (200, 302)
            assert stored() != before
    for user in (*outsiders, *staff, admin_user(operation.permission)):
        assert is_refused(post_in_admin(user, operation, values, method="get"))
    assert post_in_admin(user, operation, values).status_code == 403
    assert stored() == before
