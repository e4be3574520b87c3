"""The plumbing of measuring scripts: checks are read before work, figures are written whole or not at all."""

import json
import math

import pytest

from jaxkv.errors import EvaluationError, SchemaError
from jaxkv.evaluation.figures import check, emit, finish, parse_checks, run_record, run_script

FIGURES = {
    "full.correct": 19,
    "full.accuracy": 0.475,
    "structural-prior.ratio_total": 0.52,
    "broken": math.nan,
    "none": None,
}


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("full.correct >= 19", True),
        ("full.correct>=20", False),
        ("full.correct > 19", False),
        ("full.correct < 20", True),
        ("full.correct == 19", True),
        ("full.correct != 19", False),
        ("structural-prior.ratio_total <= 0.55", True),
        ("structural-prior.ratio_total <= 5.1e-1", False),
        ("structural-prior.ratio_total >= full.accuracy", True),
        ("full.accuracy >= structural-prior.ratio_total", False),
        ("broken <= 1", False),
        ("broken != 1", False),
        ("none <= 1", False),
    ],
)
def test_a_check_holds_or_names_its_figure(expression, holds):
    failures = check(FIGURES, [expression])
    assert (failures == []) == holds
    if not holds:
        assert failures[0].startswith(parse_checks([expression])[0].figure + " = ")


@pytest.mark.parametrize(
    "expression",
    ["full.correct", "full.correct => 3", "full.correct >= ", ">= 3", "a >= 3 4", "a >= 3%", "a >= nan", ""],
)
def test_a_malformed_check_is_an_error(expression):
    with pytest.raises(EvaluationError, match=r"write for example|give a number"):
        parse_checks([expression])


def test_an_unknown_figure_is_an_error_before_work_that_lists_the_known():
    with pytest.raises(EvaluationError, match=r"'full.acuracy'.*full.accuracy"):
        parse_checks(["full.acuracy >= 0.1"], known=FIGURES)
    with pytest.raises(EvaluationError, match="'nothing'"):
        parse_checks(["full.correct >= nothing"], known=FIGURES)
    with pytest.raises(EvaluationError, match="'nothing'"):
        check(FIGURES, ["nothing >= 1"])


def test_dash_is_standard_output_alone_and_a_failing_check_goes_to_standard_error(capsys):
    code = finish(FIGURES, "-", parse_checks(["full.correct >= 19", "full.correct >= 20"]))
    captured = capsys.readouterr()
    assert code == 1
    assert json.loads(captured.out) == FIGURES | {"broken": None}
    assert captured.err.splitlines() == ["check failed: full.correct = 19 (check: full.correct >= 20)"]


def test_a_failing_figure_is_on_the_last_line(capsys):
    assert finish(FIGURES, None, parse_checks(["full.accuracy >= 0.5"])) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "full.correct = 19" in lines
    assert lines[-1] == "check failed: full.accuracy = 0.475 (check: full.accuracy >= 0.5)"
    assert finish(FIGURES, None, parse_checks(["full.accuracy <= 0.5"])) == 0


def test_figures_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "runs" / "figures.json"
    emit(FIGURES, str(path))
    before = path.read_text()
    assert json.loads(before)["full.correct"] == 19
    with pytest.raises(TypeError):
        emit({"full.correct": object()}, str(path))
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["figures.json"]
    with pytest.raises(EvaluationError, match="cannot write"):
        emit(FIGURES, str(path / "below"))


def test_a_run_record_says_what_ran(tmp_path):
    run_record(tmp_path / "run.json", {"model": "smollm2-135m", "out": tmp_path, "loss": math.inf}, FIGURES, seeds=[3])
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["versions"]["jaxkv"]
    assert record["versions"]["xgrammar"]
    assert record["config"] == {"model": "smollm2-135m", "out": str(tmp_path), "loss": None}
    assert record["seeds"] == [3]
    assert record["figures"]["full.correct"] == 19
    assert record["platform"]["cpus"] >= 1


def test_a_users_error_is_one_line_and_exit_code_two(capsys):
    def body():
        raise SchemaError("tools[0]:\n  no name")

    assert run_script(body) == 2
    assert capsys.readouterr().err == "error: tools[0]: no name\n"
    assert run_script(lambda: 1) == 1
    assert run_script(lambda: None) == 0
    with pytest.raises(ZeroDivisionError):  # a defect of ours keeps its traceback
        run_script(lambda: 1 // 0)
