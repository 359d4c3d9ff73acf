"""Settings of `make demo`: delays that a visitor can await, and no login."""

from __future__ import annotations

from datetime import timedelta

from config.settings import *  # noqa: F403
from config.settings import MIDDLEWARE

SHOP_DELAYS = {
    "cancel_unpaid": timedelta(seconds=30),
    "cancel_unaccepted": timedelta(seconds=20),
    "review_by_default": timedelta(seconds=60),
    "notify_trial_expiry": timedelta(seconds=60),
    "promised_delivery": timedelta(seconds=20),
}
MIDDLEWARE = [*MIDDLEWARE, "config.visitors.LogVisitorIn"]
