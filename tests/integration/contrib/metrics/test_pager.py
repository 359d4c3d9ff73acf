"""The table of docs/monitoring.md: what burns is shown by the doctor, and in the other places of the table."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from django.utils.html import strip_tags

import django_delayq as dq
from django_delayq import Brake, operations
from django_delayq.contrib.prometheus import Gauges
from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import examine
from django_delayq.redis_clients import forget_engine
from django_delayq.testing import fire_due
from tests.docs.pages import ROOT, code, read
from tests.integration.management.conftest import a_worker
from tests.support.workers import due_orders
from tests.testapp.models import Order

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("controls_are_read_again")]
TABLE = list(read(ROOT / "docs" / "monitoring.md").table("what burns", "doctor"))
HOURS = timedelta(hours=2)


def _refuse(order: Any, timeout: Any) -> None:
    raise RuntimeError("no answer")


class Burning:
    """Make a thing burn, each in its own way."""

    def __init__(self, declare: Any, settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
        self.declare, self.settings, self.caplog = declare, settings, caplog

    def events(self) -> set[str]:
        return {getattr(record, "event", "") for record in self.caplog.records}

    def a_brake_has_stopped_a_policy(self) -> None:
        due_orders(self.declare(Order, name="braked", brake=Brake(1, per=timedelta(minutes=10))), 5)
        fire_due(raises=False)
        a_worker()

    def a_policy_is_stopped_without_an_end_and_its_timeouts_wait(self) -> None:
        self.timeouts_are_overdue()
        operations.pause("testapp.order.remind", by="admin:eve")

    def redis_is_away(self) -> None:
        self.settings.DELAYQ = {**self.settings.DELAYQ, "REDIS": "redis://127.0.0.1:1/0"}
        forget_engine()
        due_orders("remind")
        a_worker()

    def handlers_fail(self) -> None:
        due_orders(self.declare(Order, _refuse, name="failing", retry=dq.Retry([0, 0, 3600])))
        fire_due(raises=False)
        a_worker()

    def timeouts_are_overdue(self) -> None:
        due_orders("remind")
        then = timezone.now() - HOURS
        Timeout.objects.update(due_at=then, run_at=then, created_at=then)
        a_worker()

    def timeouts_are_dead(self) -> None:
        due_orders(self.declare(Order, _refuse, name="hopeless", retry=dq.Retry([])))
        fire_due(raises=False)
        a_worker()

    def no_worker_is_running(self) -> None:
        due_orders("remind")

    def the_clock_was_advanced(self) -> None:
        self.settings.DELAYQ = {**self.settings.DELAYQ, "INSTALLATION": "staging", "PRODUCTION": "production"}
        operations.advance_clock(HOURS, actor="cli:eve")
        a_worker()

    def workers_of_two_releases_run(self) -> None:
        a_worker(version="0.1.0")
        a_worker(version="0.2.0")


@pytest.fixture
def burning(declare: Any, settings: Settings, caplog: pytest.LogCaptureFixture, redis_url: str) -> Iterator[Burning]:
    caplog.set_level("INFO", "django_delayq")
    yield Burning(declare, settings, caplog)
    forget_engine()


def text_of(client: Client, name: str, *args: str) -> str:
    return " ".join(html.unescape(strip_tags(client.get(reverse(name, args=args)).content.decode())).split())


def test_nothing_burns_on_the_first_page_of_a_calm_installation(burning: Burning, admin_client: Client) -> None:
    a_worker()
    page = text_of(admin_client, "admin:app_list", "django_delayq")
    assert [words for row in TABLE for words in code(row[3]) if words in page] == []


def test_the_table_names_everything_that_a_pager_must_know() -> None:
    named = {re.sub(r"\W+", "_", row[0].lower()).strip("_") for row in TABLE}
    assert named == {name for name in vars(Burning) if not name.startswith("_") and name != "events"}
    assert all(code(row[1]) for row in TABLE), "the doctor knows all of it"


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_what_burns_is_shown_where_the_table_says_so(row: list[str], burning: Burning, admin_client: Client) -> None:
    what, doctor, status, admin, metrics, log = row
    getattr(burning, re.sub(r"\W+", "_", what.lower()).strip("_"))()
    level, (finding,) = doctor.split()[0], code(doctor)
    found = {(finding.id, type(finding).__name__.lower()) for finding in examine()}
    assert (finding, level) in found, found
    out = io.StringIO()
    call_command("delayq_status", stdout=out)
    for words in code(status):
        assert words in out.getvalue()
    for words in code(admin):
        assert words in text_of(admin_client, "admin:app_list", "django_delayq"), "the first page"
    samples = {(sample.name, sample.value) for family in Gauges().collect() for sample in family.samples}
    for name in code(metrics):
        expected = {number for number in (0, 1) if f"{name}` is {number}" in metrics}
        assert any(each == name and (value in expected if expected else value > 0) for each, value in samples), samples
    assert set(code(log)) <= burning.events()
