"""Conditions are shown as code, in one notation for all languages. No query is run for it, and no object is named."""

from __future__ import annotations

from datetime import date

import pytest
from django.db import models
from django.db.models import Case, Exists, F, OuterRef, Q, Subquery, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.db.models.lookups import In
from django.utils import translation

from django_delayq.policy.reads import condition_text
from tests.testapp.models import Customer


class Status(models.TextChoices):
    NEW = "new"


ADA = Customer(pk=5, name="Ada")
VIPS = Customer.objects.filter(vip=True)
QUERY = "a query of testapp.Customer"


@pytest.mark.parametrize(
    ("when", "words"),
    [
        (Q(), "always"),
        (Q(status="x", note=None), 'note is None and status = "x"'),
        (Q(status="x") ^ Q(status="y"), 'status = "x" xor status = "y"'),
        (~Q(status="x"), 'not (status = "x")'),
        (Q(a__lt=1) & Q(b__lte=2) & Q(c__gte=3) & Q(d__gt=4), "a < 1 and b <= 2 and c >= 3 and d > 4"),
        (Q(paid_at__isnull=True, note__isnull=False), "note is not None and paid_at is None"),
        (Q(Q(a=1) | Q(b=2), c=3), "(a = 1 or b = 2) and c = 3"),
        (Q(status__in=[Status.NEW, "x"]), 'status in ["new", "x"]'),
        (Q(day=date(2026, 1, 2)), 'day = "2026-01-02"'),
        (Q(~Exists(VIPS)), f"not (Exists({QUERY}))"),
        (Q(amount=F("bound") + Value(2)), "amount = bound + 2"),
        (Q(at__lt=Now()), "at < Now()"),
        (Q(RawSQL("1 = %s", [1], models.BooleanField())), "RawSQL(1 = %s, [1])"),
        (Q(customer=ADA), "customer = testapp.Customer 5"),
        (Q(customer__in=VIPS), f"customer in {QUERY}"),
        (Q(customer__in=Customer.objects.raw("SELECT 1")), f"customer in {QUERY}"),
        (Q(customer=Subquery(VIPS.values("pk")[:1])), f"customer = Subquery({QUERY})"),
        (Q(Exists(VIPS.filter(pk=OuterRef("customer")))), f"Exists({QUERY})"),
        (Q(In(F("customer"), VIPS)), f"customer in {QUERY}"),
        (
            Q(Case(When(customer__in=VIPS, then=Value(True)), output_field=models.BooleanField())),
            f"Case(When((customer in {QUERY}), True), None)",
        ),
    ],
)
def test_conditions_as_code_in_every_language(when: Q, words: str) -> None:
    with translation.override("de"):
        assert condition_text(when) == words  # a test without the mark django_db can run no query
