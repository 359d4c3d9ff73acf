"""Routers for `DELAYQ_TEST_ROUTER=replica`: a replica that never follows, and an archive without a ledger.

The routers differ in whose reads they send to the replica: the library's, for the suite, or everybody's.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

REPLICATED: Final = {"django_delayq", "contenttypes", "testapp"}
# The last two follow the application's own relations, as Django and DRF do: `order.timeouts` is read by the caller.
PLUMBING: Final = (
    *("django.", "rest_framework.", "asgiref.", "tests.routers", "tests.integration.routers.conftest"),
    *("django_delayq.ledger.relations", "django_delayq.contrib.rest_framework.fields"),
)
OF_DJANGO: Final = ("django.contrib.admin.", "django.contrib.contenttypes.forms")
"""Modules that read content types for their own purposes, such as the log of the admin."""
REQUEST: Final = "django.core.handlers."


class ReadsReplica:
    """As in Django's documentation: reads from the replica, writes to the primary."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "replica" if model._meta.app_label in REPLICATED else None

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_relation(self, first: Any, second: Any, **hints: Any) -> bool:
        return True

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db != "archive" or app_label == "testapp"


PASSED_ON: Final = {"get_object", "_fetch_all", "iterator"}
"""Methods of `LockingAdminMixin` and `ArmingQuerySet` that call Django's, which read what their caller asked for."""


class LibraryReadsReplica(ReadsReplica):
    """Only what the library reads comes from the replica, so that the tests themselves see the truth.

    A query belongs to the nearest code outside Django, DRF and asgiref. What these read of the ledger during a
    request, for a page of the library, belongs to the library.
    """

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        if model._meta.app_label not in REPLICATED:
            return None
        return "replica" if is_called_by_library(model._meta.app_label) else None


def is_called_by_library(app: str = "") -> bool:
    """Return whether the nearest frame outside Django, DRF and asgiref is the library's; `app`: what is read."""
    frame: FrameType | None = sys._getframe(1)
    in_request = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        is_plumbing = name.startswith(PLUMBING) or frame.f_code.co_name in PASSED_ON
        if name.startswith("django_delayq.") and not is_plumbing:
            return True
        if not is_plumbing:
            return in_request and app == "django_delayq"
        if app == "contenttypes" and name.startswith(OF_DJANGO):
            return False
        in_request = in_request or name.startswith(REQUEST)
        frame = frame.f_back
    return False
