"""`check --deploy` recommends limits for a wait for a database that answers nothing."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from django_delayq.checks import check_silence
from django_delayq.sql.dialects import dialect_of

pytestmark = [pytest.mark.dialect, pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server")]


def test_missing_limits_are_named_and_complete_ones_or_a_local_server_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = connection.settings_dict
    monkeypatch.setitem(settings, "HOST", "postgres.internal")
    [info] = check_silence()
    assert info.id == "django_delayq.I003"
    assert '"connect_timeout": 5' in str(info.hint)
    monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], **dialect_of(connection).limits_of_silence})
    assert not [*check_silence()]
    monkeypatch.setitem(settings, "OPTIONS", {})
    monkeypatch.setitem(settings, "HOST", "/run/postgresql")
    assert not [*check_silence()]
