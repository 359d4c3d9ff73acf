"""A project starts while its database is empty or down; its policies can be loaded again; an error names the fix."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import django
import pytest
from django.db import connection

import django_delayq as dq
from django_delayq.ledger.controls import policy_state
from django_delayq.ledger.db_connections import how_to_migrate
from django_delayq.policy.policies import registry
from tests.conftest import ROOT
from tests.support.typed import Patch
from tests.testapp.models import Order

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


SOURCE = """
from datetime import timedelta
from django_delayq import timeout_policy
from tests.testapp.models import Order

@timeout_policy(Order, after=timedelta(minutes=30), aliases=["former_one"])
def reloaded(order, timeout):
    pass
"""


@pytest.mark.django_db
def test_a_module_that_is_reloaded_replaces_its_policies(order: Order) -> None:
    module = ModuleType("reloaded_timeouts")
    changed = SOURCE.replace("minutes=30", "minutes=45").replace('"former_one"', "")
    try:
        for source in (SOURCE, changed):  # as importlib.reload does
            exec(compile(source, "reloaded_timeouts.py", "exec"), vars(module))
        assert dq.schedule_timeout(order, "reloaded", minutes=5).policy == "testapp.order.reloaded"
        assert policy_state("testapp.order.reloaded", "default").delay == timedelta(minutes=45)
        with pytest.raises(dq.UnknownPolicy):
            dq.get_policy("testapp.order.former_one")
    finally:
        registry.remove(module.reloaded)


def test_a_unit_as_an_option_of_a_policy_is_answered_with_what_to_write() -> None:
    wrong: Any = dq.timeout_policy
    with pytest.raises(dq.PolicyError, match=r"no option 'minutes'\. Write after=timedelta\(minutes=30\)\."):
        wrong(Order, minutes=30)


def test_a_database_in_memory_needs_a_file_and_no_migration(monkeypatch: Patch) -> None:
    assert how_to_migrate("default") == "run manage.py migrate"
    monkeypatch.setitem(connection.settings_dict, "NAME", ":memory:")
    needs_a_file = "name a file in DATABASES" in how_to_migrate("default")
    assert needs_a_file is (connection.vendor == "sqlite"), "only SQLite has databases in memory"
