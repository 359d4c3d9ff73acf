"""The OpenAPI schema is complete, and the API answers every request as it states, never with a server error."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections, transaction
from django.utils import timezone
from drf_spectacular.management.commands.spectacular import Command
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st

import django_delayq as dq
from django_delayq import operations
from django_delayq.contrib.rest_framework import openapi
from django_delayq.models import Timeout
from tests.support.typed import Patch
from tests.testapp.models import Order

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import CHECKS  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.django_db]
EXAMPLES = 10
# Not among them: that sound parameters are accepted. Filters may contradict each other, which no schema can say.
PROMISES = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "negative_data_rejection"),
]


@pytest.fixture
def ledger(schedule: Callable[..., Timeout]) -> list[Timeout]:
    """A row in each state, all of one order with a note."""
    order = Order.objects.create(status="new", note="mine")
    rows = [schedule(minutes=number, order=order, key=str(number) if number else "") for number in range(7)]
    dq.cancel_timeout(rows[1])
    Timeout.objects.filter(pk=rows[2].pk).update(state="firing", slot_taken=None)
    settled = {"settled_at": timezone.now(), "slot_taken": None}
    Timeout.objects.filter(pk=rows[3].pk).update(state="dead", cause="retries", **settled)
    Timeout.objects.filter(pk=rows[4].pk).update(state="fired", cause="due", **settled)
    dq.hold_timeout(rows[6], reason="in talks")
    operations.pause("testapp.order.cancel_unpaid", by="admin:ann")
    computed = dq.schedule_timeout(Order.objects.create(status="unpaid", created_at=timezone.now()), "cancel_unpaid")
    Timeout.objects.filter(pk=computed.pk).update(due_at=timezone.now(), first_due_at=timezone.now())
    return [*rows, computed]


@pytest.fixture
def headers(db: None) -> dict[str, str]:
    """Of a superuser who owns the order, without a session: so that no token against forgery is asked for."""
    User.objects.create_superuser("boss", password="secret")
    return {"Authorization": f"Basic {base64.b64encode(b'boss:secret').decode()}", "X-Note": "mine"}


@pytest.fixture(autouse=True)
def one_connection() -> Iterator[None]:
    """Requests leave the test's connection open, as those of Django's own test client do."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def described(ledger: list[Timeout]) -> list[Any]:
    """Return the operations in the schema that the running application serves."""
    schema = schemathesis.openapi.from_wsgi("/schema/?format=json", get_wsgi_application())
    return [found.ok() for found in schema.get_all_operations()]


def existing(operation: Any, ledger: list[Timeout]) -> Iterator[dict[str, Any]]:
    """Path parameters that lead to something."""
    if "{label}" in operation.path:
        yield from ({"label": label} for label in ("testapp.order.remind", "testapp.order.cancel_unpaid"))
    elif "countdown" in operation.path:
        yield {"id": ledger[0].object_id}
    elif "{id}" in operation.path:
        only = {"retry": ledger[3:4], "resume_timeout": ledger[6:7], "replan": ledger[7:]}
        verb = operation.path.rstrip("/").rpartition("/")[2]
        yield from ({"id": row.pk} for row in only.get(verb, ledger))
    else:
        yield {}


def cases(operation: Any, ledger: list[Timeout]) -> st.SearchStrategy[Any]:
    """Sound requests about what exists and what does not, and unsound ones."""
    modes = schemathesis.GenerationMode
    # Only one of many bodies names exactly one delay or setting, so it gets one that does.
    verb = operation.path.rstrip("/").rpartition("/")[2]
    bodies = {"postpone": {"minutes": 5}, "reschedule": {"shift_seconds": 60}, "late": {"off": True}}
    bodies["brake"] = {"most": 5, "per_seconds": 60}
    if operation.path in {"/api/schedule/", "/api/cancel/", "/api/guard/"}:
        about_one = {"policy": "testapp.order.remind", "object": ledger[0].object_id}
        bodies = {"cancel": about_one, "guard": about_one, "schedule": {**about_one, "minutes": 5}}
    body: Any = {"body": bodies[verb], "media_type": "application/json"} if verb in bodies else {}
    about = [operation.as_strategy(modes.POSITIVE, path_parameters=one, **body) for one in existing(operation, ledger)]
    anything: st.SearchStrategy[Any] = st.one_of(
        *about, operation.as_strategy(modes.POSITIVE), operation.as_strategy(modes.NEGATIVE)
    )
    return anything


def ask_often(operation: Any, ledger: list[Timeout], headers: dict[str, str]) -> Counter[int]:
    """Send many requests; return how often each status came. Raises what schemathesis finds wrong with an answer."""
    seen: Counter[int] = Counter()

    @examples(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases(operation, ledger))
    def ask(case: Any) -> None:
        with transaction.atomic():  # each request finds everything as it was
            answer = case.call(headers=headers)
            transaction.set_rollback(True)
        seen[answer.status_code] += 1
        case.validate_response(answer, headers=headers, checks=CHECKS.get_by_names(PROMISES))

    ask()
    return seen


@pytest.mark.filterwarnings("default")  # warnings of schemathesis itself
def test_every_operation_answers_as_the_schema_says(
    described: list[Any], ledger: list[Timeout], headers: dict[str, str]
) -> None:
    answers = {operation.label: ask_often(operation, ledger, headers) for operation in described}
    assert not any(code >= 500 for seen in answers.values() for code in seen)
    never = {label for label, seen in answers.items() if 200 not in seen}
    assert never == {"GET /closed/{id}/countdown/"}, answers


def test_the_schema_is_valid_and_nothing_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    call_command(Command(), "--validate", "--fail-on-warn")
    told = capsys.readouterr()
    assert told.err == ""
    schema = yaml.safe_load(told.out)
    assert {"/api/timeouts/", "/api/timeouts/{id}/", "/api/policies/{label}/"} <= set(schema["paths"])
    schemas = schema["components"]["schemas"]
    closed = {name for name, each in schemas.items() if each.get("additionalProperties") is False}
    assert closed >= {"Cancel", "Pause", "Schedule"}, "they allow no unknown fields"


def test_views_stay_as_they_are_in_projects_with_another_schema_class(settings: Any, monkeypatch: Patch) -> None:
    def is_described() -> bool:
        return hasattr(openapi.describe("status", None)(lambda view: None), "kwargs")

    assert is_described()
    with monkeypatch.context() as patched:
        patched.setattr(openapi, "_IS_INSTALLED", False)
        assert not is_described()
    settings.REST_FRAMEWORK = {}
    assert not is_described()
