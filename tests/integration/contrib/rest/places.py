"""Addresses of the API, its actions, and a body that each of them accepts."""

from __future__ import annotations

from typing import Any

LIST, STATUS, REMIND = "/api/timeouts/", "/api/status/", "testapp.order.remind"
POLICY = f"/api/policies/{REMIND}/"
VERBS: dict[str, tuple[str, dict[str, Any]]] = {
    **{verb: (f"{verb}_timeout", {}) for verb in ("cancel", "fire", "retry", "refire", "erase")},
    "postpone": ("postpone_timeout", {"minutes": 5}),
    "reschedule": ("postpone_timeout", {"shift_seconds": -60}),
}
POLICY_VERBS: dict[str, dict[str, Any]] = {
    **{verb: {} for verb in ("pause", "hold", "resume")},
    "late": {"after_seconds": 3600, "then": "dead"},
    "brake": {"most": 50, "per_seconds": 600},
    "shadow": {"share": 10},
}
ALL = sorted({codename for codename, _ in VERBS.values()})
