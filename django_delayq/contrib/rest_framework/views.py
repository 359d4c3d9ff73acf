"""The operator's addresses for staff (timeouts, policies and status), and the countdown of one object for its owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, cast

from django.db import DatabaseError, connections
from django.db.models import Model, QuerySet
from django.http import Http404, HttpResponseBase
from django.utils.cache import get_conditional_response, patch_cache_control
from django.utils.crypto import salted_hmac
from django.utils.functional import cached_property
from django.utils.http import quote_etag
from django.utils.translation import gettext_lazy as _
from rest_framework.decorators import action
from rest_framework.exceptions import APIException, NotAuthenticated, PermissionDenied, ValidationError
from rest_framework.generics import GenericAPIView
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.reverse import reverse
from rest_framework.settings import api_settings
from rest_framework.versioning import QueryParameterVersioning
from rest_framework.views import APIView
from rest_framework.viewsets import GenericViewSet, ViewSet

from django_delayq.contrib.countdown import countdown_of
from django_delayq.contrib.rest_framework import inputs, outputs
from django_delayq.contrib.rest_framework.openapi import ETAG, LABEL, describe
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger import controls
from django_delayq.ledger.db_connections import transient_reason
from django_delayq.ledger.routing import database_of
from django_delayq.models import PolicyChange, Timeout, TimeoutQuerySet
from django_delayq.monitoring import reports
from django_delayq.monitoring.snapshot import count_failing, overview
from django_delayq.operations import PolicyConflict, Refusal, Result, changes
from django_delayq.operations.registry import OPERATIONS, POLICY_OPERATIONS, TIMEOUT_OPERATIONS, Operation
from django_delayq.policy.policies import TimeoutPolicy, get_policy, registry
from django_delayq.times.clock import to_ms

NO_COLUMN, NO_DAYS = _("There is no such column."), _("The first day is after the last one, or too far away.")
NOT_IN_THE_BODY: Final = _("Send the fields of an action in its body, not in its address.")


class Conflict(APIException):
    """Another change won a race, or contradicts this one. Nothing was changed."""

    status_code = 409
    default_detail = _("Another change happened at the same time. Read the current state and retry.")
    default_code = "conflict"


@contextmanager
def answering_conflicts(using: str) -> Iterator[None]:
    """Raise Conflict for a deadlock or a lock timeout in the block. An unreachable database is a server error."""
    driver_connection = connections[using].connection
    try:
        yield
    except DatabaseError as error:
        reason = transient_reason(error, using, driver_connection=driver_connection)
        if reason is None or driver_connection is not connections[using].connection:
            raise
        raise Conflict from error


class StaffWithPermission(BasePermission):
    """Allow active staff with the permission of the operation, or with one of the view's permissions to read."""

    def has_permission(self, request: Request, view: Any) -> bool:
        user: Any = request.user  # None if that is `UNAUTHENTICATED_USER`
        operation = view.operations.get(getattr(view, "action", None))
        names = (operation.permission,) if operation else view.view_permissions
        is_staff = user and user.is_active and user.is_staff
        return bool(is_staff) and any(user.has_perm(f"django_delayq.{name}") for name in names)


class OptionalScope:
    """Set `throttle_scope` of a view only if `DEFAULT_THROTTLE_RATES` has a rate for it.

    DRF answers 500 for a scope without a rate. A project that throttles its own views by scope need not name ours.
    """

    scope = "delayq"

    @cached_property  # which `as_view(throttle_scope=...)` may set
    def throttle_scope(self) -> str | None:
        """Return the scope of the request; None: it is not limited by scope."""
        return self.scope if self.scope in api_settings.DEFAULT_THROTTLE_RATES else None


class OperatorView(OptionalScope):
    """The permissions and operations of a view."""

    permission_classes: Any = [StaffWithPermission]
    operations: ClassVar[dict[str, Operation]] = {}
    view_permissions: ClassVar[tuple[str, ...]] = ("view_timeout",)

    def operate(self: Any, parameters: dict[str, Any]) -> Response:
        """Run the operation of this request. Raises APIException: 400 for bad input, 409 for a conflict."""
        operation, (target, using) = self.operations[self.action], self.target()
        if operation.moves_rows:
            parameters["progress"] = changes.time_limit()
        try:
            with answering_conflicts(using):
                done = operation.call(target, by=f"rest:{self.request.user.get_username()}", **parameters)
        except InvalidDelay as error:
            raise _invalid_delay(str(error), parameters) from error
        except PolicyConflict as error:
            raise Conflict(str(error)) from error
        response: Response = self.answer(target, using, done, parameters)
        return response


def _version_parameter(request: Request) -> tuple[str, ...]:
    """Return the query parameter by which the project versions its API, if it does."""
    scheme = request.versioning_scheme
    return (scheme.version_param,) if isinstance(scheme, QueryParameterVersioning) else ()


def refuse_query(request: Request) -> None:
    """Refuse parameters in the address of a POST, as `cancel/?dry_run=true`, which would otherwise cancel."""
    if unknown := set(request.query_params) - {"format", *_version_parameter(request)}:
        raise ValidationError({each: [NOT_IN_THE_BODY] for each in sorted(unknown)})


def operation(name: str) -> Any:
    """Return the action of a view set, a POST, that runs the operation `name`. OpenAPI describes it as its function."""
    body = inputs.BODIES[name]

    def act(self: Any, request: Request, *_: Any, **__: Any) -> Response:
        refuse_query(request)
        sent = body(data=request.data)
        sent.is_valid(raise_exception=True)
        response: Response = self.operate(dict(sent.validated_data))
        return response

    act.__name__, act.__doc__ = name, (OPERATIONS[name].call.__doc__ or "").partition("\n")[0]
    described = describe("timeouts", outputs.ActedSerializer, body=body)
    if name in POLICY_OPERATIONS:
        result = outputs.PolicyActedSerializer
        described = describe("policies", result, body=body, parameters=[LABEL])
    return described(action(detail=True, methods=["post"])(act))


class TimeoutViewSet(OperatorView, RetrieveModelMixin, GenericViewSet):  # type: ignore[type-arg]
    """List timeouts, show the history of one, and operate on it."""

    queryset: Any = Timeout.objects.all()
    serializer_class: Any = outputs.TimeoutDetailSerializer
    pagination_class: Any = inputs.KeysetPagination
    filter_backends = []
    lookup_value_regex = "[^/]+"
    operations = TIMEOUT_OPERATIONS

    def get_queryset(self) -> TimeoutQuerySet:
        """Return the rows of the view, read from the writer: an operator must see its own changes."""
        return cast("TimeoutQuerySet", super().get_queryset()).using(database_of(Timeout))

    def get_serializer_class(self) -> Any:
        """Return the view's own class, if a subclass has one. Ours has in a list neither payload nor history.

        For an action, return that of its request, whose fields the browsable API shows as a form.
        """
        if self.action in self.operations:
            return inputs.BODIES[self.action]
        found = super().get_serializer_class()
        is_own_list = self.action == "list" and found is outputs.TimeoutDetailSerializer
        return outputs.TimeoutSerializer if is_own_list else found

    def get_object(self) -> Timeout:
        """Return the row. Raises Http404 without a message, so that DRF adds its translated one."""
        try:
            return cast("Timeout", super().get_object())
        except Http404:
            raise Http404 from None

    @describe("timeouts", outputs.TimeoutSerializer(many=True), (400, 401, 403), parameters=[inputs.Selection])
    def list(self, request: Request, *_: Any, **__: Any) -> Response:
        """List timeouts in pages, without payload and history.

        The order depends on the filters: unsettled timeouts by their next attempt, settled ones by the time of their
        settling, latest first, and otherwise the newest first.
        """
        pages: Any = self.paginator
        names = {each["name"] for each in pages.get_schema_operation_parameters(self)} if pages else set()
        asked = inputs.Selection.of(request.query_params, names.union(_version_parameter(request)))
        every: Any = self.filter_queryset(self.get_queryset())
        rows, narrow = asked.rows(every, request.user)
        if self.get_serializer_class() is outputs.TimeoutSerializer:
            rows = rows.defer("history", "payload")
        if isinstance(pages, inputs.KeysetPagination):
            pages.narrow = narrow
        else:
            rows = rows.filter(narrow)
        page = self.paginate_queryset(rows)
        shown = self.get_serializer(rows if page is None else page, many=True).data
        return Response(shown) if page is None else self.get_paginated_response(shown)

    @describe("timeouts", outputs.TimeoutDetailSerializer)
    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Show one timeout, with its history, its failed attempts and its payload."""
        return super().retrieve(request, *args, **kwargs)

    def target(self) -> tuple[Timeout, str]:
        return self.get_object(), database_of(Timeout)

    def answer(self, row: Timeout, using: str, result: Result, parameters: dict[str, Any]) -> Response:
        """Respond with 200 if the timeout changed, 404 if it does not exist, and 409 if its state does not allow it.

        A refusal is a response and not an exception, which would roll back the request's transaction: a refused cancel
        has forbidden further attempts of a firing timeout.
        """
        why = result.refusals[0].why if result.refusals else None
        found = Timeout.objects.using(using).filter(pk=row.pk).first()
        if found is None or why is Refusal.MISSING:
            raise Http404
        if why is Refusal.TOO_FAR:
            raise _invalid_delay(str(why.label), parameters)
        acted = {
            "verb": result.verb,
            "changed": bool(result.changed),
            "dry_run": result.dry_run,
            "due_at_once": bool(result.due_at_once),
            "refusal": None if why is None else {"code": why.value, "detail": str(why.label)},
            "timeout": found,
        }
        return Response(outputs.ActedSerializer(acted).data, 409 if why else 200)


class PolicyViewSet(OperatorView, ViewSet):
    """List the declared policies, and operate on them."""

    lookup_field = "label"
    lookup_value_regex = "[^/]+"
    operations = POLICY_OPERATIONS
    view_permissions = ("view_timeout", "view_policycontrol")

    @describe("policies", outputs.PolicySerializer(many=True), (401, 403))
    def list(self, request: Request, *_: Any, **__: Any) -> Response:
        """List all declared policies by label."""
        using = database_of(Timeout)
        states: Any = controls.policy_states(using)
        context = {"user": request.user, "failing": count_failing(states, using)}
        return Response(outputs.PolicySerializer(states, many=True, context=context).data)

    @describe("policies", outputs.PolicySerializer, parameters=[LABEL])
    def retrieve(self, request: Request, *_: Any, **__: Any) -> Response:
        """Show one policy, by its present label or a former one."""
        shown = outputs.PolicySerializer(controls.policy_state(*self.target()), context={"user": request.user})
        return Response(shown.data)

    @describe("policies", outputs.ReportSerializer, (400, 401, 403, 404), parameters=[LABEL, inputs.ReportQuery])
    @action(detail=True, methods=["get"])
    def report(self, request: Request, *_: Any, **__: Any) -> Response:
        """Report how the rounds of a policy have ended, by day, by month, or by a column of the objects.

        Rounds that workers have not counted yet, above some thousands, are left out: see `counted_until`.
        """
        policy, _using = self.target()
        asked = inputs.ReportQuery.of(request.query_params, _version_parameter(request))
        by, days = asked.validated_data["by"], {"first": None, "last": None, **asked.validated_data}
        is_field = by not in reports.TIMES
        may_view = request.user.has_perm("django_delayq.view_timeout")
        if not may_view or (is_field and not reports.may_count_by(request.user, policy.concrete_model, by)):
            raise PermissionDenied
        try:
            found = reports.policy_report(policy, **days, limit=reports.MAX_READ)
        except reports.InvalidReport as error:
            wrong = NO_COLUMN if is_field else NO_DAYS
            raise ValidationError({"by" if is_field else "first": [wrong]}) from error
        return Response(outputs.ReportSerializer(found).data)

    def get_serializer(self, *args: Any, **options: Any) -> Any:
        """Return the serializer of the request of the action, whose fields the browsable API shows as a form."""
        return inputs.BODIES[self.action_map["post"]](*args, **options)  # also for OPTIONS, whose action is "metadata"

    def target(self) -> tuple[TimeoutPolicy[Any], str]:
        policy = registry.get(self.kwargs["label"])
        if policy is None:
            raise Http404
        self.check_object_permissions(self.request, policy)
        return policy, database_of(policy.concrete_model)

    def answer(
        self, policy: TimeoutPolicy[Any], using: str, change: PolicyChange | None, parameters: dict[str, Any]
    ) -> Response:
        in_force = {"code": "in_force", "detail": _("Nothing had to be changed: this is in force already.")}
        acted = {
            "changed": change is not None,
            "finished": change is None or change.finished_at is not None,
            "refusal": in_force if change is None else None,
            "policy": controls.policy_state(policy, using),
        }
        return Response(outputs.PolicyActedSerializer(acted).data, 409 if change is None else 200)


def _invalid_delay(words: str, parameters: dict[str, Any]) -> ValidationError:
    """Name the field of the request that has a wrong deadline; `delay` for a duration, which several units make up."""
    field = next((name for name in ("at", "until") if name in parameters), "delay")
    return ValidationError({"shift_seconds" if "shift" in parameters else field: [words]})


class RootView(OperatorView, APIView):
    """The addresses of the ledger for operators."""

    view_permissions = ("view_timeout", "view_policycontrol")

    @describe("status", outputs.RootSerializer, (401, 403))
    def get(self, request: Request, *_: Any, **__: Any) -> Response:
        """Show the addresses of timeouts, policies and status."""
        names = {"timeouts": "timeout-list", "policies": "policy-list", "status": "status"}
        match: Any = request.resolver_match
        space = f"{match.namespace}:" if match.namespace else ""
        found = {each: reverse(f"{space}{name}", kwargs=self.kwargs, request=request) for each, name in names.items()}
        return Response(found)


class StatusView(OperatorView, APIView):
    """Show the state of workers, ledger and Redis, at a cost that does not depend on the number of rows."""

    @describe("status", outputs.StatusSerializer, (401, 403))
    def get(self, request: Request, *_: Any, **__: Any) -> Response:
        """Show the present state and the last 24 hours, as `delayq_status` does, the most urgent policies first."""
        return Response(outputs.StatusSerializer(overview(database_of(Timeout))).data)


for _view in (TimeoutViewSet, PolicyViewSet):
    for _name in _view.operations.keys() - {"delay"}:
        setattr(_view, _name, operation(_name))


class DenyAll(BasePermission):
    """Refuse all users, also superusers, because the project has not set a permission yet."""

    message = _("This view needs permission_classes of your project.")

    def has_permission(self, request: Request, view: APIView) -> bool:
        return False


class CountdownView(OptionalScope, GenericAPIView):  # type: ignore[type-arg]
    """The time left for one object, for its owner.

    Give it a policy, a permission, and an address that finds the object:

        path("orders/<str:reference>/countdown/", CountdownView.as_view(
            policy="shop.order.cancel_unpaid", lookup_field="reference", permission_classes=[IsBuyer]))

    Without `permission_classes` it refuses all users. An object that the user may not see is answered like one that
    does not exist.
    """

    policy: str | TimeoutPolicy[Any] | None = None
    key = ""
    serializer_class = outputs.CountdownSerializer
    permission_classes = [DenyAll]
    filter_backends = []
    pagination_class = None
    scope = "delayq-countdown"

    def get_queryset(self) -> QuerySet[Model]:
        """Return the view's own `queryset` or all objects of the policy's model.

        They are read from the writer, because a replica may not have the object yet.
        """
        has_own = self.queryset is not None  # type: ignore[misc, arg-type, unused-ignore]
        found: Any = super().get_queryset() if has_own else self._policy().model._default_manager.all()
        return cast("QuerySet[Model]", found.using(database_of(found.model, found)))

    def get_object(self) -> Model:
        """Return the object. Raises Http404, also if the user may not see it."""
        try:
            return cast("Model", super().get_object())
        except (PermissionDenied, NotAuthenticated, Http404):
            # Different responses, even if only in their words, would reveal which objects exist.
            raise Http404 from None

    @describe("countdown", outputs.CountdownSerializer, parameters=[ETAG])
    def get(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Return how long is left, or 304 if nothing has changed since the ETag of the request."""
        seen = countdown_of(self.get_object(), self._policy(), self.key)
        response = Response(self.get_serializer(seen).data)
        # The tag changes with everything but the time. It is keyed: trying out all ids must not reveal this one.
        parts = f"{seen.timeout_id} {seen.state} {seen.due_at and to_ms(seen.due_at)}"
        tag = quote_etag(salted_hmac("django_delayq.countdown", parts, algorithm="sha256").hexdigest()[:24])
        response["ETag"] = tag
        patch_cache_control(response, private=True, no_cache=True)
        answer = get_conditional_response(request._request, etag=tag, response=response)
        assert answer is not None
        answer["X-Server-Time"] = str(to_ms(seen.now))
        return answer

    def _policy(self) -> TimeoutPolicy[Any]:
        if self.policy is None:
            raise TypeError('CountdownView needs a policy: CountdownView.as_view(policy="shop.order.cancel_unpaid").')
        return get_policy(self.policy)
