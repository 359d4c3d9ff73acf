"""Which timeouts a list shows: the query's parameters, checked, and made into rows that an index finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from rest_framework import serializers

from django_delayq import clock
from django_delayq.contrib.rest_framework.pagination import YEARS
from django_delayq.ledger.subjects import object_id_of
from django_delayq.models import Timeout
from django_delayq.policies import registry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from django_delayq.models import TimeoutQuerySet

State = Timeout.State
WAITING = (State.PENDING, State.FIRING)


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
        try:
            kind = ContentType.objects.get_by_natural_key(app, name)
        except ContentType.DoesNotExist as error:
            raise serializers.ValidationError(_("There is no such model.")) from error
        model = kind.model_class()
        try:
            return kind, key if model is None else object_id_of(model, key)
        except Exception as error:
            raise serializers.ValidationError(_("This is no key of that model.")) from error


class Selection(serializers.Serializer[Any]):
    """The parameters of the list. What contradicts itself, or is not known, is refused."""

    state = serializers.ChoiceField(State.choices, required=False, help_text="Only rows in this state.")
    policy = serializers.CharField(
        required=False, max_length=200, help_text="A label; rows under the policy's former labels are its too."
    )
    queue = serializers.CharField(required=False, max_length=100)
    object = ObjectReference(
        required=False, max_length=400, help_text="The timeouts of one object, like `shop.order:17`."
    )
    key = serializers.CharField(required=False, max_length=200)
    due_from = Moment(required=False, help_text="Waiting rows whose next attempt is due then or later.")
    due_until = Moment(required=False, help_text="Waiting rows whose next attempt is due before.")
    overdue = serializers.BooleanField(
        required=False, help_text="true: pending rows that are due by the database's clock."
    )
    settled_from = Moment(required=False, help_text="Rows that were settled then or later.")
    settled_until = Moment(required=False, help_text="Rows that were settled before.")

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
        waits = bool({"due_from", "due_until"} & attrs.keys() or attrs.get("overdue"))
        settled = bool({"settled_from", "settled_until"} & attrs.keys())
        if (waits and settled) or (waits and state and state not in WAITING) or (settled and state in WAITING):
            raise serializers.ValidationError(
                _("What waits has a due time and what is settled has not: these filters exclude each other.")
            )
        return attrs

    def rows(self, using: str) -> tuple[TimeoutQuerySet, Q]:
        """Rows that an index finds in its own order, and what else is asked of them."""
        asked = dict(self.validated_data)
        rows: TimeoutQuerySet = Timeout.objects.using(using)
        state, overdue = asked.pop("state", None), asked.pop("overdue", False)
        window = {
            f"{column}__{sign}": asked.pop(name)
            for name, column, sign in (
                ("due_from", "run_at", "gte"),
                ("due_until", "run_at", "lt"),
                ("settled_from", "settled_at", "gte"),
                ("settled_until", "settled_at", "lt"),
            )
            if name in asked
        }
        if overdue:
            window["run_at__lte"] = clock.DatabaseNow()
        narrow = self._narrowed(asked)
        if "object" in asked:  # few enough to be sorted and sifted without an index
            kind, object_id = asked["object"]
            rows = rows.filter(narrow, content_type=kind, object_id=object_id, **window)
            return rows.filter(**({"state": state} if state else {})).order_by("-id"), Q()
        if state in WAITING or overdue or any(name.startswith("run_at") for name in window):
            return _waiting(rows.filter(**window), state or State.PENDING), narrow
        if state or window:
            rows = rows.filter(settled_at__isnull=False, **window).order_by("-settled_at", "-id")
            return rows, narrow & Q(state=state) if state else narrow
        return rows.order_by("-id"), narrow

    @staticmethod
    def _narrowed(asked: Mapping[str, Any]) -> Q:
        narrow = Q(**{name: asked[name] for name in ("queue", "key") if name in asked})
        if "policy" in asked:
            policy = registry.get(asked["policy"])
            narrow &= Q(policy__in=policy.labels if policy else [asked["policy"]])
        return narrow


def _waiting(rows: TimeoutQuerySet, state: str) -> TimeoutQuerySet:
    """In the order of `delayq_unsettled`: soonest first."""
    rows = rows.unsettled()
    if connections[rows.db].vendor != "mysql":
        return rows.filter(state=state).order_by("run_at", "id")
    # Of an equal state MySQL and MariaDB read all rows from the first one on, for every page anew.
    return rows.filter(state__gte=state, state__lte=state).order_by("state", "run_at", "id")
