"""One model for each app, open until something happens to it."""

from __future__ import annotations

import uuid
from typing import Any

import reversion
from django.contrib.auth.models import AbstractUser
from django.contrib.contenttypes.models import ContentType
from django.db import models
from django.utils import timezone
from django_fsm import FSMField, FSMModelMixin, transition
from model_utils.fields import MonitorField
from model_utils.models import SoftDeletableModel
from model_utils.tracker import FieldTracker
from safedelete.models import SOFT_DELETE_CASCADE, SafeDeleteModel
from simple_history.models import HistoricalRecords

from django_delayq import ArmingManager, TimeoutRelation


class Person(AbstractUser):
    """A user with a trial that ends."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    plan = models.CharField(max_length=10, default="trial")
    timeouts = TimeoutRelation()


class Timeout(models.Model):
    """The project's own deadlines, from before it used this library."""

    content_type = models.ForeignKey(ContentType, models.CASCADE)
    object_id = models.PositiveBigIntegerField()


class Deal(models.Model):
    status = models.CharField(max_length=10, default="open")
    begun_at = models.DateTimeField(default=timezone.now)
    timeouts = TimeoutRelation(related_query_name="%(class)s")

    class Meta:
        abstract = True


class RecordedDeal(Deal):
    """With django-simple-history."""

    history = HistoricalRecords()


class StateDeal(FSMModelMixin, Deal):
    """With django-fsm-2, and a state that only its transitions write."""

    state = FSMField(default="unpaid", protected=True)

    @transition(field=state, source="unpaid", target="paid")
    def pay(self) -> None: ...

    @transition(field=state, source="unpaid", target="expired")
    def expire(self) -> None: ...


class BareStateDeal(Deal):
    """The same without the mixin by which django-fsm-2 lets a protected field be read again."""

    state = FSMField(default="unpaid", protected=True)


class TrackedDeal(Deal):
    """With model-utils: when the status changed, and what a save changes."""

    changed_at = MonitorField(monitor="status")
    tracker = FieldTracker()


class HiddenDeal(SoftDeletableModel, Deal):
    """Marked as removed, with model-utils, whose own `objects` warns that it hides rows."""

    objects = models.Manager()


class SafeDeal(SafeDeleteModel, Deal):
    """Marked as deleted, with django-safedelete."""

    _safedelete_policy = SOFT_DELETE_CASCADE


@reversion.register()
class VersionedDeal(Deal):
    """With django-reversion."""


class ImportedDeal(Deal):
    """With django-import-export, also in bulk."""

    objects = ArmingManager()


DEALS: list[Any] = [RecordedDeal, StateDeal, TrackedDeal, HiddenDeal, SafeDeal, VersionedDeal, ImportedDeal]
