"""The same policy for each model: what is still open after an hour ends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import Q

from django_delayq import timeout_policy
from django_delayq.models import Timeout
from tests.beside.project import models

HOUR = timedelta(hours=1)
OPEN = Q(status="open")


@timeout_policy(models.RecordedDeal, after=HOUR, since="begun_at", when=OPEN)
@timeout_policy(models.HiddenDeal, after=HOUR, since="begun_at", when=OPEN & Q(is_removed=False))
@timeout_policy(models.SafeDeal, after=HOUR, since="begun_at", when=OPEN & Q(deleted__isnull=True))
@timeout_policy(models.VersionedDeal, after=HOUR, since="begun_at", when=OPEN)
@timeout_policy(models.ImportedDeal, after=HOUR, since="begun_at", when=OPEN)
@timeout_policy(models.TrackedDeal, after=HOUR, since="changed_at", when=OPEN)
def end(deal: Any, timeout: Timeout) -> None:
    deal.status = "ended"
    deal.save()


@timeout_policy(models.StateDeal, name="end", after=HOUR, since="begun_at", when=Q(state="unpaid"))
def end_state(deal: models.StateDeal, timeout: Timeout) -> None:
    deal.expire()
    deal.save()


@timeout_policy(models.BareStateDeal)
def end_bare(deal: models.BareStateDeal, timeout: Timeout) -> None: ...


@timeout_policy(models.Person, after=HOUR, since="date_joined", when=Q(plan="trial"))
def end_trial(person: models.Person, timeout: Timeout) -> None:
    person.plan = "free"
    person.save()
