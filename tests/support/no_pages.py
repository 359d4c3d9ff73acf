"""The URL configuration of processes that serve no pages."""

from __future__ import annotations

from typing import Final

urlpatterns: Final[list[object]] = []
