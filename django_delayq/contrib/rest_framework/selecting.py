"""Which timeouts a list shows: the query's parameters, checked, and made into rows that an index finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.contenttypes.models import ContentType
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from rest_framework import serializers

from django_delayq import clock
from django_delayq.key_types import object_id_of
from django_delayq.ledger.locking import database_of
from django_delayq.ledger.search import LAST_SETTLED, NEWEST, YEARS, ids_if_few, in_state, labels_in, labels_of
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from django_delayq.models import TimeoutQuerySet

State = Timeout.State
WAITING = (State.PENDING, State.FIRING)
FEW = 500
SETTLED = ("settled_from", "settled_until")
WINDOWS = {
    "due_from": "run_at__gte",
    "due_until": "run_at__lt",
    "settled_from": "settled_at__gte",
    "settled_until": "settled_at__lt",
}


class Moment(serializers.DateTimeField):
    """A moment that every database can compare with; the ends of the calendar they cannot."""

    def to_internal_value(self, value: Any) -> datetime:
        moment = super().to_internal_value(value)
        if moment.year not in YEARS:
            raise serializers.ValidationError(_("This lies too far away."))
        return moment


class ObjectReference(serializers.CharField):
    """`app.model:key`, as the kind of the object and its id in the ledger."""

    def to_internal_value(self, value: Any) -> tuple[ContentType, str]:  # type: ignore[override] # more than a text
        label, colon, key = super().to_internal_value(value).partition(":")
        app, dot, name = label.lower().partition(".")
        if not (colon and key and dot):
            raise serializers.ValidationError(_("Name an object like shop.order:17."))
        kinds = ContentType.objects.db_manager(database_of(Timeout))
        try:
            kind = kinds.get_by_natural_key(app, name)
        except ContentType.DoesNotExist as error:
            raise serializers.ValidationError(_("There is no such model.")) from error
        model = kind.model_class()
        if model is None:
            return kind, key
        try:  # for a proxy, the kind of the model that has the table
            return kinds.get_for_model(model), object_id_of(model, key)
        except Exception as error:
            raise serializers.ValidationError(_("This is no key of that model.")) from error


class Selection(serializers.Serializer[Any]):
    """The parameters of the list. What contradicts itself, or is not known, is refused."""

    state = serializers.ChoiceField(State.choices, required=False, help_text=_("Only rows in this state."))
    policy = serializers.CharField(
        required=False, max_length=200, help_text=_("A label; rows under the policy's former labels are its too.")
    )
    queue = serializers.CharField(required=False, max_length=100)
    object = ObjectReference(
        required=False, max_length=400, help_text=_("The timeouts of one object, like `shop.order:17`.")
    )
    key = serializers.CharField(required=False, max_length=200)
    due_from = Moment(required=False, help_text=_("Waiting rows whose next attempt is due then or later."))
    due_until = Moment(required=False, help_text=_("Waiting rows whose next attempt is due before."))
    overdue = serializers.BooleanField(
        required=False, help_text=_("true: pending rows that are due by the database's clock.")
    )
    settled_from = Moment(required=False, help_text=_("Rows that were settled then or later."))
    settled_until = Moment(required=False, help_text=_("Rows that were settled before."))

    OTHERS = ("cursor", "page_size", "format")

    @classmethod
    def of(cls, query: Mapping[str, Any]) -> Selection:
        """The checked parameters of a query. Raises ValidationError."""
        known = {*cls().fields, *cls.OTHERS}
        if unknown := sorted(set(query) - known):
            raise serializers.ValidationError({name: [_("There is no such filter.")] for name in unknown})
        selection = cls(data=query)
        selection.is_valid(raise_exception=True)
        return selection

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Nobody can be waiting and settled."""
        state = attrs.get("state")
        waits, settled = _asks(attrs, "due_from", "due_until", "overdue"), _asks(attrs, *SETTLED)
        if (waits and settled) or (waits and state and state not in WAITING) or (settled and state in WAITING):
            raise serializers.ValidationError(
                _("What waits has a due time and what is settled has not: these filters exclude each other.")
            )
        return attrs

    def rows(self, using: str) -> tuple[TimeoutQuerySet, Q]:
        """Rows that an index finds in its own order, and what else is asked of them."""
        asked = self.validated_data
        state, label = asked.get("state"), asked.get("policy")
        labels = labels_of(label) if label else ()
        queue = Q(queue=asked["queue"]) if "queue" in asked else Q()
        rows = _in_window(Timeout.objects.using(using), asked)
        if "object" in asked or "key" in asked:
            of_state = Q(state=state) if state else Q()
            return _found_at_once(rows, asked).order_by(*NEWEST.fields), _of_policy(labels) & queue & of_state
        few = ids_if_few(Timeout.objects.using(using).of_labels(labels), FEW) if labels else None
        if few is not None:
            rows, labels = rows.filter(pk__in=few), ()
        if state in WAITING or _asks(asked, "due_from", "due_until", "overdue"):
            if len(labels) == 1:  # those of one label stand in this order in `delayq_policy`
                rows, labels = rows.filter(policy=labels[0]), ()
            return in_state(rows, state or State.PENDING), _of_policy(labels) & queue
        if state or _asks(asked, *SETTLED):
            rows, others = _settled(rows, state, labels)
            return rows, others & queue
        return rows.order_by(*NEWEST.fields), _of_policy(labels) & queue


def _found_at_once(rows: TimeoutQuerySet, asked: Mapping[str, Any]) -> TimeoutQuerySet:
    """Of one object, or of one key, each of which has an index: newest first, whatever else is asked."""
    if "key" in asked:
        rows = rows.of_key(asked["key"])
    if "object" in asked:
        kind, object_id = asked["object"]
        rows = rows.filter(content_type=kind, object_id=object_id)
    return rows


def _of_policy(labels: Sequence[str]) -> Q:
    return Q(policy__in=labels) if labels else Q()


def _asks(asked: Mapping[str, Any], *names: str) -> bool:
    return any(asked.get(name) for name in names)


def _in_window(rows: TimeoutQuerySet, asked: Mapping[str, Any]) -> TimeoutQuerySet:
    for name, look_up in WINDOWS.items():
        if name in asked:
            rows = rows.filter(**{look_up: asked[name]})
    return rows.filter(run_at__lte=clock.DatabaseNow()) if asked.get("overdue") else rows


def _settled(rows: TimeoutQuerySet, state: str | None, labels: Sequence[str]) -> tuple[TimeoutQuerySet, Q]:
    """In the order of `delayq_settled`: latest first; and what else is asked of them.

    Dead rows are few among many, mostly, and then found in `delayq_policy`: by every label that there is.
    """
    rows = rows.filter(settled_at__isnull=False).order_by(*LAST_SETTLED.fields)
    if state is None:
        return rows, _of_policy(labels)
    known = labels or labels_in(Timeout.objects.using(rows.db))
    few = ids_if_few(Timeout.objects.using(rows.db).of_labels(known).filter(state=state), FEW)
    if few is not None:
        return rows.filter(pk__in=few, state=state), Q()
    return rows, _of_policy(labels) & Q(state=state)
