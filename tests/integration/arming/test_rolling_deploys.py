"""Releases with another condition for one policy run side by side: nothing is lost, and each timeout fires, late.

A release is a registry that declares its own policy. The handlers of both write down which release has run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models import Exists, F, OuterRef, Q
from django.utils import timezone

from django_delayq import clock, testing
from django_delayq.arming.sync import TableSync
from django_delayq.ledger.declarations import fingerprint, register
from django_delayq.models import PolicySync, Timeout
from django_delayq.policy.policies import TimeoutPolicy, registry
from tests.testapp.models import Item, Order, Task

pytestmark = pytest.mark.django_db(transaction=True)

MINUTE = timedelta(minutes=1)
LABEL = "testapp.order.releases"
UNPAID, BOTH, OPEN = Q(status="unpaid"), Q(status__in={"unpaid", "review"}), Q(status="open")


class Now:
    """How far the test is in time."""

    start: datetime
    minutes: float


class Release:
    """The code of one release: its web process, and its worker."""

    def __init__(self, name: str, when: Q) -> None:
        self.name, self.fired = name, list[str]()
        options: dict[str, Any] = {"when": when, "since": "created_at", "after": 30 * MINUTE}
        self.policy = TimeoutPolicy(model=Order, handler=self._fire, name="releases", **options)
        self.sync = TableSync("default")

    def _fire(self, order: Order, timeout: Timeout) -> None:
        self.fired.append(timeout.object_id)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let this process have the code of the release."""
        registry.add(self.policy)
        try:
            yield
        finally:
            registry.remove(self.policy)

    def save(self, **values: Any) -> Order:
        with self.running():
            return Order.objects.create(created_at=timezone.now(), **values)

    def confirm(self, minutes: float) -> None:
        """Let the worker start, or be still running, at that many minutes from now."""
        with self.running(), clock.set_to(Now.start + minutes * MINUTE):
            register("default")

    def work(self, minutes: float, *beside: Release) -> None:
        """Let the worker sync, and fire due timeouts, at that time. These workers have been running `beside` it."""
        while beside and Now.minutes < minutes - 1:
            Now.minutes += 1
            for other in beside:
                other.confirm(Now.minutes)
        Now.minutes = minutes
        with self.running(), clock.set_to(Now.start + minutes * MINUTE):
            register("default")
            PolicySync.objects.update(claimed_until=None)
            self.sync.run(at_once=True)
            testing.fire_due(self.policy)


@pytest.fixture(autouse=True)
def start() -> None:
    Now.start, Now.minutes = timezone.now(), 0.0


def state(order: Order) -> str:
    return str(order.timeouts.filter(policy=LABEL).latest("id").state)


SAVED = ("new web", 0, "pending")
BOTH_RUN = [("former", 0, ""), ("new", 0, ""), SAVED]
PLAYS: dict[str, list[tuple[str, float, str]]] = {
    "the former release neither cancels nor skips, and fires nothing": [
        *(*BOTH_RUN, ("former beside new", 29, "pending"), ("former beside new", 31, "pending")),
        *(("former beside new", 32, "pending"), ("new beside both", 32, "fired")),
    ],
    "the new release fires first": [*BOTH_RUN, ("new beside both", 32, "fired"), ("former beside new", 32, "fired")],
    "a former web process has cancelled it": [
        *(*BOTH_RUN, ("former web", 0, "cancelled"), ("former", 1, "cancelled"), ("new", 45, ""), ("new", 46, "fired")),
    ],
    "the web processes were deployed first": [
        *(("former", 0, ""), SAVED, ("former", 31, "cancelled"), ("new", 300, ""), ("new", 301, "fired")),
    ],
    "after a return to the former release its condition decides": [
        *(("former", 0, ""), ("new", 1, ""), SAVED, ("former", 2, "pending")),
        ("former", 5, "cancelled"),  # no worker has the new declaration any more
        ("new", 6, "cancelled"),  # one that is left is now the former one
        ("new", 10, "pending"),
    ],
}
"""Who works, at which minute, and the state of the order after that."""


@pytest.mark.parametrize("name", PLAYS)
def test_a_condition_that_is_widened_loses_nothing(name: str) -> None:
    releases = {"former": Release("former", UNPAID), "new": Release("new", BOTH)}
    order = Order()
    for who, minute, expected in PLAYS[name]:
        release, _, other = who.partition(" ")
        if who == "new web":
            order = releases["new"].save(status="review")
        elif who == "former web":
            with releases["former"].running():
                order.save()
        else:
            beside = {"": [], "beside new": ["new"], "beside both": ["former", "new"]}[other]
            releases[release].work(minute, *(releases[each] for each in beside))
        assert not expected or (who, minute, state(order)) == (who, minute, expected)
    fired = [str(order.pk)] if state(order) == "fired" else []
    assert (releases["new"].fired, releases["former"].fired) == (fired, [])


def test_a_condition_that_is_narrowed_is_not_armed_again_by_the_former_release() -> None:
    former, new = Release("former", BOTH), Release("new", UNPAID)
    former.work(0)
    reviewed, unpaid = former.save(status="review"), former.save(status="unpaid")
    new.work(1)
    for minute in (2, 31, 32, 33):
        for worker in (former, new):
            worker.work(minute, former, new)
    assert state(reviewed) == "cancelled"
    assert reviewed.timeouts.filter(policy=LABEL).count() == 1, "the two releases do not take turns"
    assert (state(unpaid), len(former.fired + new.fired)) == ("fired", 1)


CONDITIONS: list[Any] = [
    *(None, Q(), UNPAID, ~UNPAID, UNPAID | OPEN, UNPAID & OPEN),
    Q(status__in={"unpaid", "review", "open", "failed"}),
    *(Q(Exists(Item.objects.filter(task=OuterRef("pk"), pk__in=keys))) for keys in ({"1", "2", "3"}, {"1", "2", "4"})),
    *(Q(created_at__lt=F("paid_at") + minutes * MINUTE) | ~Q(note=None) for minutes in (1, 2)),
]


def fingerprints() -> list[str]:
    since: Any = lambda task: task.begun_at  # noqa: E731
    terms: list[dict[str, Any]] = [{"since": "begun_at"}, {"since": since}, {"since": since, "after": MINUTE}]
    policies = [
        *(TimeoutPolicy(model=Task, handler=print, name="x", when=when) for when in CONDITIONS),
        *(TimeoutPolicy(model=Task, handler=print, name="x", when=UNPAID, **each) for each in terms),
    ]
    return [fingerprint(policy) for policy in policies]


def test_a_fingerprint_differs_if_the_declaration_does_and_is_the_same_in_each_process() -> None:
    """Sets of strings have another order in each process, and objects another address."""
    here = "tests.integration.arming.test_rolling_deploys"
    code = f"import django; django.setup(); from {here} import fingerprints; print(fingerprints())"
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    assert done.stdout == f"{fingerprints()}\n"
    assert len(set(fingerprints())) == len(fingerprints())
