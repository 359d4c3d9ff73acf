"""Statements that Django compiles once, for any number of executions with other values.

To compile a small query costs Django several times the CPU of executing it. A function decorated with `compiled` builds
a queryset, or an INSERT or UPDATE, in which `Param` stands for each value that differs between executions::

    @compiled
    def newest_row(using: str, count: int) -> QuerySet[Timeout]:
        return for_update(Timeout.objects.using(using).filter(slot__in=params("slot", count)).order_by("-id"), using)

    rows = newest_row.objects(using, len(slots), slot=slots)

The function is called once for each database and *shape*: the positional arguments, which must be hashable. They name
everything else that the SQL depends on. The statements are executed by a cursor of the connection, so that wrappers,
query logs and instrumentation see them like any other.

PostgreSQL plans a small statement for longer than it executes it. So the most frequent ones are prepared (`Raw`): with
SQL, because Django's cursors bind parameters in the client, with which psycopg prepares nothing.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from django.apps import apps
from django.core.signals import setting_changed
from django.db import Error, connections, transaction
from django.db.models import BooleanField, CharField, Expression, F, Func, Q, QuerySet
from django.db.models.sql import Query, UpdateQuery

from django_delayq.sql.dialects import dialect_of
from django_delayq.sql.key_types import HexField, array_of, key_type
from django_delayq.sql.now import evaluated_at_execution
from django_delayq.times import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Field, Model
    from django.db.models.sql.compiler import SQLCompiler

T = TypeVar("T")
MAX_STATEMENTS = 1000
"""More are not kept, because shapes may contain policies, and tests declare many."""
CHUNK = 500
"""Every database accepts statements with some parameters for each of so many rows."""
PREPARED_AFTER = 5
"""Runs on one connection before a statement is prepared there: many web processes open one for each request. As the
drivers do (`prepare_threshold` of psycopg, `prepareThreshold` of JDBC)."""
_ALTERED = "0A000"
_LOST = frozenset({_ALTERED, "26000", "42P18"})
"""SQLSTATE: the plan would return other columns, because a table was altered; no such prepared statement; PostgreSQL
does not know the type of a parameter."""
_numbers = itertools.count(1)
_PLAIN = re.compile(r"[\w.\[\]-]*", re.ASCII)
_SETTINGS = frozenset(("DATABASES", "DATABASE_ROUTERS", "INSTALLED_APPS", "TIME_ZONE", "USE_TZ"))


def upsert(rows: QuerySet[Any], new: Sequence[Any], unique: Sequence[str], names: Sequence[str]) -> None:
    """Insert the `new` rows by the manager `rows`, and write `names` of those whose `unique` columns exist already.

    An upsert, because an IntegrityError would leave the caller's PostgreSQL transaction unusable.
    """
    target = unique if connections[rows.db].features.supports_update_conflicts_with_target else None
    rows.bulk_create(new, update_conflicts=True, update_fields=names, unique_fields=target)


class Param(Expression):
    """A value of `field` that each execution gives as the keyword argument `name`, or as item `index` of it."""

    def __init__(self, field: Field[Any, Any], name: str = "", index: int | None = None) -> None:
        super().__init__(output_field=field)
        self.name, self.index = name or field.attname, index

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, tuple[Any, ...]]:
        """Compile to a placeholder; the parameter is this object itself."""
        return "%s", (self,)


def param(name: str, index: int | None = None) -> Param:
    """Return the parameter for a column of the ledger, whose model is above this room; see `Param`."""
    field: Any = apps.get_model("django_delayq", "Timeout")._meta.get_field(name)
    return Param(field, name, index)


def params(name: str, count: int) -> list[Any]:
    """Return parameters for a sequence of so many values of one column of the ledger."""
    return [param(name, index) for index in range(count)]


def padded(values: Collection[T]) -> list[T]:
    """Return `values` with the last one repeated up to a power of two, so that few shapes serve lists of any length."""
    listed = list(values)
    return listed + listed[-1:] * ((1 << (len(listed) - 1).bit_length()) - len(listed)) if listed else listed


def chunks(rows: Sequence[Any], size: int | None = None) -> Iterator[Sequence[Any]]:
    """Yield `rows` in pieces of `size`, by default in pieces that every database takes in one statement."""
    size = size or CHUNK
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def key_list(model: type[Model], pks: Collection[Any], using: str) -> tuple[Any, int]:
    """Return primary keys of `model` as the parameter of `has_key`, and their number: 0 if they are an array.

    An array is one parameter, and gives lists of any length the same statement.
    """
    if dialect_of(connections[using]).key_arrays:
        return array_of(model, pks), 0
    listed = padded(pks)
    return listed, len(listed)


def has_key(model: type[Model], name: str, count: int, using: str) -> Q | Func:
    """Return the condition on rows of `model` that the parameter `name`, a `key_list`, has their key."""
    if not count:
        return in_array(model, Param(CharField(), name), using)
    return Q(pk__in=[Param(cast("Any", model._meta.pk), name, index) for index in range(count)])


def in_array(model: type[Model], array: Any, using: str) -> Func:
    """Return the condition on rows of `model` that `array`, as `array_of` writes it, has their key."""
    kind = elements_of(model, using)
    cast = "" if kind == "text" else f"::{kind}[]"  # as a `text` it never equals a longer column of type character(n)
    return Func(F("pk"), array, template=f"%(expressions)s{cast})", arg_joiner=" = ANY(", output_field=BooleanField())


def elements_of(model: type[Model], using: str) -> str:
    """Return the type of the elements of an array of keys of `model`, on a database that has arrays."""
    return dialect_of(connections[using]).key_arrays[key_type(model).name]


def selected(column: str, field: Field[Any, Any], connection: BaseDatabaseWrapper) -> str:
    """Return the SQL that selects a column in a `Raw`: on PostgreSQL, the text of a datetime.

    Django reads datetimes of PostgreSQL by a class of psycopg that is written in Python. It takes ten times as long as
    to parse their text, which was half of the CPU of a firing. In UTC only, where each text is one datetime.
    """
    return f"({column})::text" if _is_text(field, connection) else column


def _is_text(field: Field[Any, Any], connection: BaseDatabaseWrapper) -> bool:
    return connection.timezone is UTC and field.db_type(connection) == "timestamp with time zone"


def _parsed(text: str | None, *_: Any) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


class Raw(NamedTuple):
    """SQL that Django cannot build: one statement that does the work of several."""

    sql: str
    parameters: Sequence[Any]
    returning: Sequence[Field[Any, Any]] = ()
    """The columns of models that it returns, each written by `selected`."""
    is_prepared: bool = False
    """Whether PostgreSQL shall keep its plan. For one that finds rows by single keys: of an array of keys it expects
    ten, and so plans it in each execution."""


Built: TypeAlias = "QuerySet[Any, Any] | UpdateQuery | Raw | tuple[str, Sequence[Any]]"


def sql_of(built: QuerySet[Any, Any] | UpdateQuery, using: str) -> tuple[str, tuple[Any, ...]]:
    """Return SQL and parameters of a part of a `Raw`."""
    with evaluated_at_execution():
        query: Any = built.query if isinstance(built, QuerySet) else built
        return cast("tuple[str, tuple[Any, ...]]", query.get_compiler(using).as_sql())


class PlanLost(Exception):
    """A prepared statement could not be executed, because it was discarded or a table was altered.

    It has written nothing, but its transaction has to be rolled back. It can be repeated at once.
    """


class _Session:
    """A session of PostgreSQL: the names of the statements that are prepared in it, and how often others have run."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.runs: Counter[str] = Counter()
        self.is_direct: bool | None = None  # not known yet

    def name(self, sql: str, connection: BaseDatabaseWrapper) -> str | None:
        """Return the name of the prepared statement `sql`, which is prepared now if it was executed often enough.

        By a cursor of the driver, as psycopg prepares, so that Django does not count it. None: execute it as it is.
        """
        if (found := self.names.get(sql)) is not None or self.is_direct is False:
            return found
        self.runs[sql] += 1
        if self.runs[sql] <= PREPARED_AFTER:
            return None
        driver: Any = connection.connection
        with connection.wrap_database_errors, driver.cursor() as cursor:
            if self.is_direct is None:
                # A pooler gives each transaction another session, and reports a number of its own to the driver.
                cursor.execute("SELECT pg_backend_pid()")
                self.is_direct = cursor.fetchone()[0] == driver.info.backend_pid
            if self.is_direct:
                name = self.names[sql] = f"delayq_{next(_numbers)}"
                cursor.execute(f"PREPARE {name} {sql}")
        return self.names.get(sql)

    def forget(self, error: Error) -> bool:
        """Forget all names if `error` is one of prepared statements alone; return whether it is.

        Where statements were discarded, none are prepared any more: a pool may reset its connections again and again.
        """
        code = getattr(error.__cause__, "sqlstate", None) or getattr(error.__cause__, "pgcode", None)
        if code not in _LOST:
            return False
        self.names.clear()
        self.is_direct = code == _ALTERED
        return True


_sessions: WeakKeyDictionary[Any, _Session] = WeakKeyDictionary()
"""By the connection of the driver: a pool lends it to several threads."""


class Statement:
    """SQL, its parameters, and how to read the rows that it returns."""

    def __init__(self, built: Built, using: str) -> None:
        self.model: Any = None
        self.columns: list[str] = []
        """The names of the model's columns, which come first, and then those of `annotations`."""
        self.annotations: list[tuple[str, int]] = []
        self.is_read = isinstance(built, QuerySet)
        self.locks = isinstance(built, QuerySet) and built.query.select_for_update
        expressions: list[Any] = []
        texts: set[int] = set()
        """The places of the datetimes that are selected as text."""
        if isinstance(built, tuple):
            self.sql, parameters, returned, _ = Raw(*built)
            expressions = [field.get_col(field.model._meta.db_table) for field in returned]
            if returned:
                self.model, self.columns = returned[0].model, [field.attname for field in returned]
            compiler: Any = Query(self.model).get_compiler(using)
            texts = {at for at, field in enumerate(returned) if _is_text(field, compiler.connection)}
        else:
            # `elide_empty`: Django would raise for a query that no row can match, as by a condition with an empty list.
            query: Any = built.query if isinstance(built, QuerySet) else built
            compiler = query.get_compiler(using, elide_empty=False)
            with evaluated_at_execution():
                self.sql, parameters = compiler.as_sql()
            if self.is_read:
                expressions = [column[0] for column in compiler.select[: compiler.col_count]]
                if compiler.klass_info:
                    self.model = compiler.klass_info["model"]
                    self.columns = [expressions[at].target.attname for at in compiler.klass_info["select_fields"]]
                    self.annotations = list(compiler.annotation_col_map.items())
        found = {at: ([], expressions[at]) for at in texts} | compiler.get_converters(expressions)
        self.converters = [(at, [_parsed, *own] if at in texts else own, column) for at, (own, column) in found.items()]
        self.sql, parameters = _with_literals(self.sql, parameters)
        self.constants = parameters
        given = [(at, each, each.output_field) for at, each in enumerate(parameters) if isinstance(each, Param)]
        plain = (CharField, HexField)  # their strings are ready for the driver
        self.given = [(at, each.name, each.index, field, type(field) in plain) for at, each, field in given]
        self.late = [(at, each) for at, each in enumerate(parameters) if callable(each)]
        is_prepared = isinstance(built, Raw) and built.is_prepared and not self.late
        self.prepared = _with_types(self.sql, parameters, compiler.connection) if is_prepared else ""
        """The types and the SQL for PREPARE; empty: it is not prepared."""

    def parameters(self, values: Mapping[str, Any], connection: BaseDatabaseWrapper) -> list[Any]:
        """Return the parameters of one execution."""
        parameters = self.constants.copy()
        for at, name, index, field, is_text in self.given:  # no call for each: there are some 20 in an INSERT
            value = values[name] if index is None else values[name][index]
            parameters[at] = value if is_text and type(value) is str else field.get_db_prep_save(value, connection)
        for at, evaluate in self.late:
            parameters[at] = evaluate(connection)
        return parameters

    def read(
        self, values: Mapping[str, Any], connection: BaseDatabaseWrapper, is_first: bool = False
    ) -> list[Sequence[Any]]:
        """Execute and return the rows, with values of the types that Django's fields have; see `compiled.rows`."""
        guard = nullcontext() if self.is_read else transaction.mark_for_rollback_on_error(connection.alias)
        with guard, connection.cursor() as cursor:
            parameters = self.parameters(values, connection)
            if not (self.prepared and self._execute_prepared(cursor, parameters, connection, is_first)):
                cursor.execute(self.sql, parameters)
            rows: list[Sequence[Any]] = cursor.fetchall()
        if self.converters:
            rows = [list(row) for row in rows]
            for at, functions, expression in self.converters:
                for row in cast("list[list[Any]]", rows):
                    for function in functions:
                        row[at] = function(row[at], expression, connection)
        return rows

    def _execute_prepared(
        self, cursor: Any, parameters: list[Any], connection: BaseDatabaseWrapper, is_first: bool
    ) -> bool:
        """Execute it as a prepared statement; return False if it is none.

        Not in a transaction of the caller: an error would undo what it has written.
        """
        if not is_first and (connection.in_atomic_block or not connection.get_autocommit()):
            return False
        session = _sessions.setdefault(connection.connection, _Session())
        try:
            if (name := session.name(self.prepared, connection)) is None:
                return False
            marks = ", ".join(["%s"] * len(self.given))
            cursor.execute(f"EXECUTE {name} ({marks})", [parameters[at] for at, *_ in self.given])
        except Error as error:
            if not session.forget(error):
                raise
            if is_first:
                raise PlanLost from error
            return False
        return True


def _with_types(sql: str, parameters: Sequence[Any], connection: Any) -> str:
    """Return `sql` for PREPARE: with the types of its parameters, which PostgreSQL does not infer in a SELECT list.

    Constants become literals, as Django's cursor would send them. Empty where the database or its options do not fit.
    """
    if not dialect_of(connection).prepares(connection):
        return ""
    types, marks = list[str](), list[str]()
    for each in parameters:
        kind = each.output_field.db_type(connection) if isinstance(each, Param) else None
        if kind is not None:
            types.append(kind if kind.startswith("timestamp") else "unknown")
        marks.append(connection.ops.compose_sql("%s", [each]) if kind is None else f"${len(types)}")
    return f"({', '.join(types)}) AS {sql % tuple(marks)}"


def _with_literals(sql: str, parameters: Iterable[Any]) -> tuple[str, list[Any]]:
    """Write plain constants into the SQL: drivers convert and quote each parameter again in each execution."""
    given, remaining = iter(parameters), []

    def literal(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%%"
        value = next(given)
        if value is None:
            return "NULL"
        if isinstance(value, bool):
            return "TRUE" if value else "FALSE"
        if isinstance(value, int) and value >= 0:
            return str(int(value))
        if isinstance(value, str) and _PLAIN.fullmatch(value):
            return f"'{str.__str__(value)}'"  # not by its own method: that of an enumeration may return its name
        remaining.append(value)
        return "%s"

    return re.sub("%[%s]", literal, sql), remaining


_statements: dict[tuple[Any, ...], Statement] = {}


class compiled:  # noqa: N801 - a decorator
    """Keep the statements that a function builds, one for each database and shape."""

    def __init__(self, build: Callable[..., Built]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    def statement(self, connection: BaseDatabaseWrapper, shape: tuple[Any, ...]) -> Statement:
        """Return the statement of a shape. Raises TransactionManagementError if it locks rows outside a transaction."""
        using = connection.alias
        # What the SQL depends on beside the shape: DatabaseNow differs while the clock is set, and a dialect may have
        # several variants of one query.
        key = (self._build, using, clock.is_set(), dialect_of(connection).variant(connection), shape)
        found = _statements.get(key)
        if found is None:
            if len(_statements) >= MAX_STATEMENTS:
                _statements.clear()
            found = _statements[key] = Statement(self._build(using, *shape), using)
        if found.locks and not connection.in_atomic_block and connection.get_autocommit():
            raise transaction.TransactionManagementError("A statement that locks rows needs a transaction.")
        return found

    def rows(self, using: str, /, *shape: Any, is_first: bool = False, **values: Any) -> list[Sequence[Any]]:
        """Execute a query, or a statement that returns rows; return them.

        `is_first`: as the first statement of a transaction. It may raise PlanLost: then the caller begins it again.
        """
        connection = connections[using]
        return self.statement(connection, shape).read(values, connection, is_first)

    def objects(self, using: str, /, *shape: Any, **values: Any) -> list[Any]:
        """Execute a query and return instances of its model, with annotations as attributes."""
        connection = connections[using]
        statement = self.statement(connection, shape)
        objects = []
        for row in statement.read(values, connection, is_first=False):
            found = statement.model.from_db(using, statement.columns, row[: len(statement.columns)])
            for name, at in statement.annotations:
                setattr(found, name, row[at])
            objects.append(found)
        return objects

    def execute(self, using: str, /, *shape: Any, **values: Any) -> int:
        """Execute a statement that writes; return how many rows."""
        return self.execute_many(using, *shape, each=[values])

    def execute_many(self, using: str, /, *shape: Any, each: Sequence[Mapping[str, Any]]) -> int:
        """Execute a statement that writes once for each of several values; return how many rows it wrote together."""
        connection = connections[using]
        statement = self.statement(connection, shape)
        listed = [statement.parameters(values, connection) for values in each]
        with transaction.mark_for_rollback_on_error(using), connection.cursor() as cursor:
            if len(listed) == 1:
                cursor.execute(statement.sql, listed[0])
            else:
                cursor.executemany(statement.sql, listed)
            return int(cursor.rowcount)


def update(rows: QuerySet[Any, Any], **values: Any) -> UpdateQuery:
    """Return the UPDATE of `rows`, as `rows.update()` would execute it, for a function that builds a statement."""
    query = cast("UpdateQuery", rows.query.chain(UpdateQuery))
    query.add_update_values(values)
    return query


def _on_setting_changed(*, setting: str, **_: Any) -> None:
    if setting in _SETTINGS:
        _statements.clear()


setting_changed.connect(_on_setting_changed, dispatch_uid="django_delayq.statements")
