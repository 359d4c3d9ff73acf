"""The shop as a Django app. `timeouts.py` needs no mention here: it is found by its name."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """The example shop."""

    name = "shop"
    verbose_name = "Shop"
