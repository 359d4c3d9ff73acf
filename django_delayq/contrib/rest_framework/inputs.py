"""What requests may contain: the query of the list of timeouts, with its pages, and the bodies of operations.

A page starts after the last row of the page before. So the last page is as fast as the first, and nothing is counted.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Self, cast

from django.conf import settings
from django.core.exceptions import ValidationError as DjangoValidationError
from django.db.models import Model, Q
from django.http import QueryDict
from django.utils.translation import gettext_lazy as _
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.pagination import BasePagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param
from rest_framework.validators import ProhibitSurrogateCharactersValidator
from rest_framework.views import APIView

from django_delayq.contrib.rest_framework.fields import SecondsField, shown_time
from django_delayq.contrib.rest_framework.outputs import ObstacleSerializer, obstacles_of
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import search
from django_delayq.ledger.routing import database_of
from django_delayq.models import WAITING, Timeout, TimeoutQuerySet
from django_delayq.operations import selection
from django_delayq.operations.parameters import Choice, Length, Moment, Number, Parameter
from django_delayq.operations.registry import OPERATIONS, TIMEOUT_OPERATIONS, Operation
from django_delayq.policy.policies import labels_of, registry
from django_delayq.rounds.memory import MAX_REASON
from django_delayq.sql.key_types import HAS_FAILED
from django_delayq.sql.now import DatabaseNow
from django_delayq.times import clock
from django_delayq.times.lengths import UNITS, parse_delay

State = Timeout.State
UNSETTLED: Final = (*WAITING, State.FIRING)
MAX_SORTED: Final = 500
"""At most this many rows are sorted for a page; more are read in the order of an index."""
LOOKUPS: Final = {
    "due_from": "run_at__gte",
    "due_until": "run_at__lt",
    "settled_from": "settled_at__gte",
    "settled_until": "settled_at__lt",
}
MAX_UNITS: Final = 1e9
"""More than any deadline allows in every unit, and less than Python's limit."""
SETTINGS: Final = ("off", "declared")


class Query(serializers.Serializer[Any]):
    """The parameters of a query."""

    @classmethod
    def of(cls, query: Mapping[str, Any], others: Iterable[str] = ()) -> Self:
        """Return the checked parameters of a query, which may also have `others`. Raises ValidationError."""
        if unknown := sorted(set(query) - {*cls().fields, "format", *others}):
            raise ValidationError({name: [_("There is no such filter.")] for name in unknown})
        data = {name: query[name] for name in query}  # of a QueryDict, DRF would ignore empty values
        if "where" in data and isinstance(query, QueryDict):
            data["where"] = query.getlist("where")
        asked = cls(data=data)
        asked.is_valid(raise_exception=True)
        return asked


class ReportQuery(Query):
    """What a report counts by, and its days."""

    by = serializers.CharField(
        default="day",
        max_length=200,
        help_text=_("`day`, `month`, or a column of the objects, also over foreign keys: `channel__region`."),
    )
    first = serializers.DateField(required=False, help_text=_("The first day; by default 30 days, or 12 months."))
    last = serializers.DateField(required=False, help_text=_("The last day; by default today."))


class MomentField(serializers.DateTimeField):
    """A datetime in the years that every database can compare."""

    def enforce_timezone(self, value: datetime) -> datetime:
        if value.year not in search.YEARS:
            raise ValidationError(_("This time is too far away."))
        # Without USE_TZ, datetimes are local, and Django REST framework would convert to UTC.
        return super().enforce_timezone(value) if settings.USE_TZ else clock.fitting(value)


class ExactField(serializers.CharField):
    """A string that may be left out. Blanks belong to it: without them it would name another object."""

    def __init__(self, max_length: int = 400, **options: Any) -> None:
        super().__init__(required=False, max_length=max_length, trim_whitespace=False, **options)


class ObjectReference(ExactField):
    """`app.model:key`, as the condition on the rows about this object."""

    def to_internal_value(self, value: Any) -> Q:  # type: ignore[override] # not a string
        reference = super().to_internal_value(value)
        model, _colon, key = reference.partition(":")
        if not key or "." not in model:
            raise ValidationError(_("Give an object like shop.order:17."))
        try:
            return self.condition(reference)
        except LookupError as error:
            raise ValidationError(_("There is no such model.")) from error
        except ValueError as error:
            raise ValidationError(_("This is not a key of that model.")) from error

    def condition(self, reference: str) -> Q:
        return selection.about_reference(reference, database_of(Timeout))


class RelatedReference(ObjectReference):
    """`app.model:key`, as the condition on the rows about this object, and about all whose policies lead to it.

    Whether the user may view its model is asked in `Selection.rows`.
    """

    model: type[Model] | None = None

    def condition(self, reference: str) -> Q:
        found = selection.about_related(reference, database_of(Timeout))
        self.model = selection.model_named(reference)
        return found


class Selection(Query):
    """The query parameters of the list. Unknown and contradictory ones are refused."""

    state = serializers.ChoiceField(State.choices, required=False, help_text=_("Only rows in this state."))
    policy = serializers.CharField(
        required=False, max_length=200, help_text=_("A label. Rows under the policy's former labels are included.")
    )
    queue = ExactField(100)
    object = ObjectReference(help_text=_("The timeouts of one object, like `shop.order:17`."))
    related = RelatedReference(
        help_text=_(
            "The timeouts of an object, and of all whose policies lead to it over foreign keys, like `shop.merchant:7`."
        ),
    )
    where = serializers.ListField(
        child=serializers.CharField(max_length=400, trim_whitespace=False),
        required=False,
        help_text=_("Of objects with this value of a column, like `channel__merchant=7`. Needs a policy."),
    )
    key = ExactField(200)
    search = ExactField(
        help_text=_("A complete object id, a key, or the value of a field that a policy names in `search`."),
    )
    due_from = MomentField(required=False, help_text=_("Pending rows whose next attempt is at this time or later."))
    due_until = MomentField(required=False, help_text=_("Pending rows whose next attempt is before this time."))
    overdue = serializers.BooleanField(
        required=False, help_text=_("true: pending rows that are due by the database's clock.")
    )
    failing = serializers.BooleanField(
        required=False, help_text=_("true: pending rows of which an attempt has failed, and which are tried again.")
    )
    settled_from = MomentField(required=False, help_text=_("Rows that were settled at this time or later."))
    settled_until = MomentField(required=False, help_text=_("Rows that were settled before this time."))

    def validate_policy(self, label: str) -> str:
        """Refuse a label that is neither declared nor in the ledger: its list would be empty, as if all were well."""
        if registry.get(label) is None and not Timeout.objects.using(database_of(Timeout)).of_labels([label]).exists():
            raise ValidationError(_("There is no such policy."))
        return label

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse parameters that no row can satisfy: an unsettled one has no settling time."""
        due = any(attrs.get(name) for name in ("due_from", "due_until", "overdue", "failing"))
        settled = any(attrs.get(name) for name in ("settled_from", "settled_until"))
        state = attrs.get("state")
        allowed = (State.PENDING,) if attrs.get("failing") else UNSETTLED
        if (due and settled) or (due and state and state not in allowed) or (settled and state in UNSETTLED):
            raise ValidationError(
                _("Pending rows have a due time and settled rows have none: these filters exclude each other.")
            )
        self.due, self.settled = due, settled
        if "where" in attrs and registry.get(attrs.get("policy", "")) is None:
            raise ValidationError({"where": [_("Give a declared policy, too, whose objects have this column.")]})
        return attrs

    def _about(self, user: Any, using: str) -> Q:
        """Return the condition on the objects of `related` and `where`. Raises PermissionDenied, ValidationError."""
        asked, field = self.validated_data, cast("RelatedReference", self.fields["related"])
        wanted: Q = asked.get("related", Q())
        policy = registry.get(asked.get("policy", ""))
        if user is not None and "related" in asked and field.model and not selection.may_view(user, field.model):
            raise PermissionDenied
        if "where" not in asked or policy is None:
            return wanted
        model, conditions = policy.concrete_model, asked["where"]
        try:
            condition = selection.where(model, conditions, using, only=model)
        except ValueError as error:
            raise ValidationError({"where": [str(error)]}) from error
        if user is not None and not selection.may_ask_where(user, model, conditions):
            raise PermissionDenied
        return wanted & condition

    def rows(self, every: TimeoutQuerySet, user: Any = None) -> tuple[TimeoutQuerySet, Q]:
        """Return those of `every` in the order of an index that finds them, and the remaining condition.

        `search` reads only fields that `user` may search.
        """
        asked = self.validated_data
        # Settled rows keep the time of their last attempt, so a due filter without a state must name it.
        state = asked.get("state") or (State.PENDING if self.due else None)
        labels = labels_of(asked["policy"]) if "policy" in asked else ()
        of_policy, in_state = Q(policy__in=labels) if labels else Q(), Q(state=state) if state else Q()
        narrow = Q(queue=asked["queue"]) if "queue" in asked else Q()
        rows = every.filter(**{lookup: asked[name] for name, lookup in LOOKUPS.items() if name in asked})
        is_failing = asked.get("failing", False)
        has_failed = HAS_FAILED if is_failing else Q()
        rows = rows.filter(run_at__lte=DatabaseNow()) if asked.get("overdue") else rows
        if not {"object", "key", "search", "related", "where"}.isdisjoint(asked):
            rows = rows.filter(self._about(user, rows.db))
            rows = rows.of_key(asked["key"]) if "key" in asked else rows
            rows = rows.filter(asked["object"]) if "object" in asked else rows
            if "search" in asked:
                rows = rows.filter(pk__in=selection.find_ids(every, asked["search"], user))
            return rows.order_by(*search.NEWEST.fields), narrow & of_policy & in_state & has_failed
        is_settled = state is not None and state not in UNSETTLED
        few = search.ids_if_few(every.of_labels(labels), MAX_SORTED) if labels else None
        if few is None and (is_settled or is_failing):
            # Dead and failing rows are usually few: `delayq_policy` and `delayq_failing` find them by label.
            found = every.of_labels(labels or search.labels_in(every))
            found = found.failing() if is_failing else found.filter(state=state)
            few = search.ids_if_few(found, MAX_SORTED)
        if few is not None:
            rows = rows.filter(in_state if is_settled else has_failed, pk__in=few)
        elif state in UNSETTLED and len(labels) == 1:  # the same index has the rows of one label in this order
            rows, narrow = rows.filter(of_policy), narrow & has_failed
        else:
            narrow &= of_policy & (in_state if is_settled else has_failed)
        if state in UNSETTLED:
            return search.in_state(rows, state), narrow
        if is_settled or self.settled:
            return rows.filter(settled_at__isnull=False).order_by(*search.LAST_SETTLED.fields), narrow
        return rows.order_by(*search.NEWEST.fields), narrow


class KeysetPagination(BasePagination):
    """Pages by `?cursor=` and `?page_size=`; `next` is the address of the next page."""

    page_size = 50
    max_page_size = 500
    narrow = Q()
    """The condition that no index answers. The view of the list sets it."""

    def paginate_queryset(self, queryset: Any, request: Request, view: APIView | None = None) -> list[Any]:
        """Return the next rows of `queryset` that match `narrow`, as `search.page` does. Raises ValidationError."""
        size = request.query_params.get("page_size") or str(self.page_size)
        if not size.isascii() or not size.isdigit() or len(size) > 6 or not int(size):
            raise ValidationError({"page_size": [_("Enter a number of at least 1.")]})
        cursor = request.query_params.get("cursor")
        try:
            start = search.Cursor.decode(cursor, search.Order.of(queryset)) if cursor else None
        except ValueError as error:
            raise ValidationError({"cursor": [_("This is not a cursor of this list.")]}) from error
        self.request = request
        self.rows, self.following = search.page(queryset, self.narrow, start, min(int(size), self.max_page_size))
        return self.rows

    def get_paginated_response(self, data: Any) -> Response:
        address, end = self.request.build_absolute_uri(), self.following
        following = replace_query_param(address, "cursor", end.encode()) if end else None
        obstacles = ObstacleSerializer(obstacles_of(self.rows), many=True).data
        now = shown_time(clock.now())
        return Response({"server_time": now, "next": following, "obstacles": obstacles, "results": data})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "required": ["server_time", "next", "obstacles", "results"],
            "properties": {
                "server_time": {"type": "string", "format": "date-time"},
                "next": {"type": "string", "format": "uri", "nullable": True},
                "obstacles": {
                    "type": "array",
                    "items": {"type": "object"},
                    "description": "Why unsettled timeouts of this page do not fire although they are due.",
                },
                "results": schema,
            },
        }

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        size = {"type": "integer", "minimum": 1, "maximum": 999999}
        described = (
            ("cursor", "The start of the page, from `next` of the page before.", {"type": "string"}),
            ("page_size", f"How many; {self.page_size} by default, {self.max_page_size} at most.", size),
        )
        return [
            {"name": name, "in": "query", "required": False, "description": words, "schema": schema}
            for name, words, schema in described
        ]


class StrictSerializer(serializers.Serializer[Any]):
    """The body of a request. Unknown fields are refused: a misspelt one would change something else."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the checked fields. Raises ValidationError for unknown ones, such as a misspelt `until`."""
        given = data if isinstance(data, Mapping) else {}
        for name, value in given.items():
            try:  # JSON may contain lone surrogates: a message that quoted one could not be encoded
                ProhibitSurrogateCharactersValidator()(value)
            except ValidationError as error:
                raise ValidationError({name.encode(errors="replace").decode(): error.detail}) from error
        known = {*self.fields, "csrfmiddlewaretoken"}  # a form's, for Django
        if unknown := set(given) - known:
            words = _("There is no such field. This action accepts {names}.")
            complaint = words.format(names=", ".join(f'"{name}"' for name in self.fields))
            # JSON may contain lone surrogates, which no response can, and very many names: an answer has some of them.
            names = sorted(name.encode(errors="replace").decode() for name in unknown)[: len(known)]
            raise ValidationError({name: [complaint] for name in names})
        return super().to_internal_value(data)

    def get_initial(self) -> dict[str, Any]:
        """Return what the browsable API offers: data that the action accepts, so no null where it refuses one."""
        initial = dict(super().get_initial())
        return {name: value for name, value in initial.items() if value is not None or self.fields[name].allow_null}


class OperationSerializer(StrictSerializer):
    """The parameters of an operation, and a reason, which is stored with the change."""

    operation: typing.ClassVar[Operation]

    def get_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"reason": reason_field()}
        if self.operation.name in TIMEOUT_OPERATIONS:
            words = _("Only report what would happen.")
            fields["dry_run"] = serializers.BooleanField(required=False, default=False, help_text=words)
        if self._has_settings:
            fields |= {name: serializers.BooleanField(required=False, default=False) for name in SETTINGS}
        for each in self.operation.parameters:
            fields |= fields_of(each, is_required=each.is_required and not self._has_settings)
        return fields

    @property
    def _has_settings(self) -> bool:
        """Return whether it is a guard rail that is off, or declared, by a field of its own and not by a value."""
        return self.operation.off is not None and not any(each.is_nullable for each in self.operation.parameters)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the operation."""
        common = {name: attrs.pop(name) for name in ("reason", "dry_run") if name in attrs}
        settings = [name for name in SETTINGS if attrs.pop(name, False)]
        units = {name: attrs.pop(name) for name in UNITS if name in attrs}
        try:
            if delay := parse_delay(units):
                attrs["after"] = delay.after
            return common | self.operation.arguments(attrs, settings, name_of)
        except DjangoValidationError as error:
            together = "delay" if self.operation.off is None else "guard"
            raise ValidationError({name or together: words for name, words in error.message_dict.items()}) from error
        except InvalidDelay as error:
            raise ValidationError({"delay": [str(error)]}) from error


def fields_of(parameter: Parameter, *, is_required: bool) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
    """Return the fields of a request that give the value of `parameter`."""
    name, limits = parameter.name, dict[str, Any]()
    words: dict[str, Any] = {"required": is_required, "help_text": parameter.help or None}
    nullable: Any = {"allow_null": parameter.is_nullable}
    match parameter:
        case Moment():
            words["help_text"] = None  # it is about a field that is empty
            return {name: MomentField(**words, **nullable)}
        case Length(in_units=True):
            return fields_of_units()
        case Length():
            limits = {"min_value": max(parameter.least.total_seconds(), -MAX_UNITS)}
            limits["max_value"] = min(parameter.most.total_seconds(), MAX_UNITS)
            if parameter.least < timedelta(0):
                words["help_text"] = _("Added to the deadline; negative: earlier.")
            return {name_of(parameter): SecondsField(source=name, initial=3600, **limits, **words)}
        case Choice():
            values = [value for value, _ in parameter.choices]
            return {name: serializers.ChoiceField(values, initial=parameter.default, **words)}
        case Number():
            limits = {"min_value": parameter.least, "max_value": parameter.most}
            first = None if parameter.is_nullable else parameter.default
            return {name: serializers.IntegerField(initial=first, **limits, **words, **nullable)}
    return {name: serializers.BooleanField(default=parameter.default, initial=parameter.default, **words)}


def fields_of_units() -> dict[str, Any]:
    """Return a field for each unit of a duration, which are summed."""
    examples = {"hours": 1}  # a fraction may have a comma, which browsers do not read as a number
    limits: Any = {"required": False, "min_value": 0, "max_value": MAX_UNITS}
    units: Any = {unit: examples.get(unit, serializers.empty) for unit in UNITS}
    return {unit: serializers.FloatField(initial=first, **limits) for unit, first in units.items()}


def reason_field() -> Any:
    """Return the field of a reason."""
    return serializers.CharField(required=False, allow_blank=True, default="", max_length=MAX_REASON)


def name_of(parameter: Parameter) -> str:
    """Return the name of the field of `parameter`; `delay` for a duration in several fields."""
    if isinstance(parameter, Length):
        return "delay" if parameter.in_units else f"{parameter.name}_seconds"
    return parameter.name


def _body_of(operation: Operation) -> type[OperationSerializer]:
    name = f"{'' if operation.off is None else 'Set'}{operation.name.title()}Serializer"  # its schema is named so, too
    return type(name, (OperationSerializer,), {"operation": operation, "__doc__": ""})


BODIES: Final = {name: _body_of(each) for name, each in OPERATIONS.items()}
"""The body of the request of each operation."""
