"""Bounded numerals: the grammar's language is exactly the numbers within the bounds."""

import re
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_grammar import arguments, call

from jaxkv.grammar import FunctionCalls
from jaxkv.grammar.numeric_range import Bounds, integer_range, number_range


def matches(expression: str, text: str) -> bool:
    """EBNF of digits, points and signs as a regular expression."""
    pattern = re.sub(r'"([^"]*)"', lambda m: f"(?:{re.escape(m[1])})", expression).replace(" ", "")
    return re.fullmatch(pattern, text) is not None


@st.composite
def bounds(draw, values):
    low, high = draw(st.none() | values), draw(st.none() | values)
    if low is not None and high is not None and low > high:
        low, high = high, low
    return Bounds(low, high, draw(st.booleans()) and low is not None, draw(st.booleans()) and high is not None)


def inside(value: Decimal, limit: Bounds) -> bool:
    above = limit.low is None or value > limit.low or (value == limit.low and not limit.low_exclusive)
    below = limit.high is None or value < limit.high or (value == limit.high and not limit.high_exclusive)
    return above and below


INTEGERS = st.integers(-1200, 1200).map(Decimal)
DECIMALS = st.decimals(-120, 120, places=2) | st.decimals(-2, 2, places=3) | st.integers(-30, 30).map(Decimal)


@settings(max_examples=300, deadline=None)
@given(bounds(INTEGERS), st.data())
def test_integers(limit, data):
    if limit.empty(integer=True):
        return
    expression = integer_range(limit)
    edges = [int(b) + d for b in (limit.low, limit.high) if b is not None for d in (-1, 0, 1)]
    near = st.sampled_from(edges) if edges else st.just(0)
    for value in data.draw(st.lists(st.integers(-20000, 20000) | near, min_size=8, max_size=8)) + edges:
        assert matches(expression, str(value)) == inside(Decimal(value), limit), value
    assert not matches(expression, "-0")
    assert not matches(expression, "007")
    assert not matches(expression, "")


@settings(max_examples=400, deadline=None)
@given(bounds(DECIMALS), st.data())
def test_numbers(limit, data):
    if limit.empty(integer=False):
        return
    expression = number_range(limit)
    edges = [
        b + d for b in (limit.low, limit.high) if b is not None for d in map(Decimal, ("-0.001", "0", "0.0001", "0.10"))
    ]
    for value in data.draw(st.lists(DECIMALS, min_size=8, max_size=8)) + edges:
        for text in (f"{value:f}", f"{value:.6f}", str(int(value)), f"{value:f}".removesuffix("0")):
            if text == "-0" or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text):
                continue
            assert matches(expression, text) == inside(Decimal(text), limit), text
    assert not matches(expression, "1.")
    assert not matches(expression, "00.5")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 400}, "1 9 10 399 400", "0 -1 401 1000 2.0 1e2"),
        ({"type": "integer", "exclusiveMinimum": -2}, "-1 0 12345678901234567890", "-2 -10"),
        ({"type": "integer", "minimum": 0.5}, "1 7", "0"),
        ({"type": "number", "minimum": 0, "maximum": 1}, "0 1 0.5 0.000 1.0", "1.01 -0.1 2 1.5"),
        ({"type": "float", "exclusiveMinimum": 0}, "0.001 1 99.5", "0 0.0 -1"),
        ({"type": "number", "maximum": -0.25, "exclusiveMinimum": -1}, "-0.25 -0.9999", "-0.24 -1 -1.0 0"),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": 1, "maximum": 2}, "1.5 2", "1 1.0 2.1"),
    ],
)
def test_bounds_of_a_schema(schema, good, bad, tokenizer):
    calls = FunctionCalls(call(x=schema), tokenizer)
    for text in good.split():
        assert calls.accepts(arguments(f'{{"x": {text}}}')).accepted, text
    for text in bad.split():
        assert not calls.accepts(arguments(f'{{"x": {text}}}')).accepted, text
