"""Text-to-SQL questions from a folder that the user has: BIRD's format, or GeoQuery's.

BIRD: a JSON list of `{question_id, db_id, question, evidence, SQL, difficulty}` (`dev.json`, `mini_dev_sqlite.json`,
...) and `<any>_databases/<db_id>/<db_id>.sqlite` beside it. GeoQuery: `geography.json`, a list of `{sql: [...],
sentences: [{text, variables}]}` with variables to be filled in (of several queries the first counts), and one
`geography*.sqlite`. Nothing is downloaded.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from jaxkv.errors import EvaluationError
from jaxkv.evaluation.sql_execution import Execution, execute, same_result
from jaxkv.grammar.sql_schema import SqlSchema, read_schema

SYSTEM_PROMPT: Final = (
    "You write SQL for SQLite. Given the schema of a database and a question, reply with only one SELECT statement "
    "that answers the question, using the tables and columns of the schema."
)


@dataclass(frozen=True)
class Question:
    """One question of a text-to-SQL set.

    Attributes:
        id: unique in the set, `<db_id>.<question_id>`.
        database: the SQLite file.
        question: the user's text.
        evidence: BIRD's hint, "" without one.
        gold: the expected query.
        difficulty: BIRD's `simple`, `moderate` or `challenging`; "" where the set has none.
    """

    id: str
    database: Path
    question: str
    evidence: str
    gold: str
    difficulty: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt's chat messages: schema as DDL, evidence, question."""
        parts = [schema_of(self.database).ddl, ""]
        if self.evidence:
            parts.append(f"Evidence: {self.evidence}")
        parts.append(f"Question: {self.question}")
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "\n".join(parts)}]


@dataclass(frozen=True)
class Verdict:
    """Whether a query is right.

    Attributes:
        correct: its rows are, as a set, those of the expected query.
        executable: SQLite ran it to its end within the limits.
        error_type: `no_query` (the answer was cut off), `wrong_rows`, a failure of `Execution`, or `gold_` and one.
        error: in words.
    """

    correct: bool
    executable: bool
    error_type: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class QuestionSet:
    """The questions of a folder; `left_out` says how many were not taken and why, "" if all were."""

    questions: tuple[Question, ...]
    left_out: str = ""


def load(folder: str | Path, *, limit: int | None = None, stride: int = 1) -> QuestionSet:
    """Read a folder: every `stride`-th question, the first `limit` of them.

    Of GeoQuery, questions whose filled-in expected query fails or has no rows are left out before: an empty result
    would make every empty answer right.

    Raises:
        EvaluationError: the folder has neither format, an entry or a database is missing or damaged, or nothing is
            selected.
    """
    if stride < 1 or (limit is not None and limit < 1):
        raise EvaluationError(f"limit {limit} and stride {stride} select nothing; both must be at least 1")
    folder = Path(folder)
    if not folder.is_dir():
        raise EvaluationError(f"{folder} is no folder; give one in BIRD's or GeoQuery's format")
    databases = sorted(path for path in folder.glob("*_databases") if path.is_dir())
    if (folder / "geography.json").is_file():
        found = _geoquery(folder)
    elif databases:
        found = _bird(folder, databases[0])
    else:
        raise EvaluationError(
            f"{folder} has neither a *_databases folder (BIRD) nor geography.json (GeoQuery); give the folder that has"
        )
    return QuestionSet(found.questions[::stride][:limit], found.left_out)


@cache
def schema_of(database: Path) -> SqlSchema:
    """The schema of a database, read once."""
    return read_schema(database)


def judge(question: Question, query: str | None, **limits: Any) -> Verdict:
    """Execute an answer and the expected query and compare their rows; a failure of either is not a match."""
    if query is None:
        return Verdict(False, False, "no_query", "the answer ended before its query did")
    predicted = execute(question.database, query, **limits)
    if predicted.rows is None:
        return Verdict(False, False, predicted.failure, predicted.message)
    gold = _gold(question.database, question.gold, tuple(limits.items()))
    if gold.rows is None:
        return Verdict(False, True, f"gold_{gold.failure}", gold.message)
    if same_result(predicted.rows, gold.rows):
        return Verdict(True, True)
    return Verdict(False, True, "wrong_rows", f"{len(set(predicted.rows))} rows, expected {len(set(gold.rows))}")


@cache
def _gold(database: Path, query: str, limits: tuple[tuple[str, Any], ...]) -> Execution:
    return execute(database, query, **dict(limits))


def _entries(path: Path) -> list[Mapping[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"cannot read {path}: {error}; give the set's own JSON file") from error
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise EvaluationError(f"{path} is not a list of objects; give the set's own JSON file")
    return entries


def _bird(folder: Path, databases: Path) -> QuestionSet:
    files = [path for path in sorted(folder.glob("*.json")) if not path.stem.endswith(("tables", "gold"))]
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise EvaluationError(f"{folder} should have one JSON file of questions and has {names}; leave one there")
    questions = []
    for number, entry in enumerate(_entries(files[0])):
        missing = [key for key in ("db_id", "question", "SQL") if not isinstance(entry.get(key), str)]
        if missing:
            raise EvaluationError(f"{files[0]}: entry {number} has no text {', '.join(missing)}; correct it")
        name = entry["db_id"]
        database = databases / name / f"{name}.sqlite"
        if Path(name).name != name or not database.is_file():
            raise EvaluationError(f"{files[0]}: entry {number}: the database {database} is missing; add it")
        identifier = f"{name}.{entry.get('question_id', number)}"
        difficulty = str(entry.get("difficulty") or "")
        evidence = str(entry.get("evidence") or "")
        questions.append(Question(identifier, database, entry["question"], evidence, entry["SQL"], difficulty))
    return _unique(questions, files[0])


def _geoquery(folder: Path) -> QuestionSet:
    files = sorted(folder.glob("geography*.sqlite"))
    if len(files) != 1:
        raise EvaluationError(f"{folder} should have one geography*.sqlite and has {len(files)}; leave one there")
    path = folder / "geography.json"
    questions, empty = [], 0
    for number, entry in enumerate(_entries(path)):
        try:
            sentences = [(str(one["text"]), dict(one["variables"])) for one in entry["sentences"]]
            template = str(entry["sql"][0])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EvaluationError(f"{path}: entry {number} has no sentences or sql ({error}); correct it") from error
        for index, (text, variables) in enumerate(sentences):
            gold = _filled(template, variables)
            if not _gold(files[0], gold, ()).rows:
                empty += 1
                continue
            name = f"geography.{number}.{index}"
            questions.append(Question(name, files[0], _filled(text, variables), "", gold, ""))
    left_out = f"{empty} questions whose expected query fails or has no rows" if empty else ""
    return QuestionSet(_unique(questions, path).questions, left_out)


def _filled(template: str, variables: Mapping[str, str]) -> str:
    # Longest first: river_name1 must not be taken for the beginning of river_name10.
    for name in sorted(variables, key=len, reverse=True):
        template = template.replace(name, str(variables[name]))
    return template


def _unique(questions: Iterable[Question], path: Path) -> QuestionSet:
    found = tuple(questions)
    if len({question.id for question in found}) < len(found):
        raise EvaluationError(f"{path}: two questions share an id; number them")
    if not found:
        raise EvaluationError(f"{path} has no questions; give the set's own JSON file")
    return QuestionSet(found)
