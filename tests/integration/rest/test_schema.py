"""The OpenAPI schema: complete, without a warning."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from django.core.management import call_command
from drf_spectacular.management.commands.spectacular import Command

from django_delayq.contrib.rest_framework import openapi

pytestmark = [pytest.mark.slow, pytest.mark.django_db]


def test_the_schema_is_valid_and_nothing_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    call_command(Command(), "--validate", "--fail-on-warn")
    told = capsys.readouterr()
    assert told.err == ""
    assert {"/api/timeouts/", "/api/timeouts/{id}/", "/api/policies/{label}/"} <= set(yaml.safe_load(told.out)["paths"])


def test_the_schema_allows_no_unknown_fields_in_requests(capsys: pytest.CaptureFixture[str]) -> None:
    call_command(Command())
    schemas = yaml.safe_load(capsys.readouterr().out)["components"]["schemas"]
    closed = {name for name, schema in schemas.items() if schema.get("additionalProperties") is False}
    requests = {"Cancel", "Fire", "Postpone", "Reschedule", "Replan", "Hold_Timeout", "Pause_Timeout", "Resume_Timeout"}
    requests |= {"Retry", "Refire", "Erase", "Pause", "Hold", "Resume", "SetLate", "SetBrake", "SetShadow"}
    requests |= {"Schedule", "CancelService", "Guard"}
    assert requests == {name.removesuffix("Request") for name in closed}


def test_views_stay_as_they_are_in_projects_with_another_schema_class(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_described() -> bool:
        return hasattr(openapi.describe("status", None)(lambda view: None), "kwargs")

    assert is_described()
    with monkeypatch.context() as patched:
        patched.setattr(openapi, "_IS_INSTALLED", False)
        assert not is_described()
    settings.REST_FRAMEWORK = {}
    assert not is_described()
