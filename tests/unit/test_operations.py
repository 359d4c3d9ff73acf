"""The table of operations fits the functions and permissions that it names."""

from __future__ import annotations

import inspect

import pytest

from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations.registry import OPERATIONS, POLICY_OPERATIONS, TIMEOUT_OPERATIONS, Operation
from django_delayq.operations.runner import How

each = pytest.mark.parametrize("operation", [pytest.param(each, id=name) for name, each in OPERATIONS.items()])


@each
def test_the_function_of_an_operation_takes_what_its_callers_give(operation: Operation) -> None:
    first, *others = inspect.signature(operation.call).parameters
    others = [name for other in others for name in (How.__annotations__ if other == "how" else [other])]
    common = {"by", "reason"}
    if operation.name in TIMEOUT_OPERATIONS:
        common |= {"dry_run", "progress"}
    if operation.moves_rows:
        common |= {"progress"}
    assert first == ("target" if operation.name in TIMEOUT_OPERATIONS else "policy")
    assert common <= {*others}
    own = {*others} - common
    named = {parameter.name for parameter in operation.parameters}
    if operation.off is not None and "off" in operation.off:
        named |= {"off"}
    assert own in (named, {"delay"}), "postpone takes units, too"


@each
def test_an_operation_names_a_permission_of_its_model(operation: Operation) -> None:
    model = Timeout if operation.name in TIMEOUT_OPERATIONS else PolicyControl
    assert operation.permission in {codename for codename, _ in model._meta.permissions}


@each
def test_an_operation_names_states_of_its_model(operation: Operation) -> None:
    states = Timeout.State if operation.name in TIMEOUT_OPERATIONS else PolicyControl.Stop
    assert operation.states
    assert operation.states <= set(states)


def test_no_operation_on_timeouts_has_the_name_of_one_on_policies() -> None:
    assert TIMEOUT_OPERATIONS.keys() & POLICY_OPERATIONS.keys() == set()
