"""Scopes for DRF's `ScopedRateThrottle`, which projects may limit or leave alone."""

from __future__ import annotations

from rest_framework.settings import api_settings


class OptionalScope:
    """A view's `throttle_scope`, once `DEFAULT_THROTTLE_RATES` has a rate for it.

    DRF answers 500 for a scope without a rate. A project that throttles its own views by scope should not
    have to name ours.
    """

    scope = "delayq"

    @property
    def throttle_scope(self) -> str | None:
        """The scope of this request; None: not limited by scope."""
        return self.scope if self.scope in api_settings.DEFAULT_THROTTLE_RATES else None
