"""Pages of the admin that other apps and this one build together, as a user with a UUID for a key."""

from __future__ import annotations

import re
from typing import Any

import pytest
import reversion
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse
from reversion.models import Version

from django_delayq.models import Timeout
from tests.beside.project import models

pytestmark = pytest.mark.django_db(transaction=True)
WITH_PAGES = [models.RecordedDeal, models.VersionedDeal, models.ImportedDeal]


@pytest.fixture
def staff() -> models.Person:
    return models.Person.objects.create_superuser("staff", plan="paid")


@pytest.fixture
def browser(staff: models.Person) -> Client:
    client = Client()
    client.force_login(staff)
    return client


def page_of(model: Any, page: str, *arguments: Any) -> str:
    return reverse(f"admin:project_{model._meta.model_name}_{page}", args=arguments)


def submit(browser: Client, page: str, **values: str) -> str:
    """Save the form of a page with these values; return the content of the page."""
    content = browser.get(page).content.decode()
    fields = dict(re.findall(r'<input type="(?:text|hidden)" name="([^"]+)" value="([^"]*)"', content))
    assert browser.post(page, {**fields, **values, "_save": "Save"}).status_code == 302
    return content


@pytest.mark.parametrize("model", WITH_PAGES, ids=lambda model: model.__name__)
def test_list_form_and_history_open_and_show_the_deadline_and_saving_the_form_keeps_it(
    browser: Client, model: Any
) -> None:
    with reversion.create_revision():
        deal = model.objects.create()
    row = Timeout.objects.get()
    assert b"next deadline" in browser.get(page_of(model, "changelist")).content.lower()
    assert browser.get(page_of(model, "history", deal.pk)).status_code == 200
    content = submit(browser, page_of(model, "change", deal.pk), status="paid")
    assert reverse("admin:django_delayq_timeout_change", args=[row.pk]) in content
    row.refresh_from_db()
    assert (row.state, row.cause) == ("cancelled", "condition")


def test_versions_hold_no_timeouts_so_that_a_revert_cannot_change_the_ledger(browser: Client) -> None:
    submit(browser, page_of(models.VersionedDeal, "add"), status="open")
    deal = models.VersionedDeal.objects.get()
    assert deal.timeouts.count() == 1
    assert {version.content_type.model for version in Version.objects.all()} == {"versioneddeal"}


def test_an_operation_names_the_user_of_the_project_as_its_author(browser: Client, staff: models.Person) -> None:
    models.ImportedDeal.objects.create()
    row = Timeout.objects.get()
    page = reverse("admin:django_delayq_timeout_operate", args=["cancel"])
    assert browser.post(page, {"ids": row.pk, "confirmed": "yes", "reason": "a storm"}).status_code == 302
    row.refresh_from_db()
    assert row.cause == "hand"
    assert "admin:staff" in str(row.history)
    assert LogEntry.objects.get().user == staff
