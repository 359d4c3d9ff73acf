"""A base manager that filters by a tenant, which a handler has left behind in the thread that syncs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q
from django.utils import timezone

import django_delayq as dq
from django_delayq.arming.sync import sync_policy
from tests.testapp.conditions import ManagedNotHidden
from tests.testapp.models import Customer

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_row_that_the_base_manager_hides_is_not_gone(declare: Any) -> None:
    since = {"since": "begun_at", "after": timedelta(hours=1)}
    automatic = declare(ManagedNotHidden, name="closes", when=Q(status="open"), **since)
    by_hand = declare(ManagedNotHidden, name="reminds")
    owner = Customer.objects.create()
    obj = ManagedNotHidden.objects.create(begun_at=timezone.now(), owner=owner)
    dq.schedule_timeout(obj, by_hand, hours=1, key="first")
    Customer.objects.update(vip=True)
    assert not ManagedNotHidden.objects.exists(), "the manager hides it"
    sync_policy(automatic, "default")
    assert dq.get_deadline(obj, by_hand, key="first") is not None
    assert not dq.pending_timeouts(policy=automatic.label).exists(), "a hidden row matches no condition"
    Customer.objects.update(vip=False)
    sync_policy(automatic, "default")
    assert dq.pending_timeouts(policy=automatic.label).exists()
