"""Models of a marketplace whose deadlines and conditions are data: of the purchase, of its channel, of its payments."""

from __future__ import annotations

from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.db import models

from django_delayq import ArmingManager, TimeoutRelation


class Merchant(models.Model):
    name = models.CharField(max_length=50, default="")
    zone = models.CharField(max_length=50, default="UTC", blank=True)
    is_open = models.BooleanField(default=True)


class Channel(models.Model):
    """Where purchases come from. Each has its own terms of payment; NULL: none."""

    merchant = models.ForeignKey(Merchant, null=True, on_delete=models.CASCADE)
    pay_within = models.DurationField(null=True)
    hours = models.DecimalField(max_digits=5, decimal_places=2, null=True)
    days = models.SmallIntegerField(null=True)
    opens_at = models.DateTimeField(null=True)
    objects = ArmingManager()


class Label(models.Model):
    name = models.CharField(max_length=20)
    is_urgent = models.BooleanField(default=False)


class Remark(models.Model):
    """Of any object."""

    content_type = models.ForeignKey(ContentType, on_delete=models.CASCADE, db_constraint=False)
    object_id = models.CharField(max_length=50)
    about = GenericForeignKey()
    is_open = models.BooleanField(default=True)


class Purchase(models.Model):
    """Unpaid, until one of its payments has succeeded."""

    channel = models.ForeignKey(Channel, null=True, on_delete=models.CASCADE)
    first = models.ForeignKey("self", null=True, on_delete=models.CASCADE, related_name="later")
    status = models.CharField(max_length=20, default="unpaid")
    grace = models.DurationField(null=True)
    created_at = models.DateTimeField(null=True)
    labels = models.ManyToManyField(Label)
    offers = models.ManyToManyField(Merchant, through="Offer")
    remarks = GenericRelation(Remark)
    timeouts = TimeoutRelation()
    objects = ArmingManager()


class Offer(models.Model):
    """What a merchant offers for a purchase: a relation with columns of its own."""

    purchase = models.ForeignKey(Purchase, on_delete=models.CASCADE)
    merchant = models.ForeignKey(Merchant, on_delete=models.CASCADE)
    is_valid = models.BooleanField(default=True)


class Payment(models.Model):
    """One attempt to pay."""

    purchase = models.ForeignKey(Purchase, null=True, on_delete=models.CASCADE, related_name="payments")
    status = models.CharField(max_length=20, default="new")
    objects = ArmingManager()


class Refund(models.Model):
    """Of a payment: two relations away from the purchase."""

    payment = models.ForeignKey(Payment, on_delete=models.CASCADE, related_name="refunds")
    is_done = models.BooleanField(default=False)
