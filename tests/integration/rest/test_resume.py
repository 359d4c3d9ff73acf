"""A request that resumes a held policy moves rows for a limited time; a worker continues."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rest_framework.test import APIClient

from django_delayq import operations
from django_delayq.models import PolicyChange, Timeout
from django_delayq.operations import changes
from django_delayq.sql import statements

REMIND = "testapp.order.remind"


@pytest.mark.django_db(transaction=True)
def test_a_request_moves_rows_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, client_with: Callable[..., APIClient], schedule: Callable[..., Timeout]
) -> None:
    monkeypatch.setattr(statements, "CHUNK", 1)
    limit = changes.time_limit
    monkeypatch.setattr(changes, "time_limit", lambda: limit(-1.0))
    for _ in range(3):
        schedule()
    operations.hold(REMIND, by="a test")
    answer = client_with("pause_policy", "view_policycontrol").post(f"/api/policies/{REMIND}/resume/")
    assert (answer.status_code, answer.json()["finished"]) == (200, False)
    assert PolicyChange.objects.get(finished_at=None).moved == 1
    assert changes.continue_moves("default") == 1
    assert PolicyChange.objects.get(what="resumed").moved == 3
