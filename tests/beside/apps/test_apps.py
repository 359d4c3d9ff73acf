"""What other apps do to objects with deadlines: their saves, deletions and imports arm, move and cancel."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
import reversion
from django.contrib.admin.models import LogEntry
from django.core.checks import run_checks
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from factory import make_factory
from factory.django import DjangoModelFactory
from reversion.models import Version
from tablib import Dataset

from django_delayq import DeadlinePassed, before_deadline, clock, get_deadline, pending_timeouts, sync_timeouts
from django_delayq.models import Timeout
from django_delayq.testing import fire_due
from tests.beside.project import models
from tests.beside.project.admin import ImportedDealResource

pytestmark = pytest.mark.django_db(transaction=True)
HOUR = timedelta(hours=1)


def causes(deal: Any) -> list[tuple[str, str]]:
    """Return the states and causes of the rounds of `deal`, the oldest first."""
    return list(Timeout.objects.filter(object_id=str(deal.pk)).order_by("id").values_list("state", "cause"))


def fire_later() -> int:
    with clock.set_to(timezone.now() + 2 * HOUR):
        return fire_due()


def test_nothing_is_reported_about_the_project() -> None:
    assert [message for message in run_checks() if message.level >= 30] == []


@pytest.mark.parametrize("model", models.DEALS, ids=lambda model: model.__name__)
def test_saving_arms_the_deadline_ends_the_deal_and_the_guard_lets_one_side_win(model: Any) -> None:
    in_time, late = model.objects.create(), model.objects.create()
    assert get_deadline(late, "end") is not None
    with before_deadline(in_time, "end"):
        if model is models.StateDeal:
            in_time.pay()
        else:
            in_time.status = "paid"
        in_time.save()
    assert fire_later() == 1
    with pytest.raises(DeadlinePassed), before_deadline(late, "end"):
        pytest.fail("the deal has ended")
    ended = model.objects.get(pk=late.pk)
    assert getattr(ended, "state", ended.status) in {"ended", "expired"}
    assert (causes(in_time), causes(late)) == ([("cancelled", "condition")], [("fired", "due")])


def test_history_keeps_each_version_that_a_firing_writes() -> None:
    deal = models.RecordedDeal.objects.create()
    fire_later()
    assert list(deal.history.values_list("status", flat=True)) == ["ended", "open"]


def test_a_protected_state_without_its_mixin_is_refused_with_the_fix() -> None:
    deal = models.BareStateDeal.objects.create()
    refused = pytest.raises(AttributeError, match="Direct state modification is not allowed")
    with refused as caught, before_deadline(deal, "end_bare"):
        pytest.fail("the deal could not be read again")
    assert "FSMModelMixin" in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("model", [models.HiddenDeal, models.SafeDeal], ids=lambda model: model.__name__)
def test_a_soft_deletion_cancels_and_a_restored_deal_is_armed_again(model: Any) -> None:
    deal = model.objects.create()
    deal.delete()
    assert causes(deal) == [("cancelled", "condition")]
    assert fire_later() == 0
    if model is models.SafeDeal:
        deal.undelete()
    else:
        deal.is_removed = False
        deal.save()
    assert get_deadline(deal, "end") is not None


@pytest.mark.parametrize("use_bulk", [False, True])
def test_an_import_arms_by_save_and_in_bulk(monkeypatch: pytest.MonkeyPatch, use_bulk: bool) -> None:
    monkeypatch.setattr(ImportedDealResource._meta, "use_bulk", use_bulk)
    began = datetime(2026, 11, 22, 12, tzinfo=timezone.get_current_timezone())
    with clock.set_to(began):
        rows = Dataset(["", "open", f"{began:%Y-%m-%d %H:%M:%S}"], headers=["id", "status", "begun_at"])
        ImportedDealResource().import_data(rows, dry_run=True, raise_errors=True)
        assert not Timeout.objects.exists()
        ImportedDealResource().import_data(rows, dry_run=False, raise_errors=True)
        deal = models.ImportedDeal.objects.get()
        assert get_deadline(deal, "end") == began + HOUR


def test_a_reverted_version_is_armed_by_the_next_sync() -> None:
    """django-reversion writes with `raw=True`, as `loaddata` does, which schedules nothing."""
    with reversion.create_revision():
        deal = models.VersionedDeal.objects.create()
    deal.status = "paid"
    deal.save()
    assert causes(deal) == [("cancelled", "condition")]
    Version.objects.get_for_object(deal).get().revision.revert()
    assert models.VersionedDeal.objects.get().status == "open"
    assert get_deadline(deal, "end") is None
    assert sync_timeouts(deal) == 1
    deal.refresh_from_db()
    assert get_deadline(deal, "end") == deal.begun_at + HOUR


def test_versions_of_timeouts_are_refused() -> None:
    """A `VersionAdmin` registers the models of its inlines, unless its own model is registered already."""
    reversion.register(Timeout)
    try:
        assert [message.id for message in run_checks()] == ["django_delayq.E022"]
    finally:
        reversion.unregister(Timeout)


def test_a_user_of_the_project_has_deadlines() -> None:
    person = models.Person.objects.create_user("ann")
    assert person.timeouts.get().due_at == person.date_joined + HOUR
    assert fire_later() == 1
    person.refresh_from_db()
    assert person.plan == "free"


def test_a_factory_arms() -> None:
    factory = make_factory(models.ImportedDeal, FACTORY_CLASS=DjangoModelFactory)
    factory.create()
    factory.create_batch(20)
    assert pending_timeouts(models.ImportedDeal).count() == 21


# Pages of the admin that other apps and this one build together, as a user with a UUID for a key

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


def test_an_operation_names_the_user_of_the_project_as_its_author(browser: Client, staff: models.Person) -> None:
    models.ImportedDeal.objects.create()
    row = Timeout.objects.get()
    page = reverse("admin:django_delayq_timeout_operate", args=["cancel"])
    assert browser.post(page, {"ids": row.pk, "confirmed": "yes", "reason": "a storm"}).status_code == 302
    row.refresh_from_db()
    assert row.cause == "hand"
    assert "admin:staff" in str(row.history)
    assert LogEntry.objects.get().user == staff
