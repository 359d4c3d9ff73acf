"""Schedule, cancel and guard by the numbers that other services have, with an `Idempotency-Key` if they send one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Final, get_args

from django.contrib.auth.models import AnonymousUser
from django.db import connections, transaction
from django.db.models import Model, QuerySet, TextChoices
from django.http import Http404
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from rest_framework import serializers
from rest_framework.exceptions import APIException, NotAuthenticated, NotFound, PermissionDenied, ValidationError
from rest_framework.generics import GenericAPIView
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from django_delayq.contrib.rest_framework import inputs, outputs
from django_delayq.contrib.rest_framework.openapi import IDEMPOTENCY_KEY, describe
from django_delayq.contrib.rest_framework.views import (
    Conflict,
    OptionalScope,
    StaffWithPermission,
    answering_conflicts,
    refuse_query,
)
from django_delayq.exceptions import InvalidDelay, InvalidPayload
from django_delayq.ledger.answers import Answer, InProgress, KeyReused, answered_once, digest_of, stored_answer
from django_delayq.ledger.locking import lock_object, transaction_of
from django_delayq.ledger.routing import database_of
from django_delayq.ledger.subjects import subject_of
from django_delayq.models import Timeout
from django_delayq.operations import selection
from django_delayq.policy.policies import TimeoutPolicy, get_policy, registry
from django_delayq.rounds.memory import MAX_REASON
from django_delayq.scheduling.errors import (
    DeadlinePassed,
    DeadlineUndecided,
    ExtensionLimit,
    NotWaiting,
    TimeoutConflict,
)
from django_delayq.scheduling.guards import before_deadline
from django_delayq.scheduling.payloads import check_payload
from django_delayq.scheduling.single import OnConflict, cancel_timeout, check_conflict, schedule_timeout
from django_delayq.sql.key_types import pk_of
from django_delayq.times.lengths import UNITS, parse_delay

STATUSES: Final = (401, 403, 404, 422)
"""Of all three requests, for the schema."""
MAX_KEY: Final = 255
"""The longest `Idempotency-Key`, as other services have it. A UUID has 36 characters."""
_QUOTED: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])+)"')
_BARE: Final = re.compile(r"[!#-~]+")


class Code(TextChoices):
    """Why nothing was changed, for programs."""

    PENDING = "pending", _("A timeout is pending already.")
    LIMIT = "limit", _("Its policy does not allow a deadline that is so late.")
    PASSED = "passed", _("Too late: the timeout has fired, or its deadline has passed.")
    NOT_WAITING = "not_waiting", _("The condition of the policy does not hold for this object.")


class Undecided(APIException):
    """A handler outside of a transaction is running, and may still leave the object alone."""

    status_code = 503
    default_detail = _("The handler of the timeout is running, and nothing is decided yet. Send the request again.")
    default_code = "undecided"
    wait = 5
    """Seconds until the caller should retry. The handler calls something slow, mostly for a few seconds."""


class Reused(APIException):
    """The `Idempotency-Key` belongs to another request."""

    status_code = 422
    default_detail = _("This Idempotency-Key belongs to another request. Use a new one for each request.")
    default_code = "key_reused"


class ServiceSerializer(inputs.StrictSerializer):
    """What the three requests have in common: a policy, and an object by its key or by a value of `search`."""

    policy = serializers.CharField(max_length=200, help_text=_("A label, like `shop.order.cancel_unpaid`."))
    object = inputs.ExactField(255, help_text=_("The primary key of the object."))
    search = inputs.ExactField(
        help_text=_("Instead of it, the value of a field that a policy names in `search`, such as an order number.")
    )
    key = inputs.ExactField(200, allow_blank=True, default="")

    def get_fields(self) -> dict[str, Any]:
        return {**super().get_fields(), "reason": inputs.reason_field()}

    def validate_policy(self, label: str) -> TimeoutPolicy[Any]:
        """Return the declared policy, if the view serves it."""
        policy, served = registry.get(label), self.context["view"].policies
        if policy is None or (served is not None and policy not in map(get_policy, served)):
            raise ValidationError(_("There is no such policy."))
        return policy

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Return the values, with the key of the object in its own type."""
        if ("object" in attrs) == ("search" in attrs):
            raise ValidationError({"object": [_("Give either the object or a value to search.")]})
        if "object" in attrs:
            try:
                attrs["object"] = pk_of(attrs["policy"].concrete_model, attrs["object"])
            except ValueError as error:
                raise ValidationError({"object": [_("This is not a key of that model.")]}) from error
        return attrs


class ScheduleSerializer(ServiceSerializer):
    """A deadline: units that are summed, or `at`. Without one, the policy computes it."""

    at = inputs.MomentField(required=False, help_text=_("In the past: due now."))
    on_conflict = serializers.ChoiceField(
        get_args(OnConflict), default="replace", help_text=_("What happens to a timeout that is pending already.")
    )
    payload = serializers.JSONField(required=False, allow_null=True, default=None, help_text=_("For the handler."))

    def get_fields(self) -> dict[str, Any]:
        return {**super().get_fields(), **inputs.fields_of_units()}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Return the values, with the parts of the deadline in `delay`. Nothing is mixed."""
        attrs = super().validate(attrs)
        attrs["delay"] = {name: attrs.pop(name) for name in (*UNITS, "at") if name in attrs}
        if "at" in attrs["delay"] and len(attrs["delay"]) > 1:
            raise ValidationError({"delay": [_("Give either a duration or a time.")]})
        try:
            check_conflict(attrs["on_conflict"], parse_delay(attrs["delay"]), attrs["policy"])
        except InvalidDelay as error:
            raise ValidationError({"delay": [str(error)]}) from error
        return attrs

    def validate_payload(self, payload: Any) -> Any:
        """Refuse what a database cannot store."""
        try:
            return check_payload(payload)
        except InvalidPayload as error:
            words = _("A payload has at most 1 MB and 31 lists and objects in each other, and no NUL.")
            raise ValidationError(words) from error


class CancelServiceSerializer(ServiceSerializer):
    """No further fields."""


class GuardSerializer(ServiceSerializer):
    """What makes it too late."""

    strict = serializers.BooleanField(
        default=False, help_text=_("The deadline decides, also if no worker has fired the timeout yet.")
    )
    waiting = serializers.BooleanField(
        default=False, help_text=_("The condition of the policy must hold, so a second payment is refused.")
    )


class ReasonSerializer(outputs.TroubleSerializer):
    """Why nothing was changed."""

    code = serializers.ChoiceField(Code.choices)


class ScheduledSerializer(serializers.Serializer[Any]):
    """The timeout that is pending now, or the one that was in the way."""

    refusal = ReasonSerializer(allow_null=True)
    timeout = outputs.TimeoutSerializer(allow_null=True)


class CancelledSerializer(serializers.Serializer[Any]):
    """Whether it will not fire, and its newest round."""

    cancelled = serializers.BooleanField(help_text=_("true: it will not fire; false: too late."))
    timeout = outputs.TimeoutSerializer(allow_null=True)


class GuardedSerializer(ScheduledSerializer):
    """Whether the event was in time, and the round that decided it."""

    in_time = serializers.BooleanField(help_text=_("true: it will not fire, proceed."))


class ServiceView(OptionalScope, GenericAPIView):  # type: ignore[type-arg]
    """A request of another service: its effect and its stored answer are one transaction.

    It is not part of the transaction that `ATOMIC_REQUESTS` opens, in which the row of an `Idempotency-Key` would be
    invisible to a simultaneous request.

    A subclass restricts it by `policies`, and their objects by `queryset`, or by `get_queryset()`, which may read
    `self.policy`. An object that the user may not see is answered like one that does not exist.
    """

    permission_classes: Any = [StaffWithPermission]
    filter_backends = []
    pagination_class = None
    operations: ClassVar[dict[str, Any]] = {}
    view_permissions: ClassVar[tuple[str, ...]] = ()
    body: ClassVar[type[ServiceSerializer]]
    result: ClassVar[type[serializers.Serializer[Any]]]
    policies: Collection[str | TimeoutPolicy[Any]] | None = None
    """The policies that it serves, or their labels; None: all."""
    policy: TimeoutPolicy[Any]
    """The policy of the request."""

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        """Return the view, which opens its own transaction."""
        view = super().as_view(**initkwargs)
        for alias in connections:
            view = transaction.non_atomic_requests(using=alias)(view)
        return view

    def get_serializer(self, *args: Any, **options: Any) -> ServiceSerializer:
        """Return the serializer of the request, whose fields the browsable API shows as a form."""
        return self.body(*args, context=self.get_serializer_context(), **options)

    def get_queryset(self) -> QuerySet[Model]:
        """Return the objects that the view serves: `queryset`, or all of the policy's model."""
        has_own = self.queryset is not None  # type: ignore[misc, arg-type, unused-ignore]
        return super().get_queryset() if has_own else self.policy.model._base_manager.all()

    def answer(self, request: Request) -> Response:
        """Check the request, and act unless its answer is stored."""
        refuse_query(request)
        sent = self.get_serializer(data=request.data)
        sent.is_valid(raise_exception=True)
        values = dict(sent.validated_data)
        self.policy = values.pop("policy")
        using = database_of(self.policy.concrete_model)
        self.check_search(values)
        given = idempotency_key(request)
        pk = self.find(values, using)

        def act() -> Answer:
            obj: Model | None = None if pk is None else lock_object(self.policy.model, pk, using)
            if obj is None:
                raise self.missing(values)
            others = {name: value for name, value in values.items() if name not in ("object", "search")}
            status, shown = self.act(obj, {**others, "reason": self.reason_of(values["reason"])})
            # As JSON has it, so that a stored answer equals the first one.
            return Answer(status, json.loads(JSONRenderer().render(self.result(shown).data)))

        with answering_conflicts(using):
            if given is None:
                with transaction_of(using):
                    answer = act()
            else:
                answer = self.once(request, given, pk, using, act)
        headers = {"Idempotent-Replayed": "true"} if answer.is_stored else None
        return Response(answer.body, answer.status, headers=headers)

    def act(self, obj: Any, values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Do what was asked, in a transaction; return the status and what `result` shows. Raises APIException."""
        raise NotImplementedError

    def once(self, request: Request, given: str, pk: Any, using: str, act: Callable[[], Answer]) -> Answer:
        """Return the stored answer of this user and key, or act. Raises APIException.

        Callers without a user share their keys only with those who may see the same object.
        """
        user = self.user
        caller = (self.policy.label, str(pk)) if user.pk is None else (str(user.pk), user.get_username())
        content = {name: value for name, value in dict(request.data).items() if name != "csrfmiddlewaretoken"}
        key, sent = digest_of(*caller, given), json.dumps(content, sort_keys=True, default=str)
        digests = key, digest_of(type(self).__name__, sent), using
        try:
            return stored_answer(*digests) or act() if pk is None else answered_once(*digests, act)
        except InProgress as error:
            raise Conflict(_("A request with this Idempotency-Key is still running. Send it again.")) from error
        except KeyReused as error:
            raise Reused from error

    def check_search(self, values: dict[str, Any]) -> None:
        """Refuse a search by fields that no policy names, or that this user may not search."""
        model = self.policy.concrete_model
        if "search" in values and not selection.names_searched(model, self.user):
            if selection.names_searched(model):
                raise PermissionDenied
            raise ValidationError({"search": [_("No policy of this model names a field in search. Give the object.")]})

    def find(self, values: dict[str, Any], using: str) -> Any:
        """Return the key of the object, read from the writer; None: there is none, but an answer may be stored.

        Raises APIException: there is none, also for this user alone, or there are several.
        """
        rows = self.filter_queryset(self.get_queryset()).using(using)
        is_of_policy = rows.model._meta.concrete_model is self.policy.concrete_model
        found = self.named(rows, values) if is_of_policy else []
        try:
            for obj in found:
                self.check_object_permissions(self.request, obj)
        except (PermissionDenied, NotAuthenticated, Http404):
            raise self.missing(values) from None
        if len(found) > 1:
            words = gettext('Several objects have the value "{value}". Give the primary key of one, as object.')
            raise Conflict(words.format(value=values["search"]))
        if not found and (self.user.pk is None or self.named(self.policy.model._base_manager.using(using), values)):
            raise self.missing(values)
        return found[0].pk if found else None

    def named(self, rows: QuerySet[Any], values: dict[str, Any]) -> list[Model]:
        """Return those of `rows` that the request names: at most two."""
        if "search" in values:
            return selection.find_named(rows, values["search"], 2, self.user)
        return list(rows.filter(pk=values["object"]))

    def missing(self, values: dict[str, Any]) -> NotFound:
        """Return the exception for an object that does not exist, or that the user may not see."""
        named = {"model": self.policy.model._meta.verbose_name, "value": values.get("search", values.get("object"))}
        return NotFound(gettext('There is no {model} "{value}".').format(**named))

    @property
    def user(self) -> Any:
        """Return the user, also where `UNAUTHENTICATED_USER` is None: the permissions of a project may admit that."""
        return AnonymousUser() if self.request.user is None else self.request.user

    def reason_of(self, given: str) -> str:
        """Return the reason to store, with the name of the user."""
        by = f"rest:{self.user.get_username()}"
        return f"{given[: MAX_REASON - len(by) - 3]} ({by})" if given else by


def idempotency_key(request: Request) -> str | None:
    """Return the key of a request, in quotes as its draft of the IETF has it, or without; None: it has none."""
    given = request.headers.get(IDEMPOTENCY_KEY)
    if given is None:
        return None
    quoted, bare = _QUOTED.fullmatch(given), _BARE.fullmatch(given)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else given if bare else ""
    if not 0 < len(key) <= MAX_KEY:
        words = _("Give a string of 1 to 255 characters of ASCII, such as a UUID.")
        raise ValidationError({IDEMPOTENCY_KEY: [words]})
    return key


def _refused(code: Code) -> dict[str, str]:
    return {"code": code.value, "detail": str(code.label)}


class ScheduleView(ServiceView):
    """Schedule a policy for an object."""

    view_permissions = ("schedule_timeout",)
    body, result = ScheduleSerializer, ScheduledSerializer

    @describe("services", result, STATUSES, body=body, parameters=[IDEMPOTENCY_KEY])
    def post(self, request: Request, *_: Any, **__: Any) -> Response:
        """Schedule a policy for an object, or move its pending timeout. Without a delay, the policy computes it."""
        return self.answer(request)

    def act(self, obj: Any, values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        delay = values.pop("delay")
        try:
            row = schedule_timeout(obj, self.policy, **values, **delay)
        except TimeoutConflict as error:
            return 409, {"refusal": _refused(Code.PENDING), "timeout": error.timeout}
        except ExtensionLimit as error:
            return 409, {"refusal": _refused(Code.LIMIT), "timeout": error.timeout}
        except InvalidDelay as error:
            missing = _("Its policy gives this object no deadline. Give a delay, such as minutes.")
            words = str(error) if delay else missing
            raise ValidationError({"at" if "at" in delay else "delay": [words]}) from error
        return 200, {"refusal": None, "timeout": row}


class CancelView(ServiceView):
    """Cancel the timeout of a policy and an object."""

    view_permissions = ("cancel_timeout",)
    body, result = CancelServiceSerializer, CancelledSerializer

    @describe("services", result, STATUSES, body=body, parameters=[IDEMPOTENCY_KEY])
    def post(self, request: Request, *_: Any, **__: Any) -> Response:
        """Cancel the timeout of a policy and an object. `cancelled` is false if it has fired, or is firing.

        One that is not armed yet, or that is dead, counts as cancelled. It is not armed later.
        """
        return self.answer(request)

    def act(self, obj: Any, values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        is_cancelled = cancel_timeout(obj, self.policy, **values)
        row: Timeout | None = subject_of(obj, self.policy, values["key"]).rounds().first()
        return 200, {"cancelled": is_cancelled, "timeout": row}


class GuardView(ServiceView):
    """Report an event that was in time only if the timeout has not fired, and cancel the timeout."""

    view_permissions = ("cancel_timeout",)
    body, result = GuardSerializer, GuardedSerializer

    @describe("services", result, (*STATUSES, 503), body=body, parameters=[IDEMPOTENCY_KEY])
    def post(self, request: Request, *_: Any, **__: Any) -> Response:
        """Cancel the timeout because its event has happened, and learn whether that was in time.

        200: it will not fire, proceed. 409: too late, do not. 503: not decided yet, ask again.
        """
        return self.answer(request)

    def act(self, obj: Any, values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            with before_deadline(obj, self.policy, **values) as row:
                pass
        except DeadlineUndecided as error:
            raise Undecided from error
        except DeadlinePassed as error:
            return 409, {"in_time": False, "refusal": _refused(Code.PASSED), "timeout": error.timeout}
        except NotWaiting:
            row = subject_of(obj, self.policy, values["key"]).rounds().first()
            return 409, {"in_time": False, "refusal": _refused(Code.NOT_WAITING), "timeout": row}
        return 200, {"in_time": True, "refusal": None, "timeout": row}
