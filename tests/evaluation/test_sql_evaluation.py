"""Text-to-SQL: folders, execution limits, comparison, coverage, figures."""

import dataclasses
import json
import sqlite3
import time
from types import SimpleNamespace

import pytest

import jaxkv.engine
from jaxkv.errors import EvaluationError
from jaxkv.evaluation import sql_run
from jaxkv.evaluation.journal import Journal
from jaxkv.evaluation.sql import judge, load
from jaxkv.evaluation.sql_coverage import grammar_coverage, single_blanks
from jaxkv.evaluation.sql_execution import execute, same_result
from jaxkv.policies.registry import load_policy
from jaxkv.state.payload import Cost

SCHEMA = """
CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT, wage REAL);
INSERT INTO staff VALUES (1, 'Ada', 10.0), (2, 'Bo', 20.0), (3, 'Cy', 20.0), (4, NULL, 5);
"""
QUESTIONS = [
    ("simple", "How many?", "SELECT COUNT(*) FROM staff"),
    ("simple", "Who earns 20?", "SELECT name\n  FROM staff WHERE wage = 20"),
    ("moderate", "Best wage?", "SELECT MAX(wage) FROM staff"),
    ("moderate", "Broken?", "SELECT nobody FROM staff"),
]


@pytest.fixture
def folder(tmp_path):
    """A set in BIRD's format."""
    place = tmp_path / "bird" / "dev_databases" / "work"
    place.mkdir(parents=True)
    connection = sqlite3.connect(place / "work.sqlite")
    connection.executescript(SCHEMA)
    connection.commit()
    connection.close()
    entries = [
        {"question_id": i, "db_id": "work", "question": q, "evidence": "e" * (i == 1), "SQL": s, "difficulty": d}
        for i, (d, q, s) in enumerate(QUESTIONS)
    ]
    (tmp_path / "bird" / "dev.json").write_text(json.dumps(entries))
    return tmp_path / "bird"


@pytest.fixture
def database(folder):
    return folder / "dev_databases" / "work" / "work.sqlite"


def test_a_folder_in_birds_format(folder):
    found = load(folder)
    assert [q.id for q in found.questions] == [f"work.{i}" for i in range(4)]
    assert sql_run.difficulties(found.questions) == ["simple", "moderate"]
    system, user = found.questions[1].messages
    assert system["role"] == "system"
    assert user["content"].startswith("CREATE TABLE staff")
    assert user["content"].endswith("Evidence: e\nQuestion: Who earns 20?")
    assert "Evidence" not in found.questions[0].messages[1]["content"]
    assert [q.id for q in load(folder, stride=2, limit=1).questions] == ["work.0"]


def test_a_folder_in_geoquerys_format(tmp_path):
    connection = sqlite3.connect(tmp_path / "geography-db.sqlite")
    connection.executescript(SCHEMA)
    connection.close()
    entries = [
        {
            "sql": ['SELECT wage FROM staff WHERE name = "name0" AND id < number10'],
            "sentences": [
                {"text": "wage of name0", "variables": {"name0": "Ada", "number1": "x", "number10": "9"}},
                {"text": "wage of name0", "variables": {"name0": "Nobody", "number10": "9"}},
            ],
        }
    ]
    (tmp_path / "geography.json").write_text(json.dumps(entries))
    found = load(tmp_path)
    (question,) = found.questions
    assert (question.question, question.id, question.difficulty) == ("wage of Ada", "geography.0.0", "")
    assert question.gold == 'SELECT wage FROM staff WHERE name = "Ada" AND id < 9'
    assert found.left_out == "1 questions whose expected query fails or has no rows"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda f: (f / "dev.json").unlink(), "one JSON file of questions and has none"),
        (lambda f: (f / "more.json").write_text("[]"), "has dev.json, more.json"),
        (lambda f: (f / "dev.json").write_text("[{"), "cannot read"),
        (lambda f: (f / "dev.json").write_text("{}"), "is not a list of objects"),
        (lambda f: (f / "dev.json").write_text("[]"), "has no questions"),
        (lambda f: (f / "dev.json").write_text('[{"db_id": "work"}]'), "entry 0 has no text question, SQL"),
        (lambda f: (f / "dev.json").write_text('[{"db_id": "../work", "question": "", "SQL": ""}]'), "is missing"),
        (lambda f: (f / "dev_databases" / "work" / "work.sqlite").unlink(), "work.sqlite is missing"),
        (lambda f: (f / "dev_databases").rename(f / "x"), "has neither a *_databases folder"),
    ],
)
def test_bad_folders(folder, change, expected):
    change(folder)
    with pytest.raises(EvaluationError) as caught:
        load(folder)
    assert expected in str(caught.value)


def test_no_folder_and_no_selection(tmp_path):
    with pytest.raises(EvaluationError, match="is no folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(EvaluationError, match="stride 0"):
        load(tmp_path, stride=0)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
HOSTILE = [
    (ENDLESS + "SELECT COUNT(*) FROM n", "timeout"),
    (ENDLESS + "SELECT i FROM n WHERE i < 0", "timeout"),
    (ENDLESS + "SELECT i FROM n", "too_many_rows"),
    (ENDLESS + "SELECT i FROM n ORDER BY i", "timeout"),
    (ENDLESS + "SELECT hex(zeroblob(1000000)) FROM n", "too_large"),
    ("SELECT zeroblob(1000000000)", "error"),
    ("SELECT '" + "%" * 100000 + "'", None),
    ("ATTACH 'other.sqlite' AS other", "refused"),
    ("DETACH main", "refused"),
    ("PRAGMA writable_schema = 1", "refused"),
    ("PRAGMA temp_store_directory = '/'", "refused"),
    ("INSERT INTO staff VALUES (9, 'x', 1)", "refused"),
    ("UPDATE staff SET wage = 0", "refused"),
    ("DELETE FROM staff", "refused"),
    ("DROP TABLE staff", "refused"),
    ("CREATE TABLE other (a)", "refused"),
    ("CREATE TEMP TABLE other (a)", "refused"),
    ("VACUUM INTO 'other.sqlite'", "refused"),
    ("REINDEX staff", "error"),
    ("BEGIN IMMEDIATE", "refused"),
    ("SELECT load_extension('other')", "refused"),
    ("SELECT LOAD_EXTENSION('other')", "refused"),
    ("SELECT 1; DELETE FROM staff", "error"),
    ("SELECT writefile('other', 'x')", "error"),
    ("SELECT nobody FROM staff", "error"),
    ("SELEC", "error"),
    ("", "error"),
    ("-- nothing", "error"),
    ("SELECT '\ud800'", "error"),
    ("SELECT 1\0", "error"),
    ("SELECT CAST(x'ff' AS TEXT)", None),
]


@pytest.mark.parametrize(("query", "failure"), HOSTILE, ids=lambda value: str(value)[:40].encode("ascii", "replace"))
def test_no_query_hangs_writes_or_raises(database, monkeypatch, tmp_path, query, failure):
    monkeypatch.chdir(tmp_path)
    before, names = database.read_bytes(), sorted(tmp_path.rglob("*"))
    started = time.monotonic()
    execution = execute(database, query, timeout_s=0.4, max_rows=500)
    assert time.monotonic() - started < 5
    assert execution.failure == failure, execution.message
    assert (execution.rows is None) == (failure is not None)
    assert bool(execution.message) == (failure is not None)
    assert (database.read_bytes(), sorted(tmp_path.rglob("*"))) == (before, names)


def test_a_result_over_the_limit_is_a_failure_and_never_cut_off(database):
    assert execute(database, "SELECT id FROM staff", max_rows=4).rows == [(1,), (2,), (3,), (4,)]
    execution = execute(database, "SELECT id FROM staff", max_rows=3)
    assert (execution.rows, execution.failure) == (None, "too_many_rows")


@pytest.mark.parametrize(
    ("predicted", "gold", "same"),
    [
        ([(1,), (2,)], [(2,), (1,)], True),
        ([(1,), (1,)], [(1,)], True),
        ([(1,)], [(1.0,)], True),
        ([(1,)], [("1",)], False),
        ([(1, 2)], [(2, 1)], False),
        ([(1,)], [(1, 1)], False),
        ([], [], True),
        ([(None,)], [], False),
        ([("a",)], [("A",)], False),
        ([(b"a",)], [("a",)], False),
    ],
)
def test_rows_are_compared_as_birds_evaluator_does(predicted, gold, same):
    assert same_result(predicted, gold) is same


@pytest.mark.parametrize(
    ("index", "query", "correct", "executable", "error_type"),
    [
        (0, "SELECT COUNT(id) AS n FROM staff", True, True, None),
        (0, "SELECT COUNT(name) FROM staff", False, True, "wrong_rows"),
        (0, "SELECT COUNT(nobody) FROM staff", False, False, "error"),
        (0, "DELETE FROM staff", False, False, "refused"),
        (0, None, False, False, "no_query"),
        (1, "SELECT name FROM staff WHERE wage > 10 ORDER BY name DESC", True, True, None),
        (3, "SELECT 1", False, True, "gold_error"),
        (3, "SELECT nobody FROM staff", False, False, "error"),
    ],
)
def test_verdicts(folder, index, query, correct, executable, error_type):
    verdict = judge(load(folder).questions[index], query)
    assert (verdict.correct, verdict.executable, verdict.error_type) == (correct, executable, error_type)


def test_running_out_of_rows_or_time_is_never_a_match(folder):
    question = load(folder).questions[1]
    assert judge(question, question.gold, max_rows=2).correct
    assert judge(question, question.gold, max_rows=1).error_type == "too_many_rows"
    endless = dataclasses.replace(question, gold=ENDLESS + "SELECT i FROM n")
    assert judge(endless, "SELECT 1", max_rows=10).error_type == "gold_too_many_rows"


def test_coverage_tells_faults_of_the_grammar_from_faults_of_the_query(folder):
    questions = load(folder).questions
    fault = dataclasses.replace(questions[0], id="row", gold="SELECT (1, 2) = (1, 2)")
    seen = []
    found = grammar_coverage([*questions, fault], seen.append)
    assert (found.total, found.share, len(seen)) == (5, 3 / 5, 5)
    broken, grammar = found.rejected
    assert (broken.id, broken.sqlite) == ("work.3", "no such column: nobody")
    assert "SQLite refuses it too" in str(broken)
    assert (grammar.id, grammar.sqlite) == ("row", "")
    assert "SQLite RUNS IT" in str(grammar)


def test_blanks_in_quotes_are_kept():
    assert (
        single_blanks("  SELECT\n 'a  b''  c',\t\"x  y\"  FROM `t  u` ") == "SELECT 'a  b''  c', \"x  y\" FROM `t  u`"
    )


# ---- Runs ----

COST = Cost(prefill=30, prefill_full=100, decode=20, decode_full=60, live=7, live_full=10, allocated_bytes=8)


class StubEngine:
    """Answers every question with its expected query, but the third wrongly."""

    served = 0

    def __init__(self, model, policy, rows):
        pass

    def run(self, requests):
        for request in requests:
            StubEngine.served += 1
            index = int(request.request_id.rsplit(".", 1)[1])
            query = "SELECT 1" if index == 2 else single_blanks(QUESTIONS[index][2])
            yield SimpleNamespace(
                request_id=request.request_id, sql=query, text=query, token_ids=(1, index), finish_reason="stop",
                error=None, cost=COST, seconds_prefill=1.0, seconds_decode=0.5,
            )  # fmt: skip


def test_a_run_resumes_and_has_the_figures_announced(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(jaxkv.engine, "Engine", StubEngine, raising=False)
    monkeypatch.setattr(jaxkv.engine, "Request", SimpleNamespace, raising=False)
    monkeypatch.setattr(sql_run, "SqlQueries", lambda schema, tokenizer: None)
    monkeypatch.setattr(StubEngine, "served", 0)
    questions = load(folder).questions
    model = SimpleNamespace(tokenizer=None)
    for chosen, served in ((questions[:2], 2), (questions, 4)):
        seen = []
        with Journal(tmp_path / "full.jsonl", {"a": 1}) as journal:
            sql_run.run_policy(model, None, chosen, journal, rows=1, max_new_tokens=9, on_question=seen.append)
            finished = journal.finished
        assert StubEngine.served == served
    assert [question.id for question in seen] == ["work.2", "work.3"]
    both = {"full": finished, "pask": finished}
    found = sql_run.figures(both, questions, {"full": True, "pask": False})
    assert sorted(found) == sorted(sql_run.figure_names(["full", "pask"], ["simple", "moderate"]))
    assert (found["full.correct"], found["full.total"], found["full.accuracy"]) == (2, 4, 0.5)
    assert (found["full.executable"], found["full.simple.accuracy"], found["full.moderate.correct"]) == (3, 1.0, 0)
    assert found["pask.ratio_total"] == 50 / 160
    assert found["pask.moderate.same_tokens_as_full"] == 1


def test_policies_of_another_grammar_are_refused():
    sql_run.check_policies([load_policy("full"), load_policy("all_high_sql")])
    with pytest.raises(EvaluationError, match="'all_high' knows the tags of function_calling, not of sql"):
        sql_run.check_policies([load_policy("all_high")])
