"""A ledger that `dumpdata` and `loaddata` move to another database, in which content types have other ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.utils import timezone

from django_delayq import cancel_timeout, schedule_timeout
from django_delayq.models import Timeout
from django_delayq.sql.key_types import NO_KIND
from tests.testapp.models import Order

pytestmark = [pytest.mark.dialect, pytest.mark.django_db, pytest.mark.usefixtures("own_kinds")]


def move_to_a_database_with_other_content_types(file: Path) -> None:
    """Dump the timeouts, and load them again when the content type of orders has another id."""
    call_command("dumpdata", "django_delayq.timeout", use_natural_foreign_keys=True, output=str(file), verbosity=0)
    Timeout.objects.all().delete()
    ContentType.objects.filter(app_label="testapp", model="order").update(model="former")
    ContentType.objects.clear_cache()
    ContentType.objects.get_for_model(Order)
    call_command("loaddata", str(file), verbosity=0)


def test_a_loaded_timeout_is_found_moved_and_cancelled(tmp_path: Path) -> None:
    order, armed = Order.objects.create(status="new"), Order.objects.create(status="unpaid", created_at=timezone.now())
    row = schedule_timeout(order, "remind", hours=1)
    move_to_a_database_with_other_content_types(tmp_path / "ledger.json")
    armed.save()
    assert Timeout.objects.count() == 2, "no second one is armed beside it"
    assert schedule_timeout(order, "remind", hours=2).pk == row.pk
    assert cancel_timeout(order, "remind") and cancel_timeout(armed, "cancel_unpaid")
    assert not Timeout.objects.unsettled().exists()


def test_a_timeout_of_a_removed_model_is_dumped_without_its_kind(tmp_path: Path) -> None:
    """`remove_stale_contenttypes` has deleted the content type; another model may have its id where it is loaded."""
    order = Order.objects.create(status="new")
    row = schedule_timeout(order, "remind", hours=1)
    Timeout.objects.update(content_type_id=10**6)
    file = tmp_path / "ledger.json"
    options = {"use_natural_foreign_keys": True, "output": str(file), "verbosity": 0}
    call_command("dumpdata", "django_delayq.timeout", **options)
    Timeout.objects.all().delete()
    call_command("loaddata", str(file), verbosity=0)
    loaded = Timeout.objects.get(pk=row.pk)
    assert not ContentType.objects.filter(pk=loaded.content_type_id).exists()
    assert (loaded.content_type_id, loaded.object_id) == (NO_KIND, row.object_id)
