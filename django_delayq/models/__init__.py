"""The models. Import them from here; only modules of `ledger` change their rows."""

from __future__ import annotations

from django_delayq.models.control import ClockAdvance as ClockAdvance
from django_delayq.models.control import Installation as Installation
from django_delayq.models.control import PolicyChange as PolicyChange
from django_delayq.models.control import PolicyControl as PolicyControl
from django_delayq.models.control import PolicyDay as PolicyDay
from django_delayq.models.control import PolicyMeter as PolicyMeter
from django_delayq.models.control import PolicySync as PolicySync
from django_delayq.models.control import RateShare as RateShare
from django_delayq.models.control import StoredAnswer as StoredAnswer
from django_delayq.models.control import UnfinishedRun as UnfinishedRun
from django_delayq.models.control import WorkerSeen as WorkerSeen
from django_delayq.models.timeout import SLOT_BYTES as SLOT_BYTES
from django_delayq.models.timeout import WAITING as WAITING
from django_delayq.models.timeout import RelatedTimeoutQuerySet as RelatedTimeoutQuerySet
from django_delayq.models.timeout import Timeout as Timeout
from django_delayq.models.timeout import TimeoutQuerySet as TimeoutQuerySet
from django_delayq.models.timeout import attempt_expired as attempt_expired
from django_delayq.models.timeout import could_fire_at as could_fire_at
from django_delayq.models.timeout import ending_of as ending_of
from django_delayq.models.timeout import new_idempotency_key as new_idempotency_key
from django_delayq.models.timeout import refuse_write as refuse_write
from django_delayq.models.timeout import slot_of as slot_of
