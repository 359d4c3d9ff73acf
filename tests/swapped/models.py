"""A project's own user, with timeouts: `AUTH_USER_MODEL` in `tests.swapped.settings`."""

from __future__ import annotations

from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.db import models

from django_delayq import TimeoutRelation
from tests.testapp.keys import EXACT


class Member(AbstractBaseUser):
    email = models.EmailField(max_length=100, primary_key=True, db_collation=EXACT)
    status = models.CharField(max_length=10, default="open")
    begun_at = models.DateTimeField(null=True)
    timeouts = TimeoutRelation(related_query_name="member")

    USERNAME_FIELD = "email"
    objects = BaseUserManager["Member"]()

    class Meta:
        app_label = "swapped"
