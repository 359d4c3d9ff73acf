"""What operators send and get: the bodies of the verbs, and answers that say what changed, or why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from django.db import DatabaseError
from django.http import Http404
from django.utils.translation import gettext_lazy as _
from rest_framework import serializers, status
from rest_framework.exceptions import APIException, ValidationError
from rest_framework.response import Response

from django_delayq import operations
from django_delayq.contrib.rest_framework.selecting import Moment
from django_delayq.contrib.rest_framework.serializers import PolicySerializer, TimeoutSerializer
from django_delayq.delays import UNITS
from django_delayq.exceptions import InvalidDelay
from django_delayq.ledger.db_errors import link_of, trouble_of
from django_delayq.ledger.history import MAX_REASON
from django_delayq.models import Timeout

if TYPE_CHECKING:
    from rest_framework.request import Request

LONGEST: Final = 1e9
"""In any unit: beyond every deadline that can be kept, and short of what Python can count."""


class Conflict(APIException):
    """Somebody else was faster, or something else is in force; nothing was changed."""

    status_code = status.HTTP_409_CONFLICT
    default_detail = _("Something else happened at the same time. Look again, and try again.")
    default_code = "conflict"


class ReasonSerializer(serializers.Serializer[Any]):
    """Why, for whoever reads the story later."""

    reason = serializers.CharField(required=False, allow_blank=True, default="", max_length=MAX_REASON)


class VerbSerializer(ReasonSerializer):
    """A verb for one timeout."""

    dry_run = serializers.BooleanField(required=False, default=False, help_text=_("Only say what would happen."))


class PostponeSerializer(VerbSerializer):
    """By how much later, counted from the deadline, or from now if that has passed; or to which moment."""

    weeks = serializers.FloatField(required=False, min_value=0, max_value=LONGEST)
    days = serializers.FloatField(required=False, min_value=0, max_value=LONGEST)
    hours = serializers.FloatField(required=False, min_value=0, max_value=LONGEST)
    minutes = serializers.FloatField(required=False, min_value=0, max_value=LONGEST)
    seconds = serializers.FloatField(required=False, min_value=0, max_value=LONGEST)
    at = Moment(required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """The delay stands together, under `delay`."""
        delay = {name: attrs.pop(name) for name in (*UNITS, "at") if name in attrs}
        if not delay or ("at" in delay and len(delay) > 1):
            raise ValidationError({"delay": [_("By how much, or to when? Give one of the two.")]})
        attrs["delay"] = delay
        return attrs


class PauseSerializer(ReasonSerializer):
    """Until when; null: until it is resumed. Without it, a pause that is in force keeps its end."""

    until = Moment(required=False, allow_null=True)


class ResumeSerializer(ReasonSerializer):
    """After a hold, whether pending deadlines move by its length."""

    shift = serializers.BooleanField(required=False, default=True)


class RefusalSerializer(serializers.Serializer[Any]):
    """Why a timeout stays as it is."""

    code = serializers.ChoiceField(operations.Refusal.choices)
    detail = serializers.CharField()


class ActedSerializer(serializers.Serializer[Any]):
    """What came of a verb for one timeout, and how the timeout stands now."""

    verb = serializers.CharField()
    changed = serializers.BooleanField()
    dry_run = serializers.BooleanField()
    refusal = RefusalSerializer(allow_null=True)
    timeout = TimeoutSerializer()


class PolicyActedSerializer(serializers.Serializer[Any]):
    """What came of a verb for a policy, and how the policy stands now."""

    changed = serializers.BooleanField()
    finished = serializers.BooleanField(help_text=_("false: its rows are still being moved."))
    policy = PolicySerializer()


class TroubleSerializer(serializers.Serializer[Any]):
    """Why nothing was changed."""

    detail = serializers.CharField()


def actor_of(request: Request) -> str:
    """Who did it, as the story has it."""
    return f"rest:{request.user.get_username()}"


@contextmanager
def told_apart(using: str) -> Iterator[None]:
    """What a verb raises, as the answer that it deserves: 400 for bad input, 409 for a race that was lost."""
    link = link_of(using)
    try:
        yield
    except InvalidDelay as error:
        raise ValidationError({"delay": [str(error)]}) from error
    except operations.PolicyConflict as error:
        raise Conflict(str(error)) from error
    except DatabaseError as error:
        # A deadlock, or a lock that took too long: the caller may try again. A database that is away is another
        # matter, and not ours to hide.
        if trouble_of(error, using, link=link) is None or link is not link_of(using):
            raise
        raise Conflict from error


def answer_for(row: Timeout, steered: operations.Result, using: str) -> Response:
    """200 if it changed; 404 if there is no such row any more; 409 if it is not in a state for this.

    No exception: a cancel that came while it was firing has forbidden further attempts, and that must be kept.
    """
    why = steered.refusals[0].why if steered.refusals else None
    found = Timeout.objects.using(using).filter(pk=row.pk).first()
    if found is None or why is operations.Refusal.MISSING:
        raise Http404
    if why is operations.Refusal.TOO_FAR:
        raise ValidationError({"delay": [str(why.label)]})
    acted = {
        "verb": steered.verb,
        "changed": bool(steered.changed),
        "dry_run": steered.dry_run,
        "refusal": None if why is None else {"code": why.value, "detail": str(why.label)},
        "timeout": found,
    }
    return Response(ActedSerializer(acted).data, status.HTTP_409_CONFLICT if why else status.HTTP_200_OK)
