"""The reference contains what the code has, and names everything that the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from django.core.management import get_commands
from django.dispatch import Signal
from django.utils import translation

import django_delayq
from django_delayq import TimeoutPolicy, conf, signals
from django_delayq.contrib.rest_framework.views import PolicyViewSet, TimeoutViewSet
from django_delayq.operations.registry import POLICY_OPERATIONS, TIMEOUT_OPERATIONS
from django_delayq.scheduling.story import EVENT_LABELS
from tests.docs.pages import code, read
from tests.docs.test_facts import SOURCE_OF_CHECKS
from tools import reference, states

PAGE = read(reference.PAGE)


def names(*header: str) -> list[str]:
    return [code(row[0])[0] for row in PAGE.table(*header)]


def test_the_page_is_written_from_the_code_in_english() -> None:
    with translation.override("de"):
        assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `make reference`"


def test_the_table_of_events_is_written_from_what_the_tests_have_found_of_their_columns() -> None:
    assert states.PAGE.read_text(encoding="utf-8") == states.page(), "run `python tools/states.py page`"


def test_every_option_of_a_policy_is_listed() -> None:
    assert set(names("option", "type")) == {each.name for each in fields(TimeoutPolicy) if each.init} - {"handler"}


def test_every_setting_is_listed_with_the_values_that_it_may_have() -> None:
    assert names("setting") == [each.name.upper() for each in fields(conf.Settings)]
    values = {code(row[0])[0]: row[2] for row in PAGE.table("setting")}
    assert values["LEASE"] == "a timedelta from 0.05 seconds to 1 days"


def test_every_operation_is_listed_with_its_path_in_rest() -> None:
    assert names("operation") == [*TIMEOUT_OPERATIONS, *POLICY_OPERATIONS]
    absent = [name for _, line in PAGE.prose if "(not " in line for name in code(line)[1:]]
    assert absent == ["delay"]
    for view, listed in ((TimeoutViewSet, TIMEOUT_OPERATIONS), (PolicyViewSet, POLICY_OPERATIONS)):
        extra: list[Any] = view.get_extra_actions()
        actions = {each.url_path: set(each.mapping) for each in extra}
        assert all(actions[name] == {"post"} for name in listed if name not in absent)


def test_every_command_is_listed_once() -> None:
    listed = [code(row[2])[0].split()[0] for row in PAGE.table("operation")] + names("command")
    assert sorted(listed) == sorted(name for name, app in get_commands().items() if app == "django_delayq")


def test_every_check_is_listed_with_its_level() -> None:
    assert {f"django_delayq.{name}" for name in names("id")} == set(
        re.findall(r'"(django_delayq\.[A-Z]\d+)"', SOURCE_OF_CHECKS)
    )
    assert {row[1][0].upper() == code(row[0])[0][0] for row in PAGE.table("id")} == {True}


def test_every_event_and_signal_is_listed() -> None:
    assert names("event", "label") == list(EVENT_LABELS)
    assert set(names("signal")) == {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert {name for name in django_delayq.__all__ if isinstance(getattr(django_delayq, name), Signal)} <= set(
        names("signal")
    )
