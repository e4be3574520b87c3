"""Splits: whole schemas, exact sizes, the seed, and files."""

import json
from collections import Counter

import pytest

from calibration.splits import PARTS, Split, schema_key, split_cases
from jaxkv.errors import EvaluationError
from jaxkv.evaluation import bfcl

NON_LIVE = ("simple_python", "multiple", "parallel", "parallel_multiple")


@pytest.fixture(scope="module")
def cases():
    return [case for category in NON_LIVE for case in bfcl.load(category)]


def test_sizes_are_the_papers_and_no_schema_is_in_two_parts(cases):
    split = split_cases(cases, seed=0)
    sizes = {part: {name: len(ids) for name, ids in by.items()} for part, by in split.parts.items()}
    expected = {"simple_python": 80, "multiple": 40, "parallel": 40, "parallel_multiple": 40}
    assert sizes["calibration"] == sizes["development"] == expected
    assert sizes["test"] == {name: 3 * n for name, n in expected.items()}
    where = {}
    for case in cases:
        (part,) = [part for part in PARTS if case.id in split.ids(part)]
        assert where.setdefault(schema_key(case.tools), part) == part, case.id
    assert max(Counter(schema_key(case.tools) for case in cases).values()) > 1, "some schemas are shared"


def test_live_sizes_are_within_one_schema_of_a_fifth():
    live = [case for category in bfcl.CATEGORIES if category.startswith("live") for case in bfcl.load(category)]
    split = split_cases(live, seed=0)
    largest = max(Counter(schema_key(case.tools) for case in live).values())
    for part, share in (("calibration", 270), ("development", 270), ("test", 811)):
        assert abs(len(split.ids(part)) - share) <= largest


def test_the_seed_decides(cases):
    assert split_cases(cases, 1) == split_cases(cases, 1)
    assert split_cases(cases, 1) != split_cases(cases, 2)


def test_schemas_that_say_the_same_are_the_same():
    tool = {"name": "f", "description": "Adds  two\nnumbers", "parameters": {"a": 1, "b": [1, 2]}}
    same = {"parameters": {"b": [1, 2], "a": 1}, "name": "f", "description": "Adds two numbers "}
    other = {"name": "g"}
    assert schema_key([tool, other]) == schema_key([other, same])
    assert schema_key([tool]) != schema_key([{**tool, "parameters": {"a": 1, "b": [2, 1]}}])


def test_files(cases, tmp_path):
    split = split_cases(cases[::50], seed=3)
    path = tmp_path / "split.json"
    split.save(path)
    assert Split.read(path) == split
    with pytest.raises(EvaluationError, match="no part is named 'train'"):
        split.ids("train")
    with pytest.raises(EvaluationError, match="cannot be read"):
        Split.read(tmp_path / "missing.json")
    path.write_text("[1]")
    with pytest.raises(EvaluationError, match="is not a split"):
        Split.read(path)
    path.write_text(json.dumps({"seed": 0, "parts": {part: {"multiple": ["multiple_1"]} for part in PARTS}}))
    with pytest.raises(EvaluationError, match="multiple_1 is in two parts"):
        Split.read(path)
