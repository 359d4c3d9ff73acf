"""What a statement does beside reading is known from its beginning, by database."""

from __future__ import annotations

from itertools import product

from django_delayq.firing.leftovers import effects_of
from django_delayq.sql.dialects import UNSUPPORTED, Dialect, MySQL, PostgreSQL, SQLite

ALL = (UNSUPPORTED, PostgreSQL(), MySQL(), SQLite())
POSTGRESQL, MYSQL, SQLITE = ALL[1:]
EFFECTS: dict[tuple[str, tuple[Dialect, ...]], list[str]] = {
    ("", ALL): [
        "SELECT 'SET x'",
        "WITH x AS (SELECT 1) SELECT * FROM x",
        "SAVEPOINT a",
        "ROLLBACK TO SAVEPOINT a",
        "BEGINNING",
        "/* COMMIT */ SELECT 1",
        "",
    ],
    ("begins", ALL): ["BEGIN", " begin", "START\n TRANSACTION READ ONLY", "/* a */ -- b\n /* c */ BEGIN"],
    ("commits", ALL): ["COMMIT", "commit;", "COMMIT AND CHAIN", "END", "/* the\nend */ COMMIT"],
    ("rolls_back", ALL): ["ROLLBACK", "\n    rollback\n", "ROLLBACK AND CHAIN", "ROLLBACK WORK", "ROLLBACK; SELECT 1"],
    ("writes", ALL): ["INSERT INTO x", "update x", "DELETE FROM x", "REPLACE INTO x", "MERGE INTO x"],
    ("sets", (UNSUPPORTED,)): ["SET x = 1", "RESET x", "USE x"],
    ("", (POSTGRESQL,)): [
        "SET LOCAL x = 1",
        "SET TRANSACTION READ ONLY",
        "SELECT set_config('x', '1', true)",
        "CREATE TABLE x ()",
    ],
    ("rolls_back", (POSTGRESQL,)): ["ABORT", "ABORT TRANSACTION"],
    ("sets", (POSTGRESQL,)): [
        "SET x = 1",
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "RESET ALL",
        "SELECT set_config('x', '1', false)",
    ],
    ("", (MYSQL,)): [
        "SET TRANSACTION READ ONLY",
        "SET @x = 'autocommit'",
        "SET STATEMENT max_statement_time = 1 FOR SELECT 'autocommit'",
        "CREATE TEMPORARY TABLE x (id int)",
        "ROLLBACK WORK TO SAVEPOINT a",
    ],
    ("begins", (MYSQL,)): ["XA START 'x'", "xa begin 'x'"],
    ("commits", (MYSQL,)): [
        "XA COMMIT 'x' ONE PHASE",
        "CREATE TABLE x (id int)",
        "truncate x",
    ],
    ("rolls_back", (MYSQL,)): ["XA ROLLBACK 'x'"],
    ("writes sets", (POSTGRESQL,)): ["UPDATE y SET z = set_config('x', '1', false)"],
    ("commits sets", (MYSQL,)): [
        "SET PASSWORD = 'x'",
        "SET autocommit = 1",
        "SET x = 1, @@session.autocommit = 0",
        "LOCK TABLES x WRITE",
    ],
    ("sets", (MYSQL,)): ["SET time_zone = '+09:00'", "SET SESSION TRANSACTION READ ONLY", "SET @@x = 1", "USE x"],
    ("", (SQLITE,)): ["PRAGMA table_info(x)", "PRAGMA main.index_list('x')", "PRAGMA foreign_keys"],
    ("sets", (SQLITE,)): ["PRAGMA query_only = 1", "PRAGMA main.synchronous(OFF)", "ATTACH 'x' AS y", "DETACH y"],
}


def effects_found(dialect: Dialect, sql: str) -> set[str]:
    match = effects_of(dialect).match(sql)
    assert match is not None
    found = {name for name, text in match.groupdict().items() if text}
    return found | ({"sets"} if dialect.sets_by_call and dialect.sets_by_call.search(sql) else set())


def test_a_statement_has_its_effect() -> None:
    wrong = []
    for (effect, dialects), statements in EFFECTS.items():
        for sql, dialect in product(statements, dialects):
            found = effects_found(dialect, sql)
            if found != {*effect.split()}:
                wrong.append((type(dialect).__name__, sql, effect, found))
    assert wrong == []
