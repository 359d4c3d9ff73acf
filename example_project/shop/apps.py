"""The Django app. Django imports `timeouts.py` because of its name."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """The example shop."""

    name = "shop"
    verbose_name = "Shop"
