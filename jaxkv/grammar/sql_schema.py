"""The schema of a SQLite database: tables, views and their columns, from a database file or from DDL text."""

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jaxkv.errors import SchemaError

_DDL = re.compile(r"\bcreate\s+(temp\s+|temporary\s+)?(table|view|virtual\s)", re.IGNORECASE)
_SUPPORTED = re.compile(
    r"create\s+((temp|temporary)\s+)?(table|view|(unique\s+)?index|trigger)\b|"
    r"(pragma|begin|commit|insert|analyze|drop\s+(table|view|index))\b",
    re.IGNORECASE,
)
_CREATE = re.compile(r"create\b", re.IGNORECASE)
_COMMENT = re.compile(r"\s+|--[^\n]*(?:\n|$)|/\*.*?\*/", re.DOTALL)
_MAX_STEPS = 1_000_000


@dataclass(frozen=True)
class Table:
    """A table or view: its name, its columns in declared order, and the statement that created it."""

    name: str
    columns: tuple[str, ...]
    ddl: str


@dataclass(frozen=True)
class SqlSchema:
    """The tables and views of a database, in the order in which they were created."""

    tables: tuple[Table, ...]

    @property
    def ddl(self) -> str:
        """The statements that create the tables, as the database holds them, each ended by a semicolon."""
        return "\n".join(f"{table.ddl};" for table in self.tables)


def read_schema(database_or_ddl: str | Path) -> SqlSchema:
    """The schema of a SQLite database file, opened read-only, or of DDL text.

    A string with ``CREATE TABLE`` or ``CREATE VIEW`` in it is DDL, any other string and every `Path` is a file. Of DDL
    text, CREATE statements are run on a database in memory; the statements that a dump has besides (INSERT, PRAGMA,
    BEGIN, COMMIT, ANALYZE, DROP) are passed over.

    Raises:
        SchemaError: the file is missing or is no SQLite database, a statement of the DDL is wrong (the message has its
            line), or there is no table.
    """
    if isinstance(database_or_ddl, str) and _DDL.search(database_or_ddl):
        return _read_ddl(database_or_ddl)
    path = Path(database_or_ddl)
    if "\0" in str(path) or len(str(path)) > 4096 or not path.is_file():
        shown = str(database_or_ddl)[:80]
        raise SchemaError(
            f"{shown!r} is neither a database file nor DDL; give a SQLite file or CREATE TABLE statements"
        )
    try:
        with closing(sqlite3.connect(database_uri(path), uri=True)) as connection:
            return _tables(connection, str(path))
    except sqlite3.Error as error:
        raise SchemaError(f"{path} is no SQLite database ({error}); give a SQLite file or CREATE TABLE text") from error


def database_uri(path: Path) -> str:
    """The URI that opens a database without ever writing to it or to files beside it."""
    return f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"


def _read_ddl(text: str) -> SqlSchema:
    with closing(sqlite3.connect(":memory:")) as connection:
        steps = [0]

        def count() -> bool:
            steps[0] += 1000
            return steps[0] > _MAX_STEPS

        connection.set_authorizer(_authorize)
        connection.set_progress_handler(count, 1000)
        for line, statement in _statements(text):
            if not _SUPPORTED.match(statement):
                words = " ".join(statement.split()[:4])
                raise SchemaError(f"DDL line {line}: {words!r} creates nothing; keep CREATE TABLE and CREATE VIEW only")
            if not _CREATE.match(statement):
                continue
            try:
                connection.execute(statement)
            except (sqlite3.Error, sqlite3.Warning) as error:
                words = " ".join(statement.split()[:3])
                raise SchemaError(f"DDL line {line}: {words!r}: {error}; correct the statement") from error
        connection.set_authorizer(None)
        return _tables(connection, "the DDL")


def _authorize(action: int, *_: object) -> int:
    return sqlite3.SQLITE_DENY if action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_PRAGMA) else sqlite3.SQLITE_OK


def _statements(text: str) -> Iterable[tuple[int, str]]:
    """Each statement with the line that it starts in; comments before it are passed over."""
    start, end = 0, 0
    while True:
        while match := _COMMENT.match(text, start):
            start = match.end()
        if start >= len(text):
            return
        end = start
        while end < len(text):
            found = text.find(";", end)
            end = len(text) if found < 0 else found + 1
            if sqlite3.complete_statement(text[start:end]):
                break
        statement = text[start:end].strip()
        if statement != ";":
            yield text.count("\n", 0, start) + 1, statement
        start = end


def _tables(connection: sqlite3.Connection, source: str) -> SqlSchema:
    rows = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite^_%' ESCAPE '^' "
        "ORDER BY rowid"
    ).fetchall()
    tables = []
    for name, ddl in rows:
        try:
            info = connection.execute("SELECT name FROM pragma_table_info(?)", (name,)).fetchall()
        except sqlite3.Error as error:
            raise SchemaError(f"{source}: {name!r}: {error}; correct or drop it") from error
        for (column,) in info:
            if not column or not column.isprintable():
                raise SchemaError(f"{source}: column {column!r} of {name!r} is empty or not printable; rename it")
        if not name.isprintable():
            raise SchemaError(f"{source}: the table name {name!r} is not printable; rename it")
        tables.append(Table(name, tuple(column for (column,) in info), ddl or ""))
    if not tables:
        raise SchemaError(f"{source} has no table; give a schema with at least one")
    return SqlSchema(tuple(tables))
