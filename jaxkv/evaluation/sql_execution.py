"""Execution of a query that a model wrote: read-only, one statement, within limits of time, rows and memory."""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jaxkv.grammar.sql_schema import database_uri

TIMEOUT_S: Final = 30.0
"""Seconds of one query, as BIRD's evaluator has."""
MAX_ROWS: Final = 100_000
MAX_BYTES: Final = 64 * 2**20
"""Most rows of a result and most bytes of its texts; a longer result is a failure, never cut off and compared."""
_MAX_VALUE: Final = 4 * 2**20
_MAX_HEAP: Final = 2**30
_STEPS: Final = 1_000

_ALLOWED: Final = frozenset(
    (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
)


@dataclass(frozen=True)
class Execution:
    """What a query gave: its rows, or a failure.

    Attributes:
        rows: the rows in order; None for a failure.
        failure: `timeout`, `too_many_rows`, `too_large`, `refused` (it would write, attach, load or set something) or
            `error` (SQLite's).
        message: what happened, for a failure.
    """

    rows: list[tuple[Any, ...]] | None
    failure: str | None = None
    message: str = ""


def execute(database: Path, query: str, *, timeout_s: float = TIMEOUT_S, max_rows: int = MAX_ROWS) -> Execution:
    """Run one query on a database file. Never raises for what the query does, never writes, never hangs.

    The file is opened read-only and immutable; an authorizer lets SELECT, reads and functions through and refuses all
    else (ATTACH, PRAGMA, writes, transactions, load_extension); temporary tables stay in memory, which is bounded.
    """
    refused: list[str] = []

    def authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
        if action in _ALLOWED and not (action == sqlite3.SQLITE_FUNCTION and second == "load_extension"):
            return sqlite3.SQLITE_OK
        refused.append(str(first or second or action))
        return sqlite3.SQLITE_DENY

    deadline = time.monotonic() + timeout_s
    try:
        with closing(sqlite3.connect(database_uri(database), uri=True, isolation_level=None)) as connection:
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute(f"PRAGMA hard_heap_limit = {_MAX_HEAP}")
            connection.text_factory = lambda data: data.decode(errors="surrogateescape")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE)
            connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            connection.set_authorizer(authorize)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
            return _fetch(connection.execute(query), max_rows, deadline, timeout_s)
    except (sqlite3.Error, sqlite3.Warning, ValueError, UnicodeError, MemoryError) as error:
        if time.monotonic() > deadline:
            return Execution(None, "timeout", f"not done after {timeout_s:g} s")
        if refused:
            return Execution(None, "refused", f"{error}: {refused[-1]}")
        return Execution(None, "error", str(error) or type(error).__name__)


def _fetch(cursor: sqlite3.Cursor, max_rows: int, deadline: float, timeout_s: float) -> Execution:
    rows: list[tuple[Any, ...]] = []
    size = 0
    if cursor.description is None:
        return Execution(None, "error", "it is empty")
    for row in cursor:
        if len(rows) == max_rows:
            return Execution(None, "too_many_rows", f"more than {max_rows:,} rows")
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > MAX_BYTES:
            return Execution(None, "too_large", f"more than {MAX_BYTES:,} bytes of text")
        if time.monotonic() > deadline:
            return Execution(None, "timeout", f"not done after {timeout_s:g} s")
        rows.append(row)
    return Execution(rows)


def same_result(predicted: Sequence[tuple[Any, ...]], gold: Sequence[tuple[Any, ...]]) -> bool:
    """BIRD's comparison: the sets of rows are equal.

    As in the official evaluator (`calculate_ex` of mini_dev: ``set(predicted_res) == set(ground_truth_res)``): order
    and repetitions of rows do not count; the order of columns does, their names do not; 1 equals 1.0 and not '1'.
    """
    return set(predicted) == set(gold)
