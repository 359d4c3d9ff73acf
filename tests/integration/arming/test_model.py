"""After any writes to any tables, the pending timeouts are those that a pure function of the tables returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.contenttypes.models import ContentType
from django.db import connection, transaction
from django.db.models import Model, Q
from hypothesis import given
from hypothesis import strategies as st

import django_delayq as dq
from django_delayq.arming.sync import sync_policy
from django_delayq.models import Timeout
from django_delayq.policy.policies import registry
from tests.support.examples import examples
from tests.support.purchases import (
    MINUTE,
    at,
    noon,  # noqa: F401 - a fixture
)
from tests.testapp.market import Channel, Label, Merchant, Payment, Purchase, Remark

pytestmark = [pytest.mark.slow, pytest.mark.dialect, pytest.mark.django_db(transaction=True)]


def policy_pay(purchase: Purchase) -> Any:
    """Unpaid purchases, within what their channel allows."""
    paid = purchase.payments.filter(status="captured").exists()
    within = purchase.channel.pay_within if purchase.channel else None
    return None if purchase.status != "unpaid" or paid else (purchase.created_at, within)


def policy_remind(purchase: Purchase) -> Any:
    """Urgent purchases of open merchants, ten minutes before their channel opens."""
    channel = purchase.channel
    is_open = channel is not None and channel.merchant is not None and channel.merchant.is_open
    if channel is None or not is_open or not purchase.labels.filter(is_urgent=True).exists():
        return None
    return None if channel.opens_at is None else (channel.opens_at, -10 * MINUTE)


def policy_grace(purchase: Purchase) -> Any:
    """Purchases with an open remark or an unpaid successor, within their own grace."""
    has_remark = not django_settings.DATABASE_ROUTERS and purchase.remarks.filter(is_open=True).exists()
    wanted = has_remark or purchase.later.filter(status="unpaid").exists()
    return (purchase.created_at, purchase.grace) if wanted else None


# Behind a router, Django itself would read the content type of a remark from the replica.
HAS_REMARK = Q(pk=None) if django_settings.DATABASE_ROUTERS else Q(remarks__is_open=True)
POLICIES: dict[str, tuple[dict[str, Any], Callable[[Purchase], Any]]] = {
    "pay": (
        {
            "after": "channel__pay_within",
            "since": "created_at",
            "when": Q(status="unpaid") & ~Q(payments__status="captured"),
            "hold_when": Q(payments__status="pending"),
        },
        policy_pay,
    ),
    "remind": (
        {
            "after": -10 * MINUTE,
            "since": "channel__opens_at",
            "when": Q(labels__is_urgent=True, channel__merchant__is_open=True),
        },
        policy_remind,
    ),
    "grace": (
        {
            "after": "grace",
            "since": "created_at",
            "when": HAS_REMARK | Q(later__status="unpaid"),
        },
        policy_grace,
    ),
}
VALUES: dict[str, list[Any]] = {
    "status": ["unpaid", "captured", "pending", "paid"],
    "pay_within": [None, 5 * MINUTE, 40 * MINUTE],
    "grace": [None, 10 * MINUTE, 70 * MINUTE],
    "opens_at": [None, at(60), at(90)],
    "created_at": [None, at(0), at(3)],
    "is_open": [True, False],
    "is_urgent": [True, False],
}
TABLES: list[type[Model]] = [Merchant, Channel, Label, Purchase, Payment, Remark]


@contextmanager
def declared() -> Iterator[list[Any]]:
    policies = [
        dq.timeout_policy(Purchase, name=name, **options)(lambda obj, timeout: None)
        for name, (options, _) in POLICIES.items()
    ]
    try:
        yield policies
    finally:
        for policy in policies:
            registry.remove(policy)


def ways(model: type[Model], *, watched: bool) -> list[str]:
    """Return how rows may be written: with `watched`, only so that the library learns of it at once."""
    found = ["save", "fields"]
    if isinstance(model._default_manager, dq.ArmingManager):
        found.append("bulk")
    return found if watched else [*found, "raw"]


def create(model: type[Model], dice: Random, *, watched: bool) -> Model:
    """Insert a row, in one of three ways."""
    values: dict[str, Any] = {
        name: dice.choice(options) for name, options in VALUES.items() if name in {f.name for f in model._meta.fields}
    }
    for name, related in RELATIONS.get(model, {}).items():
        values[name] = dice.choice([None, *related.objects.order_by("pk")])  # type: ignore[attr-defined]
    if model is Remark:
        about = dice.choice([*Purchase.objects.order_by("pk"), None])
        kind = ContentType.objects.get_for_model(Purchase)
        values |= {"content_type": kind, "object_id": "0" if about is None else str(about.pk)}
    obj = model(**values)
    way = dice.choice(ways(model, watched=watched))
    if way in {"save", "fields"} or connection.vendor == "mysql":  # which returns no keys
        obj.save()
    else:
        manager: Any = model._default_manager if way == "bulk" else model._base_manager
        manager.bulk_create([obj])
    return obj


RELATIONS: dict[type[Model], dict[str, type[Model]]] = {
    Channel: {"merchant": Merchant},
    Purchase: {"channel": Channel, "first": Purchase},
    Payment: {"purchase": Purchase},
}


def change(obj: Model, dice: Random, *, watched: bool) -> None:
    """Give one column another value, in one of four ways."""
    names = [field.name for field in obj._meta.fields if field.name in VALUES]
    names += RELATIONS.get(type(obj), {})
    name = dice.choice([name for name in names if name != "name"])
    related = RELATIONS.get(type(obj), {}).get(name)
    options = VALUES[name] if related is None else [None, *related.objects.order_by("pk")]  # type: ignore[attr-defined]
    value, manager = dice.choice(options), type(obj)._default_manager
    if related is type(obj) and value == obj:
        return
    way = dice.choice(ways(type(obj), watched=watched))
    if way in {"save", "fields"}:
        setattr(obj, name, value)
        obj.save(update_fields=[name] if way == "fields" else None)
    else:
        rows: Any = manager if way == "bulk" else type(obj)._base_manager
        rows.filter(pk=obj.pk).update(**{name: value})


def populate(dice: Random) -> None:
    """Create rows of which most timeouts are armed, so that most of what follows changes some."""
    merchants = [Merchant.objects.create() for _ in range(2)]
    channels = [
        Channel.objects.create(merchant=merchant, pay_within=20 * MINUTE, opens_at=at(75)) for merchant in merchants
    ]
    labels = [Label.objects.create(is_urgent=True) for _ in range(2)]
    first, kind = None, ContentType.objects.get_for_model(Purchase)
    for _ in range(4):
        purchase = Purchase.objects.create(
            channel=dice.choice(channels), first=first, created_at=at(), grace=30 * MINUTE
        )
        purchase.labels.add(dice.choice(labels))
        Remark.objects.create(content_type=kind, object_id=str(purchase.pk), is_open=dice.random() < 0.5)
        Payment.objects.create(purchase=purchase, status="failed")
        first = purchase


def play(dice: Random, *, watched: bool) -> None:
    """Write something somewhere."""
    model = dice.choice(TABLES)
    rows: Any = list(model._default_manager.order_by("pk"))
    what = dice.choice(["create", "change", "change", "change", "delete", "label", "hand"])
    if what == "create" or not rows:
        create(model, dice, watched=watched)
    elif what == "delete":
        dice.choice(rows).delete() if dice.random() < 0.5 else model._default_manager.filter(
            pk=dice.choice(rows).pk
        ).delete()
    elif what == "label" and Purchase.objects.exists() and Label.objects.exists():
        purchase = dice.choice([*Purchase.objects.order_by("pk")])
        label = dice.choice([*Label.objects.order_by("pk")])
        dice.choice(
            [
                lambda: purchase.labels.add(label),
                lambda: purchase.labels.remove(label),
                lambda: label.purchase_set.set([purchase]),
                label.purchase_set.clear,
            ]
        )()
    elif what == "change":
        change(dice.choice(rows), dice, watched=watched)
    elif what == "hand" and (pending := list(Timeout.objects.pending().order_by("pk"))):
        dq.extend_timeout(dice.choice(pending), minutes=1000)


def differences() -> dict[Any, Any]:
    """Return the pending timeouts that differ from those of the tables, by policy and purchase."""
    found: dict[Any, Any] = {}
    for row in Timeout.objects.waiting():
        found[row.policy.rpartition(".")[2], int(row.object_id)] = row
    wrong: dict[Any, Any] = {}
    for name, (options, expected) in POLICIES.items():
        for purchase in Purchase.objects.all():
            row, wanted = found.pop((name, purchase.pk), None), expected(purchase)
            if wanted is None or wanted[0] is None:
                wrong |= {} if row is None else {(name, purchase.pk): ("nothing", vars(row))}
                continue
            since_at, length = wanted
            if length is None and row is None:  # one that was set by hand stays
                continue
            is_held = "hold_when" in options and purchase.payments.filter(status="pending").exists()
            if row is None:
                wrong[name, purchase.pk] = (wanted, "nothing")
                continue
            shown = (row.since_at, row.due_at if row.is_computed else None, row.state)
            due_at = since_at + length if row.is_computed and length is not None else None
            if shown != (since_at, due_at, "held" if is_held else "pending"):
                wrong[name, purchase.pk] = ((since_at, due_at, is_held), shown, vars(row))
    return wrong | found


@examples(8)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 25))
def test_after_a_sync_each_pending_row_is_what_the_tables_say(seed: int, steps: int) -> None:
    dice = Random(seed)
    with declared() as policies, transaction.atomic():
        populate(dice)
        for _ in range(steps):
            play(dice, watched=False)
        for policy in policies:
            sync_policy(policy, "default", backfill=True)
        assert differences() == {}
        for policy in policies:
            assert sync_policy(policy, "default", backfill=True) == (0,) * 6
        transaction.set_rollback(True)


@examples(8)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 25))
def test_what_is_written_so_that_the_library_learns_of_it_needs_no_sync(seed: int, steps: int) -> None:
    dice = Random(seed)
    with declared(), transaction.atomic():
        populate(dice)
        for _ in range(steps):
            play(dice, watched=True)
            assert differences() == {}
        transaction.set_rollback(True)
