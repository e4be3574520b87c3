"""Expected answers against the grammar: those that fit their schema pass, those that break it stay rejected."""

import pytest

from jaxkv.evaluation import bfcl_coverage
from jaxkv.evaluation.bfcl import Case, load
from jaxkv.evaluation.bfcl_coverage import grammar_coverage


@pytest.mark.parametrize("category", ["simple_python", "parallel", "live_simple"])
def test_expected_answers_of_a_sample_are_accepted(category):
    coverage = grammar_coverage([category], stride=25)[category]
    assert coverage.total >= 8
    assert coverage.rejected == ()
    assert coverage.share == 1


def test_a_rejected_answer_comes_with_its_place_and_whether_its_schema_agrees(monkeypatch):
    tool = {
        "name": "f",
        "description": "",
        "parameters": {"type": "dict", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    }
    seen = []
    cases = [
        Case(name, "simple_python", [tool], "?", [], [{"f": {"n": [value]}}], False)
        for name, value in (("good", 1), ("contradicts", "one"))
    ]
    monkeypatch.setattr(bfcl_coverage, "load", lambda *_, **__: cases)
    coverage = grammar_coverage(["simple_python"], on_case=seen.append)["simple_python"]
    assert seen == cases
    assert (coverage.total, coverage.accepted, coverage.share) == (2, 1, 0.5)
    (rejection,) = coverage.rejected
    assert rejection.id == "contradicts"
    assert rejection.text[rejection.position :] == '"one"}}'
    assert rejection.contradictions == ("$.arguments.n: str 'one' where integer is declared",)
    assert "contradicts its own schema" in str(rejection)
    assert rejection.reason in str(rejection)


def test_the_answers_known_to_break_their_schema_are_rejected_and_named_so(monkeypatch):
    chosen = {case.id: case for case in load("parallel_multiple")}
    cases = [chosen["parallel_multiple_21"], chosen["parallel_multiple_94"]]
    monkeypatch.setattr(bfcl_coverage, "load", lambda *_, **__: cases)
    coverage = grammar_coverage(["parallel_multiple"])["parallel_multiple"]
    assert [rejection.id for rejection in coverage.rejected] == ["parallel_multiple_21", "parallel_multiple_94"]
    assert all(rejection.contradictions for rejection in coverage.rejected)
