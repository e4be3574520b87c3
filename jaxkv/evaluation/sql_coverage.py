"""How many expected queries of a text-to-SQL set the SQL grammar can write, and why it cannot write the others."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxkv.evaluation.bfcl_coverage import BYTES
from jaxkv.evaluation.sql import Question, schema_of
from jaxkv.evaluation.sql_execution import execute


@dataclass(frozen=True)
class Rejection:
    """An expected query that the grammar does not accept.

    Attributes:
        id: the question.
        position: characters of `gold` that the grammar accepts.
        reason: the grammar's reason.
        gold: the query.
        sqlite: SQLite's own error, "" if it runs the query: then the grammar is at fault.
    """

    id: str
    position: int
    reason: str
    gold: str
    sqlite: str

    def __str__(self) -> str:
        verdict = f"SQLite refuses it too: {self.sqlite}" if self.sqlite else "SQLite RUNS IT"
        return f"{self.id} at {self.position}: {self.reason} [{verdict}] {self.gold}"


@dataclass(frozen=True)
class Coverage:
    """Coverage of a set; `share` = accepted / total."""

    total: int
    rejected: tuple[Rejection, ...]

    @property
    def share(self) -> float:
        return (self.total - len(self.rejected)) / self.total


def grammar_coverage(questions: Sequence[Question], on_question: Callable[[Question], None] | None = None) -> Coverage:
    """Feed every expected query to the grammar of its database.

    A query counts as written but for blanks: outside of quotes, runs of blanks and line ends become one blank, and
    those at the ends go. The grammar has single blanks only, and a result does not depend on them.
    """
    # At run time and not at import: the data and the evaluator are of use without XGrammar.
    from jaxkv.grammar.sql import SqlQueries

    grammars: dict[Path, SqlQueries] = {}
    rejected = []
    for question in questions:
        if question.database not in grammars:
            grammars[question.database] = SqlQueries(schema_of(question.database), BYTES)
        gold = single_blanks(question.gold)
        accepted, position, reason = grammars[question.database].accepts(gold)
        if not accepted:
            message = execute(question.database, gold).message
            rejected.append(Rejection(question.id, position, reason, gold, message))
        if on_question is not None:
            on_question(question)
    return Coverage(len(questions), tuple(rejected))


def single_blanks(query: str) -> str:
    """`query` with one blank for every run of blanks and line ends outside of quotes, and none at its ends."""
    quoted = r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]"
    return re.sub(rf"({quoted})|\s+", lambda match: match.group(1) or " ", query).strip()
