"""The shop's settings in Arabic, which is written from right to left."""

from __future__ import annotations

from config.settings import *  # noqa: F403

LANGUAGE_CODE = "ar"
