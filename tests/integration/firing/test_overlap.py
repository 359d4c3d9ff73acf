"""Which statements may touch another member of a group, read off their SQL."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

import django_delayq as dq
from django_delayq.firing.members import Member
from django_delayq.firing.overlap import OverlapDetector
from tests.integration.firing.conftest import due
from tests.testapp.models import Order

pytestmark = pytest.mark.django_db


@pytest.fixture
def detector() -> OverlapDetector:
    """Two members, the first of which has the turn; its object has the key 501, the other one 502."""
    policy = dq.get_policy("testapp.order.remind")
    members = []
    for pk in (501, 502):
        order = Order.objects.create(pk=pk)
        members.append(Member(due(order, policy), order))
    return OverlapDetector(policy, members, connections["default"])


BEYOND: list[tuple[str, Any, bool]] = [
    ('UPDATE "testapp_order" SET "note" = %s', ["x"], False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE "testapp_order"."id" = %s', ["x", 502], False),
    ('UPDATE "testapp_order" SET "id" = %s WHERE "testapp_order"."id" = %s', [501, 502], False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE NOT ("testapp_order"."id" = %s)', ["x", 501], False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE (NOT (a = %s AND "testapp_order"."id" = %s))', ["x", 1, 501], False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE ("testapp_order"."id" = %s OR "vip")', ["x", 501], False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE "testapp_order"."id" IN (%s, %s)', ["x", 501, 502], False),
    ('UPDATE "testapp_order" SET "note" = %(a)s WHERE "testapp_order"."id" = %(b)s', {"a": "x", "b": 501}, False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE "testapp_order"."id" = %s', [("x", 501), ("x", 502)], True),
    ('DELETE FROM "testapp_order" WHERE "status" = %s', ["x"], False),
    ("update testapp_order set note = null", None, False),
    ("UPDATE TESTAPP_ORDER SET note = NULL", None, False),
    ("SET STATEMENT max_statement_time = 1 FOR UPDATE testapp_order SET note = NULL", None, False),
    ("EXPLAIN ANALYZE UPDATE testapp_order SET note = NULL", None, False),
    ("  UPDATE `testapp_order` SET note = NULL", None, False),
    ("/* nightly */ UPDATE testapp_order SET note = NULL WHERE id = 501", None, False),
    ("TRUNCATE testapp_order", None, False),
    ("REPLACE INTO testapp_order (id) VALUES (502)", None, False),
    ("MERGE INTO testapp_order USING other ON x WHEN MATCHED THEN DELETE", None, False),
    ('INSERT INTO "testapp_order" ("id") VALUES (%s) ON CONFLICT("id") DO UPDATE SET "note" = \'x\'', [502], False),
    ("INSERT INTO `testapp_order` (`id`) VALUES (%s) ON DUPLICATE KEY UPDATE `note` = 'x'", [502], False),
    ("insert into testapp_order (id) values (%s) on conflict (id) do update set note = 'x'", [502], False),
    ("INSERT INTO testapp_order (id) VALUES (%s)\n  ON\n  CONFLICT (id) DO UPDATE SET note = 'x'", [502], False),
    ("INSERT OR REPLACE INTO testapp_order (id) VALUES (%s)", [502], False),
    ("WITH old AS (UPDATE testapp_order SET note = NULL RETURNING id) SELECT * FROM old", None, False),
    ("UPDATE customer, `testapp_order` SET note = NULL WHERE customer.id = 7", None, False),
    ('SELECT "id" FROM "django_delayq_timeout" WHERE "state" = %s', ["pending"], False),
    ("SELECT id FROM testapp_order WHERE id IN (SELECT object_id FROM django_delayq_timeout)", None, False),
    ('UPDATE "django_delayq_timeout" SET "state" = %s WHERE "policy" = %s', ["cancelled", "x"], False),
    ('SELECT * FROM "django_delayq_timeout" WHERE "django_delayq_timeout"."object_id" = %s', ["502"], False),
]
WITHIN: list[tuple[str, Any, bool]] = [
    ('UPDATE "testapp_order" SET "note" = %s WHERE "testapp_order"."id" = %s', ["x", 501], False),
    ("UPDATE `testapp_order` SET `note` = %s WHERE `testapp_order`.`id` = %s", ["x", 501], False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE ("testapp_order"."id" = %s AND "a" = %s)', ["x", 501, 502], False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE ("a" = %s AND "testapp_order"."id" = %s)', ["x", 502, 501], False),
    ('UPDATE "testapp_order" SET "note" = %s WHERE ("testapp_order"."id" = %s AND NOT ("a" = 1))', ["x", 501], False),
    ('DELETE FROM "testapp_order" WHERE "testapp_order"."id" IN (%s)', [501], False),
    ('UPDATE "testapp_orderline" SET "note" = %s', ["x"], False),
    ('UPDATE "old_testapp_order" SET "note" = %s', ["x"], False),
    ('UPDATE "line" SET "x" = 1 WHERE "order_id" IN (SELECT "id" FROM "testapp_order")', [], False),
    ('INSERT INTO "log" ("a") SELECT "id" FROM "testapp_order"', [], False),
    ('INSERT INTO "testapp_order" ("note") VALUES (%s)', ["x"], False),
    ('INSERT INTO "testapp_order" ("note") VALUES (%s)', [("x",), ("y",)], True),
    ('INSERT INTO "log" ("a") VALUES (%s) ON CONFLICT("a") DO NOTHING', ["testapp_order"], False),
    ('SELECT * FROM "testapp_order" FOR UPDATE', [], False),
    ('SAVEPOINT "s1"', None, False),
    ("SET LOCAL lock_timeout = 100", None, False),
    ('INSERT INTO "django_delayq_timeout" ("object_id", "slot") VALUES (%s, %s)', ["502", "a slot of 502"], False),
    ('SELECT * FROM "django_delayq_timeout" WHERE "django_delayq_timeout"."slot" IN (%s)', ["of 501"], False),
    ('SELECT * FROM "django_delayq_timeout" WHERE "django_delayq_timeout"."object_id" = %s', ["501"], False),
    ('SELECT * FROM "django_delayq_timeout" WHERE "django_delayq_timeout"."id" = (%s)', [-1], False),
]


@pytest.mark.parametrize(("sql", "params", "many"), BEYOND)
def test_what_may_touch_another_member_is_seen(detector: OverlapDetector, sql: str, params: Any, many: bool) -> None:
    assert detector.overlaps(sql, params, many)


@pytest.mark.parametrize(("sql", "params", "many"), WITHIN)
def test_what_touches_only_its_own_object_is_let_pass(
    detector: OverlapDetector, sql: str, params: Any, many: bool
) -> None:
    assert not detector.overlaps(sql, params, many)
