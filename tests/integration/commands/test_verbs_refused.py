"""What a person typed, and cannot have meant, is refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import connections
from django.test import Client
from django.urls import reverse
from django.utils import timezone

import django_delayq as dq
from django_delayq.ledger import controls
from django_delayq.ledger.db_connections import how_to_migrate
from django_delayq.management.options import moment
from django_delayq.models import PolicyChange, Timeout
from django_delayq.policy.policies import registry
from tests.integration.commands.conftest import REMIND, Do
from tests.integration.operations.conftest import pending
from tests.support.typed import Patch
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


def test_a_worker_in_a_transaction_says_why_it_would_fire_nothing(do: Do, order: Order) -> None:
    dq.schedule_timeout(order, "remind", seconds=0)
    for options in (("--burst",), ("--max-timeouts", "1")):
        with pytest.raises(CommandError, match=r"rows of the transaction .* such as that of a TestCase\. .*fire_due"):
            do("delayq_worker", *options)
    assert Timeout.objects.get().state == "pending"


@pytest.mark.parametrize(
    ("zone", "at", "words"),
    [
        ("Europe/Berlin", "2027-10-31T02:30", "occurs twice when the clocks change: add the offset"),
        ("Europe/Berlin", "2027-03-28 02:30", "does not occur when the clocks change: add the offset"),
        ("Australia/Lord_Howe", "2027-04-04T01:45", "occurs twice"),
    ],
)
def test_a_local_time_that_occurs_twice_or_never_is_refused(
    do: Do, order: Order, zone: str, at: str, words: str
) -> None:
    row = pending(order)
    commands: list[tuple[str, ...]] = [
        (f"delayq_{verb}", "--id", str(row.pk), "--to", at) for verb in ("postpone", "reschedule")
    ]
    commands += [(f"delayq_{verb}", REMIND, "--until", at) for verb in ("pause", "hold")]
    with timezone.override(zone):
        for command in (*commands, ("delayq_list", "--due-before", at)):
            with pytest.raises(CommandError, match=words) as refused:
                do(*command)
            assert refused.value.returncode == 2
    row.refresh_from_db()
    assert not row.history and not PolicyChange.objects.exists()


def test_a_local_time_beside_a_change_of_the_clocks_and_one_with_an_offset_are_taken() -> None:
    with timezone.override("Europe/Berlin"):
        assert moment("--to", "2027-10-31T03:00") == datetime(2027, 10, 31, 2, tzinfo=UTC)
        assert moment("--to", "2027-10-31T01:59") == datetime(2027, 10, 30, 23, 59, tzinfo=UTC)
        assert moment("--to", "2027-10-31T02:30+02:00") == datetime(2027, 10, 31, 0, 30, tzinfo=UTC)
        assert moment("--to", "2027-03-28T03:00") == datetime(2027, 3, 28, 1, tzinfo=UTC)


def test_the_form_of_the_admin_refuses_such_a_time_too(admin_client: Client, order: Order) -> None:
    address = reverse("admin:django_delayq_timeout_operate", args=["postpone"])
    form = {"ids": pending(order).pk, "confirmed": "x", "reason": "x"}
    with timezone.override("Europe/Berlin"):
        for at in ("2027-10-31T02:30", "2027-03-28T02:30"):
            answer: Any = admin_client.post(address, {**form, "at": at})
            assert answer.status_code == 200 and answer.context["form"].errors["at"]


def test_a_database_in_memory_needs_a_file_and_no_migration(monkeypatch: Patch) -> None:
    connection = connections["default"]
    if connection.vendor != "sqlite":
        pytest.skip("only SQLite has databases in memory")
    assert how_to_migrate("default") == "run manage.py migrate"
    monkeypatch.setitem(connection.settings_dict, "NAME", ":memory:")
    assert "name a file in DATABASES" in how_to_migrate("default")


SOURCE = """
from datetime import timedelta
from django_delayq import timeout_policy
from tests.testapp.models import Order

@timeout_policy(Order, after=timedelta(minutes=30), aliases=["former_one"])
def reloaded(order, timeout):
    pass
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """`load(source)` executes a module of this name again, as importlib.reload does."""
    module = ModuleType("reloaded_timeouts")

    def execute(source: str) -> Any:
        exec(compile(source, "reloaded_timeouts.py", "exec"), vars(module))
        return module

    yield execute
    for policy in [each for each in registry if each.handler_path.startswith("reloaded_timeouts.")]:
        registry.remove(policy)


def test_a_module_that_is_reloaded_replaces_its_policies(load: Callable[[str], Any], order: Order) -> None:
    first = load(SOURCE).reloaded
    second = load(SOURCE.replace("minutes=30", "minutes=45").replace('"former_one"', "")).reloaded
    assert dq.get_policy("testapp.order.reloaded") is second is not first
    assert dq.schedule_timeout(order, "reloaded").policy == second.label
    assert controls.policy_state("testapp.order.reloaded", "default").delay == second.after
    with pytest.raises(dq.UnknownPolicy):
        dq.get_policy("testapp.order.former_one")


def test_two_functions_of_one_name_in_one_file_are_named_with_their_lines(load: Callable[[str], Any]) -> None:
    with pytest.raises(dq.PolicyError, match=r"declared twice: by .*reloaded \(line 6\) and by .*reloaded \(line 14\)"):
        load(SOURCE + SOURCE)


def test_a_unit_as_an_option_of_a_policy_is_answered_with_what_to_write() -> None:
    wrong: Any = dq.timeout_policy
    with pytest.raises(dq.PolicyError, match=r"no option 'minutes'\. Write after=timedelta\(minutes=30\)\."):
        wrong(Order, minutes=30)
    with pytest.raises(dq.PolicyError, match=r"Write after=timedelta\(days=\.\.\.\)\."):
        wrong(Order, days=None)
    with pytest.raises(dq.PolicyError, match=r"no option 'limit'\. Did you mean 'limits'"):
        wrong(Order, limit=5)
