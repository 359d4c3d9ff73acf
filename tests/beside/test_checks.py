"""Apps beside which timeouts would not fire, or would be mixed up, are refused when the project starts.

They are not installed here: a stand-in has what the checks ask of each.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connections

from django_delayq.models import Timeout

pytestmark = pytest.mark.slow


def errors() -> list[tuple[str | None, str]]:
    return sorted({(each.id, each.hint or "") for each in run_checks() if each.level >= 30})


def test_a_cache_of_the_queries_of_workers_is_refused_by_cachalot(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = {Timeout._meta.db_table}
    monkeypatch.setitem(sys.modules, "cachalot.utils", SimpleNamespace(is_cachable=cached.__contains__))
    [(check_id, hint)] = errors()
    assert check_id == "django_delayq.E023"
    assert "CACHALOT_UNCACHABLE_APPS" in hint
    cached.clear()
    assert errors() == []


@pytest.mark.parametrize(
    ("profile", "other", "is_refused"),
    [({"ops": {"get"}}, None, True), (None, {"ops": {"get"}}, True), ({"ops": set()}, None, False)],
)
def test_a_cache_of_the_queries_of_workers_is_refused_by_cacheops(
    monkeypatch: pytest.MonkeyPatch, profile: Any, other: Any, is_refused: bool
) -> None:
    """`{"*.*": {"ops": "all"}}` caches them; without `ops`, only the project's own calls of `cache()` are cached.

    `other` is that of the other tables of the app, of which the sync would read outdated claims.
    """
    conf: Any = SimpleNamespace(model_profile=lambda model: profile if model is Timeout else other)
    monkeypatch.setitem(sys.modules, "cacheops.conf", conf)
    found = [(check_id, "CACHEOPS" in hint) for check_id, hint in errors()]
    assert found == [("django_delayq.E023", True)] * is_refused


def test_schemas_of_tenants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared ledger, the orders 1 of two tenants would be the same object: one payment cancelled both timeouts."""
    monkeypatch.setattr(connections["default"], "schema_name", "public", raising=False)
    ((check_id, hint),) = errors()
    assert (check_id, "docs/how-to/tenants.md" in hint) == ("django_delayq.E024", True)
