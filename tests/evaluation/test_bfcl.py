"""BFCL: how cases are read, how expected answers are written, and that verdicts are the official checker's."""

import importlib.util
import json
import re
import sys

import pytest

from jaxkv.errors import EvaluationError
from jaxkv.evaluation import bfcl, bfcl_checker
from jaxkv.evaluation.bfcl import Case, gold_calls, gold_text, json_schema, load
from jaxkv.evaluation.bfcl_coverage import contradictions, violations
from jaxkv.prompting import tool_messages

COUNTS = {
    "simple_python": 400,
    "multiple": 200,
    "parallel": 200,
    "parallel_multiple": 200,
    "live_simple": 258,
    "live_multiple": 1053,
    "live_parallel": 16,
    "live_parallel_multiple": 24,
}

TOOL = {
    "name": "trip.plan",
    "description": "Plan a trip.",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string", "description": "Where to."},
            "budget": {"type": "float", "description": "In euro."},
            "stops": {"type": "tuple", "items": {"type": "dict", "properties": {"x": {"type": "float"}}}},
            "extra": {"type": "any"},
            "room": {"type": "string", "enum": ["single", "double"]},
            "party": {
                "type": "dict",
                "properties": {"adults": {"type": "integer"}, "children": {"type": "integer"}},
                "required": ["adults"],
            },
        },
        "required": ["city", "party"],
    },
}


def make_case(gold, *, category="simple_python", tools=None):
    tools = [TOOL] if tools is None else tools
    messages = tool_messages(tools, [{"role": "user", "content": "?"}])
    return Case("x_0", category, tools, "?", messages, gold, "parallel" in category)


def test_the_categories_have_the_papers_counts():
    assert {category: len(load(category)) for category in bfcl.CATEGORIES} == COUNTS


def test_limit_and_stride_select_and_impossible_ones_are_errors():
    every_tenth = load("simple_python", stride=10, limit=3)
    assert [case.id for case in every_tenth] == ["simple_python_0", "simple_python_10", "simple_python_20"]
    for options in ({"limit": 0}, {"stride": 0}):
        with pytest.raises(EvaluationError, match="at least 1"):
            load("simple_python", **options)
    with pytest.raises(EvaluationError, match="'simple_java' is not supported; choose from simple_python"):
        load("simple_java")


def test_missing_data_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=re.escape("pip install --no-deps bfcl-eval==2026.3.23")):
        bfcl.data_folder()


def test_the_prompt_is_word_for_word():
    case = load("simple_python", limit=1)[0]
    system, user = case.messages
    assert system == {
        "role": "system",
        "content": "You are a function calling assistant. Given the available functions and a question, reply with "
        'only one JSON object {"name": function name, "arguments": {parameter: value}} using values taken from the '
        "question. Leave out optional parameters that the question does not mention.",
    }
    assert user == {
        "role": "user",
        "content": 'Functions:\n{"name": "calculate_triangle_area", "description": "Calculate the area of a triangle '
        'given its base and height.", "parameters": {"base": {"type": "integer", "description": "The base of the '
        'triangle."}, "height": {"type": "integer", "description": "The height of the triangle."}, "unit": {"type": '
        '"string", "description": "The unit of measure (defaults to \'units\' if not specified)"}}, "required": '
        '["base", "height"]}\n\nQuestion: Find the area of a triangle with a base of 10 units and height of 5 units.',
    }


def test_the_prompt_maps_types_and_a_questions_own_system_message_follows():
    described = json.loads(make_case([]).messages[1]["content"].splitlines()[1])["parameters"]
    assert {name: shown.get("type") for name, shown in described.items()} == {
        "city": "string",
        "budget": "number",
        "stops": "array",
        "extra": None,
        "room": "string",
        "party": "object",
    }
    assert described["room"]["enum"] == ["single", "double"]
    with_system = [case for case in load("live_simple") if not case.messages[0]["content"].endswith("not mention.")]
    assert len(with_system) == 11
    assert "does not mention.\n\n" in with_system[0].messages[0]["content"]
    assert "a JSON list of objects" in load("parallel", limit=1)[0].messages[0]["content"]


def test_types_are_mapped_at_every_depth():
    schema = json_schema(TOOL["parameters"])
    assert schema["type"] == "object"
    assert schema["properties"]["budget"]["type"] == "number"
    assert schema["properties"]["stops"] == {
        "type": "array",
        "items": {"type": "object", "properties": {"x": {"type": "number"}}},
    }
    assert "type" not in schema["properties"]["extra"]
    assert schema["properties"]["party"]["required"] == ["adults"]
    assert TOOL["parameters"]["type"] == "dict"  # the document itself is untouched


def test_a_parameter_may_be_called_type_or_items():
    schema = json_schema({"type": "dict", "properties": {"type": {"type": "float"}, "items": {"type": "any"}}})
    assert schema["properties"] == {"type": {"type": "number"}, "items": {}}


@pytest.mark.parametrize(
    ("accepted", "written"),
    [
        ({"city": ["Zürich", "Zurich"], "party": [{"adults": [2]}]}, '"city": "Zürich", "party": {"adults": 2}'),
        # declared order, whatever order the answer lists
        ({"party": [{"children": [1], "adults": [2]}], "city": ["A"]},
         '"city": "A", "party": {"adults": 2, "children": 1}'),
        # "" first: left out when optional, at both depths
        ({"city": ["A"], "room": ["", "single"], "party": [{"adults": [2], "children": ["", 1]}]},
         '"city": "A", "party": {"adults": 2}'),
        # "" later: the first value counts
        ({"city": ["A"], "room": ["single", ""], "party": [{"adults": [2]}]},
         '"city": "A", "room": "single", "party": {"adults": 2}'),
        # "" first for a required parameter: the first real value, or "" where there is no other
        ({"city": ["", "A"], "party": [{"adults": ["", 3]}]}, '"city": "A", "party": {"adults": 3}'),
        ({"city": [""], "party": [{"adults": [1]}]}, '"city": "", "party": {"adults": 1}'),
        ({"city": ["A"], "stops": [[{"x": [1.5, 2]}, {"x": ["", 3]}]], "party": [{"adults": [1]}]},
         '"city": "A", "stops": [{"x": 1.5}, {}], "party": {"adults": 1}'),
        # one level of lists of accepted values; below it everything is literal
        ({"city": ["A"], "extra": [{"at": [{"lat": [1, 2]}]}], "party": [{"adults": [1]}]},
         '"city": "A", "extra": {"at": {"lat": [1, 2]}}, "party": {"adults": 1}'),
        ({"city": ["A"], "extra": [None, "b"], "party": [{"adults": [1]}]},
         '"city": "A", "extra": null, "party": {"adults": 1}'),
        ({"city": ["A"], "extra": [], "party": [{"adults": [1]}], "undeclared": [True]},
         '"city": "A", "party": {"adults": 1}, "undeclared": true'),
        # what the checker refuses is left out where that is right, and nowhere else
        ({"city": ["A"], "party": [{"adults": [1], "pets": [2, ""]}], "kind": ["x", ""], "class": ["y"]},
         '"city": "A", "party": {"adults": 1}, "class": "y"'),
        # 0 and false are values
        ({"city": ["A"], "budget": [0], "extra": [False], "party": [{"adults": [1]}]},
         '"city": "A", "budget": 0, "extra": false, "party": {"adults": 1}'),
    ],
)  # fmt: skip
def test_the_expected_answer_is_written_as_a_model_would(accepted, written):
    case = make_case([{"trip.plan": accepted}])
    assert gold_text(case) == '{"name": "trip.plan", "arguments": {' + written + "}}"


def test_a_parallel_answer_is_a_list():
    case = make_case([{"trip.plan": {"city": ["A"]}}, {"trip.plan": {"city": ["B"]}}], category="parallel")
    assert [call["arguments"]["city"] for call in json.loads(gold_text(case))] == ["A", "B"]


def test_the_official_checker_accepts_the_expected_answers():
    """All but four, which lack a required parameter or give an undeclared one."""
    cases = [case for category in COUNTS for case in load(category)]
    wrong = [case for case in cases if not bfcl_checker.check(case, gold_calls(case)).correct]
    assert len(wrong) == 4
    assert all(contradictions(case) for case in wrong)


@pytest.mark.parametrize(
    ("calls", "error_type"),
    [
        (None, "no_calls"),
        ([], "simple_function_checker:wrong_count"),
        ([{"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 5}}], None),
        ([{"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 5, "unit": "Units"}}], None),
        ([{"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 6}}], "value_error:others"),
        ([{"name": "calculate_triangle_area", "arguments": {"base": "10", "height": 5}}], "type_error:simple"),
        ([{"name": "calculate_triangle_area", "arguments": {"base": 10}}], "simple_function_checker:missing_required"),
        ([{"name": "area", "arguments": {"base": 10, "height": 5}}], "simple_function_checker:wrong_func_name"),
        (
            [{"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 5, "x": 1}}],
            "simple_function_checker:unexpected_param",
        ),
        ([{"name": "calculate_triangle_area"}], "malformed_calls"),
        ([{"name": "calculate_triangle_area", "arguments": 3}], "malformed_calls"),
        (["text"], "malformed_calls"),
    ],
)
def test_verdicts_of_one_question(calls, error_type):
    verdict = bfcl_checker.check(load("simple_python", limit=1)[0], calls)
    assert (verdict.correct, verdict.error_type) == (error_type is None, error_type)
    assert (verdict.error is None) == verdict.correct


def test_parallel_answers_count_in_any_order_but_all_must_be_there():
    case = load("parallel", limit=1)[0]
    calls = gold_calls(case)
    assert bfcl_checker.check(case, calls[::-1]).correct
    assert not bfcl_checker.check(case, calls[:1]).correct
    assert not bfcl_checker.check(case, [calls[0], calls[0]]).correct


def test_an_answer_that_breaks_the_official_checker_is_wrong_and_no_exception():
    case = next(case for case in load("simple_python") if case.id == "simple_python_96")
    broken = gold_calls(case)
    broken[0]["arguments"]["conditions"] = ["age > 25", "job = engineer"]
    assert not bfcl_checker.check(case, broken).correct


def test_loading_the_checker_leaves_no_stub_behind():
    bfcl_checker.check(load("simple_python", limit=1)[0], None)
    assert "bfcl_eval.constants.model_config" not in sys.modules


@pytest.mark.parametrize(
    ("value", "schema", "problem"),
    [
        ("a", {"type": "string"}, None),
        (3, {"type": "string"}, "int 3 where string is declared"),
        (True, {"type": "integer"}, "bool True where integer is declared"),
        (3.0, {"type": "integer"}, None),
        (3.5, {"type": "integer"}, "float 3.5 where integer is declared"),
        (3, {"type": "number"}, None),
        (None, {"type": "number"}, "NoneType None where number is declared"),
        (None, {"type": ["number", "null"]}, None),
        ("x", {}, None),
        (1, {"enum": [True]}, "1 is not among [True]"),
        (1.0, {"enum": [1]}, None),
        (["a"], {"type": "array", "items": {"type": "integer"}}, "$[0]: str 'a' where integer is declared"),
        ({"a": 1}, {"type": "object"}, None),
        ({"a": 1}, {"type": "object", "properties": {}}, "'a' is not declared"),
        ({}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}, "'a' is required and absent"),
        ({"a": None}, {"type": "object", "properties": {"a": {"type": "string"}}}, None),
        ({"a": None}, {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, "$.a: NoneType"),
        (11, {"type": "integer", "maximum": 10}, "above the maximum of 10"),
        (1, {"type": "integer", "minimum": 2}, "below the minimum of 2"),
    ],
)
def test_the_validator_reads_a_schema_on_its_own(value, schema, problem):
    found = violations(value, schema)
    assert found == [] if problem is None else problem in found[0]


def test_an_answer_that_breaks_its_own_schema_is_found_by_what_it_says():
    good = {"city": ["A"], "party": [{"adults": [2]}]}
    assert contradictions(make_case([{"trip.plan": good}])) == ()
    for change, problem in [
        ({"city": [["A"]]}, "$.arguments.city: list ['A'] where string is declared"),
        ({"room": ["suite"]}, "$.arguments.room: 'suite' is not among ['single', 'double']"),
        ({"party": [{"adults": ["two"]}]}, "$.arguments.party.adults: str 'two' where integer is declared"),
        ({"party": [{"children": [1]}]}, "$.arguments.party: 'adults' is required and absent"),
        ({"other": [1]}, "$.arguments: 'other' is not declared"),
    ]:
        assert contradictions(make_case([{"trip.plan": good | change}])) == (problem,)
    assert contradictions(make_case([{"trip.plna": good}])) == ("$.name: 'trip.plna' is not among the functions",)
    assert contradictions(make_case([{"trip.plan": good}] * 9, category="parallel")) == ("$: 9 calls",)
