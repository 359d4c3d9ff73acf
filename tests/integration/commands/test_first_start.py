"""A project starts, and gets its tables, while its database is empty or down, whatever its conditions read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import django
import pytest

from tests.conftest import ROOT

SETTINGS = """
SECRET_KEY = "only for this test"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL, STATIC_ROOT = "static/", {home!r} + "/static"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.staticfiles", "django_delayq", "shop"]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": {database!r}}}}}
DELAYQ = {{"REDIS": None}}
"""
MODELS = """
from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.db import models
from django_delayq import TimeoutRelation


class Remark(models.Model):
    text = models.CharField(max_length=20)
    content_type = models.ForeignKey(ContentType, on_delete=models.CASCADE)
    object_id = models.BigIntegerField()
    about = GenericForeignKey()


class Tag(models.Model):
    name = models.CharField(max_length=20)


class Order(models.Model):
    status = models.CharField(max_length=20)
    created_at = models.DateTimeField()
    parent = models.ForeignKey("self", null=True, on_delete=models.CASCADE, related_name="parts")
    remarks, tags, timeouts = GenericRelation(Remark), models.ManyToManyField(Tag), TimeoutRelation()
"""
TIMEOUTS = """
from datetime import timedelta
from django.db.models import Case, Exists, OuterRef, Q, Value, When
from django.db.models.lookups import Exact
from django_delayq import timeout_policy
from shop.models import Order, Tag

BY_REMARK = Q(remarks__text="block")
KINDS = {
    "negated": Q(status="unpaid") & ~BY_REMARK,
    "nested": ~(Q(parent__remarks__text="x") | ~Q(Q(parts__remarks=None), ~Q(tags=3))),
    "ledger": ~Q(timeouts__state="pending"),
    "subquery": ~Exists(Tag.objects.filter(order=OuterRef("pk"))) & ~Q(parent__in=Order.objects.filter(BY_REMARK)),
    "case": Q(Exact(Case(When(~BY_REMARK, then=Value(1)), default=Value(0)), 1)),
}
for name, condition in KINDS.items():
    given = {"after": timedelta(minutes=30), "since": "created_at"}
    timeout_policy(Order, name=name, when=condition, **given)(lambda order, timeout: None)
    timeout_policy(Order, name=f"{name}_hold", when=Q(), hold_when=condition, **given)(lambda order, timeout: None)
"""
START = """
import sys
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application

get_wsgi_application()
call_command("check")
call_command("collectstatic", interactive=False, dry_run=True)
if sys.argv[1] == "makemigrations":
    call_command("makemigrations", "shop", dry_run=True)
if sys.argv[2] == "empty":
    call_command("check", databases=["default"])
    call_command("migrate", run_syncdb=True)
"""


@pytest.mark.parametrize("database", ["empty", "down"])
def test_no_condition_needs_the_database_to_start(tmp_path: Path, database: str) -> None:
    name = str(tmp_path / ("shop.sqlite3" if database == "empty" else "missing/shop.sqlite3"))
    (tmp_path / "shop").mkdir()
    for file, text in {
        "settings_of_shop": SETTINGS.format(home=str(tmp_path), database=name),
        "shop/__init__": "",
        "shop/models": MODELS,
        "shop/timeouts": TIMEOUTS,
    }.items():
        (tmp_path / f"{file}.py").write_text(text)
    # Since 6.1, makemigrations of Django itself asks SQLite whether it supports JSON.
    migrations = "makemigrations" if database == "empty" or django.VERSION < (6, 1) else ""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-c", START, migrations, database],  # without its database
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "DJANGO_SETTINGS_MODULE": "settings_of_shop"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
