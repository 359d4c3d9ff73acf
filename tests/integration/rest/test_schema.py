"""The OpenAPI schema: complete, without a warning."""

from __future__ import annotations

import pytest
import yaml
from django.core.management import call_command
from drf_spectacular.management.commands.spectacular import Command

pytestmark = pytest.mark.django_db


def test_the_schema_is_valid_and_nothing_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    call_command(Command(), "--validate", "--fail-on-warn")
    told = capsys.readouterr()
    assert told.err == ""
    assert {"/api/timeouts/", "/api/timeouts/{id}/", "/api/policies/{label}/"} <= set(yaml.safe_load(told.out)["paths"])
