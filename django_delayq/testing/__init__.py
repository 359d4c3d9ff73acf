"""For tests: fire what is due inline, without Redis and without a worker."""

from __future__ import annotations

from django_delayq.testing.inline import fire_due

__all__ = ["fire_due"]
