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

from django_delayq.models import PolicyControl, Timeout

pytestmark = pytest.mark.slow


def errors() -> list[tuple[str | None, str]]:
    return sorted({(each.id, each.hint or "") for each in run_checks() if each.level >= 30})


def test_a_cache_of_the_queries_of_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = {Timeout._meta.db_table}
    profiles: dict[Any, Any] = {Timeout: {"ops": {"get"}}}
    with monkeypatch.context() as cachalot:
        cachalot.setitem(sys.modules, "cachalot.utils", SimpleNamespace(is_cachable=cached.__contains__))
        [(check_id, hint)] = errors()
        assert (check_id, "CACHALOT_UNCACHABLE_APPS" in hint) == ("django_delayq.E023", True)
        cached.clear()
        assert errors() == []
    monkeypatch.setitem(sys.modules, "cacheops.conf", SimpleNamespace(model_profile=profiles.get))
    [(check_id, hint)] = errors()
    assert (check_id, "CACHEOPS" in hint) == ("django_delayq.E023", True)
    profiles[Timeout] = {"ops": set()}  # only the project's own calls of `cache()` are cached
    assert errors() == []
    profiles[PolicyControl] = {"ops": {"get"}}  # workers would read outdated rows of this table
    assert [check_id for check_id, _ in errors()] == ["django_delayq.E023"]


def test_schemas_of_tenants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared ledger, the orders 1 of two tenants would be the same object: one payment cancelled both timeouts."""
    monkeypatch.setattr(connections["default"], "schema_name", "public", raising=False)
    ((check_id, hint),) = errors()
    assert (check_id, "docs/how-to/tenants.md" in hint) == ("django_delayq.E024", True)
