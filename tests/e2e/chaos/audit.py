"""What the database itself notes: every change of a timeout, every effect, every order, by triggers.

A number from one sequence is given while the lock on the order is held, so the numbers of what happened to one order
are in the order in which it happened. Notes commit with what they note. No code of the product is involved.
"""

from __future__ import annotations

from typing import Any

import psycopg

AUTOMATIC_SECONDS = 1800.0
"""`cancel_unpaid` is due this long after `created_at`."""
SHORTEST_DELAY = 1.0
"""Operators give the policy `decay` no delay that is shorter."""

_TABLES = {
    "timeout": "django_delayq_timeout",
    "effect": "testapp_effect",
    "order": "testapp_order",
}

_SCHEMA = """
CREATE SEQUENCE chaos_number;
CREATE TABLE chaos_operation (
    number bigint NOT NULL DEFAULT nextval('chaos_number'),
    id text PRIMARY KEY,
    xid text NOT NULL DEFAULT pg_current_xact_id()::text
);
CREATE TABLE chaos_note (
    number bigint PRIMARY KEY DEFAULT nextval('chaos_number'),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    asked_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    began_at timestamptz NOT NULL DEFAULT transaction_timestamp(),
    xid text NOT NULL DEFAULT pg_current_xact_id()::text,
    kind text NOT NULL,
    before jsonb,
    after jsonb
);
CREATE FUNCTION chaos_note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_note (kind, before, after) VALUES (
        TG_ARGV[0],
        CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - 'history' - 'payload' END,
        CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - 'history' - 'payload' END
    );
    RETURN NULL;
END $$;
"""


def install(connection: psycopg.Connection[Any]) -> None:
    """From now on the database takes notes."""
    connection.execute(_SCHEMA)
    for kind, table in _TABLES.items():
        connection.execute(
            f"CREATE TRIGGER chaos AFTER INSERT OR UPDATE OR DELETE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION chaos_note('{kind}')"
        )
