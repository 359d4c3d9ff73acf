"""The project's own page in the admin."""

from __future__ import annotations

from django.contrib import admin

from tests.startup.stall.models import Booking

admin.site.register(Booking)
