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


@pytest.mark.parametrize("model", WITH_PAGES, ids=lambda model: model.__name__)
def test_list_and_form_show_the_deadline_and_saving_the_form_keeps_it(browser: Client, model: Any) -> None:
    deal = model.objects.create()
    row = Timeout.objects.get()
    shown = browser.get(page_of(model, "changelist"))
    assert shown.status_code == 200
    assert b"next deadline" in shown.content.lower()
    page = page_of(model, "change", deal.pk)
    content = browser.get(page).content.decode()
    assert reverse("admin:django_delayq_timeout_change", args=[row.pk]) in content
    posted = dict(re.findall(r'<input type="(?:text|hidden)" name="([^"]+)" value="([^"]*)"', content))
    posted |= {"status": "paid", "_save": "Save"}
    assert browser.post(page, posted).status_code == 302
    row.refresh_from_db()
    assert (row.state, row.cause) == ("cancelled", "condition")


@pytest.mark.parametrize("model", [models.RecordedDeal, models.VersionedDeal], ids=lambda model: model.__name__)
def test_the_page_of_former_versions_opens(browser: Client, model: Any) -> None:
    with reversion.create_revision():
        deal = model.objects.create()
    assert browser.get(page_of(model, "history", deal.pk)).status_code == 200


def test_versions_hold_no_timeouts_so_that_a_revert_cannot_change_the_ledger(browser: Client) -> None:
    page = page_of(models.VersionedDeal, "add")
    content = browser.get(page).content.decode()
    posted = dict(re.findall(r'<input type="(?:text|hidden)" name="([^"]+)" value="([^"]*)"', content))
    assert browser.post(page, {**posted, "status": "open", "_save": "Save"}).status_code == 302
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
