"""Models that are loaded after the policies: proxies in an `admin.py`, or children in a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.apps import apps
from django.db import connection
from django.db.migrations.state import ProjectState
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from django.utils import timezone

from django_delayq.models import Timeout
from tests.testapp.models import Order, OrderProxy

pytestmark = pytest.mark.django_db(transaction=True)
MakeModel = Callable[..., Any]


@pytest.fixture
def make_model() -> Iterator[MakeModel]:
    """`make_model("Late", Order, proxy=True)` makes a model of the app, which the end of the test removes."""
    made: list[Any] = []

    def do(name: str, base: Any, fields: dict[str, Any] | None = None, **options: Any) -> Any:
        meta = type("Meta", (), {"app_label": "testapp", **options})
        made.append(type(name, (base,), {"__module__": __name__, "Meta": meta, **(fields or {})}))
        return made[-1]

    yield do
    for model in made:
        for signal in (pre_save, post_save, pre_delete, post_delete):
            for receiver in ("arm_saved", "lock_parents_first", "note_deletion", "cancel_deleted"):
                signal.disconnect(sender=model, dispatch_uid=f"django_delayq.{receiver}")
        if not model._meta.proxy and model._meta.db_table in connection.introspection.table_names():
            with connection.schema_editor() as editor:
                editor.delete_model(model)
        del apps.all_models["testapp"][model._meta.model_name]
    apps.clear_cache()


def states() -> list[tuple[str, str]]:
    return list(Timeout.objects.order_by("id").values_list("state", "cause"))


def arms_and_cancels(late: Any) -> bool:
    order = late.objects.create(created_at=timezone.now())
    assert states() == [("pending", "")]
    order.status = "paid"
    order.save()
    other = late.objects.create(created_at=timezone.now())
    late.objects.filter(pk=other.pk).delete()
    return states() == [("cancelled", "condition"), ("cancelled", "gone")]


@pytest.mark.parametrize("base", [Order, OrderProxy])
def test_a_proxy_that_is_loaded_after_the_policies_arms_and_cancels(make_model: MakeModel, base: Any) -> None:
    assert arms_and_cancels(make_model("LateOrder", base, proxy=True))


def test_models_of_migrations_arm_nothing_and_are_not_listened_to() -> None:
    state = ProjectState.from_apps(apps)
    state.apps.get_model("testapp", "Order").objects.create(created_at=timezone.now())
    proxy = state.apps.get_model("testapp", "OrderProxy")
    proxy.objects.create(created_at=timezone.now())
    assert states() == []
    assert not post_save.has_listeners(proxy)
