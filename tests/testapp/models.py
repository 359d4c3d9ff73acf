"""Models for the tests: a shop's order in the shapes that Django offers (proxy, child, UUID and text keys)."""

from __future__ import annotations

import uuid

from django.db import models

from django_delayq import TimeoutRelation
from tests.testapp import desk, keys, market  # noqa: F401 - Django finds models through this module


class Customer(models.Model):
    name = models.CharField(max_length=50, default="")
    vip = models.BooleanField(default=False)


class Order(models.Model):
    """Unpaid, then paid or cancelled."""

    status = models.CharField(max_length=20, default="unpaid")
    created_at = models.DateTimeField(null=True)
    paid_at = models.DateTimeField(null=True)
    note = models.CharField(max_length=50, null=True)
    customer = models.ForeignKey(Customer, null=True, on_delete=models.SET_NULL)
    timeouts = TimeoutRelation()


class OrderProxy(Order):
    class Meta:
        proxy = True


class ExpressOrder(Order):
    """A multi-table child: its own table, joined to the order's."""

    courier = models.CharField(max_length=20, default="")


class Parcel(models.Model):
    """A UUID for a key, as SQLite and MySQL keep it without dashes."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    status = models.CharField(max_length=20, default="open")
    sent_at = models.DateTimeField(null=True)
    timeouts = TimeoutRelation()


class Voucher(models.Model):
    """A string for a key, which MySQL compares case-insensitively."""

    code = models.CharField(max_length=20, primary_key=True)
    status = models.CharField(max_length=20, default="open")
    issued_at = models.DateTimeField(null=True)


class Effect(models.Model):
    """What a handler did, one row each time it did it: so that a test can count."""

    what = models.CharField(max_length=50)
    object_id = models.CharField(max_length=50)
    timeout_id = models.BigIntegerField(null=True)
    at = models.DateTimeField(auto_now_add=True)
    idempotency_key = models.CharField(max_length=32, default="")


class Plain(models.Model):
    """A model without any policy."""

    name = models.CharField(max_length=20, default="")


from tests.testapp.conditions import *  # noqa: E402, F403 - a module of its own, as it is long
