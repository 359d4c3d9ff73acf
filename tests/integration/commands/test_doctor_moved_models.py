"""doctor: timeouts of a model that was moved to another app, and left its content type behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.contenttypes.models import ContentType
from django.core.checks import WARNING, CheckMessage

from django_delayq.models import Timeout
from django_delayq.monitoring.doctor import examine
from tests.integration.operations.conftest import pending
from tests.testapp.models import Order

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("without_redis")]


def moved() -> list[CheckMessage]:
    return [finding for finding in examine() if finding.id == "moved_models"]


@pytest.mark.usefixtures("own_kinds")
def test_rows_with_the_content_type_of_a_model_that_was_moved_are_found(declare: Callable[..., Any]) -> None:
    row = pending(Order.objects.create())
    declare(Order, name="renamed", aliases=["former", "shop.order.moved"])
    Timeout.objects.filter(pk=row.pk).update(policy="testapp.order.former")
    assert not moved(), "a policy or model that was only renamed keeps its content type"
    kind = ContentType.objects.create(app_label="shop", model="order")
    Timeout.objects.filter(pk=row.pk).update(policy="shop.order.moved", content_type=kind)
    (finding,) = moved()
    assert finding.level == WARNING
    assert "of shop.order.moved have the content type of another model than testapp.order.renamed" in finding.msg
