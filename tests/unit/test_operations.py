"""The table of operations fits the functions and permissions that it names."""

from __future__ import annotations

import inspect

import pytest

from django_delayq.clock import DelayArgs
from django_delayq.models import PolicyControl, Timeout
from django_delayq.operations.registry import OPERATIONS, POLICY_OPERATIONS, TIMEOUT_OPERATIONS, Operation

each = pytest.mark.parametrize("operation", [pytest.param(each, id=name) for name, each in OPERATIONS.items()])


@each
def test_an_operation_names_all_parameters_of_its_function(operation: Operation) -> None:
    first, *others = inspect.signature(operation.call).parameters
    common = {"by", "reason"}
    if operation.kind == "timeout":
        common |= {"dry_run", "progress"}
    if operation.moves_rows:
        common |= {"progress"}
    assert first == ("target" if operation.kind == "timeout" else "policy")
    own = DelayArgs.__annotations__ if "delay" in others else {}
    assert {*others, *own} - {"delay"} == common | {*operation.parameters}


@each
def test_an_operation_names_a_permission_of_its_model(operation: Operation) -> None:
    model = Timeout if operation.kind == "timeout" else PolicyControl
    assert operation.permission in {codename for codename, _ in model._meta.permissions}


@each
def test_an_operation_names_states_of_its_model(operation: Operation) -> None:
    states = Timeout.State if operation.kind == "timeout" else PolicyControl.Stop
    assert operation.states
    assert operation.states <= set(states)


def test_the_tables_by_kind_are_all_operations() -> None:
    assert TIMEOUT_OPERATIONS | POLICY_OPERATIONS == OPERATIONS
