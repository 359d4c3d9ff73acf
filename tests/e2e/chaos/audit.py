"""What the database itself notes: every change of a timeout, every effect, every order, every operation, by triggers.

A number is given while the lock on the order is held, so the numbers of what happened to one order are in the order in
which it happened. Notes commit with what they note. No code of the product is involved.

A note has the name of its transaction, the user of its session, and three times: when it was taken, when its statement
began, and when its transaction began. The last one is known to PostgreSQL only. Elsewhere it is, for an effect, the
time at which the timeout was marked as fired, by its row: the stop of its policy was read after it.
"""

from __future__ import annotations

from tests.e2e.chaos.databases import Database

AUTOMATIC_SECONDS = 1800.0
"""`cancel_unpaid` is due this long after `created_at`."""
SHORTEST_DELAY = 1.0
"""Operators give the policy `decay` no delay that is shorter."""

_TABLES = {
    "timeout": "django_delayq_timeout",
    "effect": "testapp_effect",
    "order": "testapp_order",
    "operation": "chaos_operation",
}
_LEFT_OUT = {"history", "payload", "stops"}  # JSON: MariaDB stores it in another collation

_POSTGRESQL = """
CREATE TABLE chaos_operation (id text PRIMARY KEY);
CREATE TABLE chaos_note (
    number bigserial PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    asked_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    began_at timestamptz NOT NULL DEFAULT transaction_timestamp(),
    xid text NOT NULL DEFAULT pg_current_xact_id()::text,
    by_user text NOT NULL DEFAULT session_user,
    kind text NOT NULL,
    was jsonb,
    became jsonb
);
CREATE FUNCTION chaos_note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_note (kind, was, became) VALUES (
        TG_ARGV[0],
        CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - 'history' - 'payload' END,
        CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - 'history' - 'payload' END
    );
    RETURN NULL;
END $$
"""
_OTHERS = """
CREATE TABLE chaos_operation (id varchar(32) PRIMARY KEY);
CREATE TABLE chaos_note (
    number {serial},
    at {moment} NOT NULL,
    asked_at {moment} NOT NULL,
    began_at {moment} NOT NULL,
    xid varchar(100) NOT NULL,
    by_user varchar(100) NOT NULL,
    kind varchar(20) NOT NULL,
    was longtext,
    became longtext
)
"""
_TYPES = {
    "mariadb": {"serial": "bigint PRIMARY KEY AUTO_INCREMENT", "moment": "datetime(6)"},
    "sqlite": {"serial": "integer PRIMARY KEY AUTOINCREMENT", "moment": "text"},
}
_MARKED_AT = "(SELECT settled_at FROM django_delayq_timeout WHERE id = NEW.timeout_id)"
_TRIGGER = """
CREATE TRIGGER chaos_{kind}_{event} AFTER {event} ON {table} FOR EACH ROW BEGIN
    INSERT INTO chaos_note (at, asked_at, began_at, xid, by_user, kind, was, became)
    VALUES ({now}, {asked}, {began}, {xid}, {user}, '{kind}', {was}, {became});
END
"""


def install(database: Database) -> None:
    """From now on the database takes notes."""
    is_postgresql = database.name == "postgresql"
    for statement in [_POSTGRESQL] if is_postgresql else _OTHERS.format(**_TYPES[database.name]).split(";"):
        database.rows(statement)
    for kind, table in _TABLES.items():
        if is_postgresql:
            database.rows(
                f"CREATE TRIGGER chaos AFTER INSERT OR UPDATE OR DELETE ON {table} "
                f"FOR EACH ROW EXECUTE FUNCTION chaos_note('{kind}')"
            )
            continue
        for event in ("INSERT", "UPDATE", "DELETE"):
            database.rows(_trigger(database, kind, table, event))


def _trigger(database: Database, kind: str, table: str, event: str) -> str:
    if database.name == "mariadb":
        # UTC_TIMESTAMP() is when the statement began. A session that has committed has another GTID than before.
        now, asked = "CONVERT_TZ(SYSDATE(6), @@time_zone, '+00:00')", "UTC_TIMESTAMP(6)"
        xid, user = "CONCAT_WS(' ', @@server_id, CONNECTION_ID(), @@last_gtid)", "SUBSTRING_INDEX(USER(), '@', 1)"
        columns = "SELECT column_name, data_type FROM information_schema.columns"
        found = database.rows(f"{columns} WHERE table_schema = DATABASE() AND table_name = %s", [table])
        moment = "CONCAT(DATE_FORMAT({}, '%Y-%m-%d %H:%i:%s.%f'), '+00:00')"
    else:
        now, asked, xid, user = "chaos_now()", "chaos_now()", "chaos_xid()", "chaos_user()"
        found = database.rows(f"SELECT name, type FROM pragma_table_info('{table}')")
        moment = "{} || '+00:00'"

    def row(which: str) -> str:
        values = [
            f"'{name}', {(moment if kind.startswith('datetime') else '{}').format(f'{which}.{name}')}"
            for name, kind in found
            if name not in _LEFT_OUT
        ]
        return f"JSON_OBJECT({', '.join(values)})"

    began = f"COALESCE({_MARKED_AT}, {now})" if (kind, event) == ("effect", "INSERT") else now
    was, became = row("OLD") if event != "INSERT" else "NULL", row("NEW") if event != "DELETE" else "NULL"
    parts = {"now": now, "asked": asked, "began": began, "xid": xid, "user": user, "was": was, "became": became}
    return _TRIGGER.format(kind=kind, event=event, table=table, **parts)
