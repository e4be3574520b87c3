"""The language of a schema's grammar: what is a sentence, what is not and why; masks lead to sentences only."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_grammar import PIECES, ToyTokenizer, arguments, call, walk

from jaxkv.errors import RequestError, SchemaError
from jaxkv.grammar import FunctionCalls

TOKENIZER = ToyTokenizer(PIECES)
WEATHER = call(
    "get_weather",
    city={"type": "string"},
    days={"type": "integer", "optional": True},
    unit={"type": "string", "enum": ["celsius", "fahrenheit"], "optional": True},
)
S, I, N, B = ({"type": kind} for kind in ("string", "integer", "float", "boolean"))
POINT = {"type": "dict", "properties": {"lat": N, "label": S}, "required": ["lat"]}
TREE = {"type": "object", "properties": {"value": I, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
        "required": ["value"]}  # fmt: skip

# For a schema of one required parameter x: JSON texts that are values of it, and texts that are not.
VALUES = [
    (S, ['""', '"a b"', '"São 日本 😀"', r'"\"\\\/\b\f\n\r\t"', r'"\u00e9\uD83D\ude00"', '"\x7f"'],
     ["a", '"a', "'a'", '"\n"', '"\t"', r'"\x"', r'"\u00g0"', r'"\ud83d"', r'"\ude00"', "null", "1", '"a" ']),
    (I, ["0", "-7", "12345678901234567890123"], ["1.0", "01", "+1", "1e3", "-", "", '"1"', "true", "null"]),
    (N, ["0", "-1", "1.0", "-0.25", "1e+16", "2.5E-3"], ["1.", ".5", "01.5", "NaN", "Infinity", "1e", "0x1"]),
    (B, ["true", "false"], ["True", "1", '"true"', "null"]),
    ({"type": "null"}, ["null"], ["None", '""']),
    ({"enum": ["a", "ab", "", 'q"', 1, 1.5, None, True, [1, 2], {"k": "v"}]},
     ['"a"', '"ab"', '""', r'"q\""', "1", "1.5", "null", "true", "[1, 2]", '{"k": "v"}'],
     ['"abc"', '"b"', "2", "1.50", "false", "[1]", "[1,2]", "{}"]),
    ({"const": "é"}, ['"é"'], ['"e"', r'"\u00e9"']),
    ({"type": "array", "items": I}, ["[]", "[1]", "[1, 2, 3]"], ["[1,2]", "[1, ]", "[,]", '["1"]', "[1", "1", "[ 1]"]),
    ({"type": "array", "items": I, "minItems": 2, "maxItems": 3}, ["[1, 2]", "[1, 2, 3]"],
     ["[]", "[1]", "[1, 2, 3, 4]"]),
    ({"type": "array", "items": I, "minItems": 3}, ["[1, 2, 3]", "[1, 2, 3, 4, 5]"], ["[1, 2]"]),
    ({"type": "array", "items": I, "minItems": 1, "maxItems": 1}, ["[1]"], ["[]", "[1, 2]"]),
    ({"type": "array", "items": I, "maxItems": 1}, ["[1]", "[]"], ["[1, 2]"]),
    ({"type": "array", "items": I, "maxItems": 0}, ["[]"], ["[1]"]),
    ({"type": "tuple"}, ['[1, "a", [null, {"b": false}]]', "[]"], ["(1, 2)", "{}"]),
    ({"type": "any"}, ["1", '"a"', "null", "[]", "{}", '{"a": {"b": [1.5, true]}, "c": ""}'], ["", "{a: 1}", "[1 2]"]),
    ({"type": "dict"}, ["{}", '{"a": 1, "b b": [{}]}'], ["[]", "null", '{"a"}', '{1: 2}', '{"a": 1,}']),
    ({"type": "object", "additionalProperties": I}, ["{}", '{"a": 1, "é": 2}'], ['{"a": "b"}', '{"a": 1.5}']),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a": 1}', "null"]),
    ({"type": "dict", "required": ["a", "b"]}, ['{"a": 1, "b": "c"}'], ["{}", '{"a": 1}', '{"b": 1, "a": 1}']),
    (POINT, ['{"lat": 1.5}', '{"lat": 1, "label": "a"}', '{"lat": 1, "label": null}'],
     ["{}", '{"label": "a"}', '{"label": "a", "lat": 1}', '{"lat": null}', '{"lat": 1, "x": 2}',
      '{"lat": 1, "lat": 2}']),
    ({"type": "array", "items": POINT}, ['[{"lat": 1}, {"lat": 2, "label": ""}]'], ['[{"lat": 1}{"lat": 2}]']),
    ({"anyOf": [I, S, {"type": "array", "items": B}]}, ["1", '"a"', "[true]"], ["1.5", "[1]", "true", "null"]),
    ({"oneOf": [POINT, {"type": "null"}]}, ['{"lat": 1}', "null"], ["1"]),
    ({"type": ["integer", "null"]}, ["3", "null"], ['"a"', "1.5"]),
    ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
    ({"$ref": "#/$defs/tree"},
     ['{"value": 1}', '{"value": 1, "children": [{"value": 2, "children": []}, {"value": 3}]}'],
     ["{}", '{"value": 1, "children": [{}]}', '{"children": [], "value": 1}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), VALUES, ids=lambda case: json.dumps(case)[:40])
def test_values(schema, good, bad):
    tools = call(x=schema)
    tools[0]["parameters"]["$defs"] = {"tree": TREE}
    calls = FunctionCalls(tools, TOKENIZER)
    for text in good:
        acceptance = calls.accepts(arguments(f'{{"x": {text}}}'))
        assert acceptance.accepted, (text, acceptance.reason)
        assert calls.parse(arguments(f'{{"x": {text}}}')) == [{"name": "f", "arguments": {"x": json.loads(text)}}]
    for text in bad:
        acceptance = calls.accepts(arguments(f'{{"x": {text}}}'))
        assert not acceptance.accepted, text
        assert "f.x" in acceptance.reason or acceptance.reason.startswith("f:"), (text, acceptance.reason)


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        (arguments('{"city": 5}', "get_weather"), 46, "get_weather.city: expected a string (next: '\"'), found '5'"),
        (arguments("{}", "get_weather"), 38, "get_weather: expected an object's next part (next: '\"'), found '}'"),
        (arguments('{"town": "a"}', "get_weather"), 39, "required key 'city' (next: 'c'), found 't'"),
        (arguments('{"city": "é", "unit": "kelvin"}', "get_weather"), 60, "one of 'celsius', 'fahrenheit'"),
        (arguments('{"city": "a", "days": null}', "get_weather"), None, ""),
        (arguments('{"city": "a", "unit": "celsius"}', "get_weather"), None, ""),
        (arguments('{"city": "a", "unit": "celsius", "days": 1}', "get_weather"), 68, "found ','"),
        ('{"name": "get_wether"', 16, "function name 'get_weather'"),
        ('{"name": "get_weather"', 22, "the text ends here"),
        ('{"name":"get_weather"', 8, "found '\"'"),
        (arguments('{"city": "a"}', "get_weather") + " ", 51, "expected the end, found ' '"),
        ("", 0, "the text ends here"),
        ('{"name": "get_weather", "arguments": {"city": "a\ud800"', 48, "surrogate"),
    ],
)
def test_reasons_name_the_place(text, position, reason):
    acceptance = FunctionCalls(WEATHER, TOKENIZER).accepts(text)
    assert acceptance.accepted == (position is None), acceptance.reason
    assert reason in acceptance.reason
    assert acceptance.position == (len(text) if position is None else position)


@pytest.mark.parametrize(
    "name", ["a.b.c", "größe", "日本語", 'say "hi"', "two words", "back\\slash", "new\nline", "tab\t", "{x}: ,", "\x7f"]
)
def test_names_and_keys_of_every_kind(name):
    calls = FunctionCalls(call(name, **{name: S, "other": {**I, "optional": True}}), TOKENIZER)
    expected = {"name": name, "arguments": {name: "v", "other": 1}}
    text = json.dumps(expected, ensure_ascii=False)
    assert calls.parse(text) == [expected]
    matcher = calls.start()
    for token in TOKENIZER.encode(text):
        assert matcher.accept(token).tags


def test_optional_parameters_in_declared_order():
    optional = {key: {**I, "optional": key != "c"} for key in "abcd"}
    calls = FunctionCalls(call(**optional), TOKENIZER)
    for keys in ("c", "ac", "bc", "cd", "abc", "acd", "bcd", "abcd"):
        assert calls.accepts(arguments(json.dumps(dict.fromkeys(keys, 1)))).accepted, keys
    for keys in ("", "a", "abd", "ca", "ba", "dc"):
        assert not calls.accepts(arguments(json.dumps(dict.fromkeys(keys, 1)))).accepted, keys


def test_functions_without_parameters():
    for tool in ({"name": "f"}, {"name": "f", "parameters": {"type": "dict", "properties": {}}}):
        calls = FunctionCalls([tool], TOKENIZER)
        assert calls.accepts(arguments("{}")).accepted
        assert not calls.accepts(arguments('{"a": 1}')).accepted


def test_number_of_calls():
    one = arguments("{}")
    tools = [{"name": "f"}]
    languages = {(False, 8): [0], (True, 3): [1, 2, 3], (None, 2): [0, 1, 2], (True, 1): [1]}
    for (parallel, max_calls), accepted in languages.items():
        calls = FunctionCalls(tools, TOKENIZER, parallel=parallel, max_calls=max_calls)
        assert not calls.accepts("[]").accepted
        texts = [one, *(f"[{', '.join([one] * n)}]" for n in range(1, 6))]
        assert [n for n, text in enumerate(texts) if calls.accepts(text).accepted] == accepted
        for n in accepted:
            assert len(calls.parse(texts[n])) == max(n, 1)
    with pytest.raises(SchemaError, match="max_calls: 0"):
        FunctionCalls(tools, TOKENIZER, parallel=True, max_calls=0)


def test_parse_refuses_what_is_no_sentence():
    with pytest.raises(RequestError, match="at character 5"):
        FunctionCalls(WEATHER, TOKENIZER).parse('{"nam')


def test_wrapped_and_bare_tools_have_one_grammar():
    wrapped = [{"type": "function", "function": WEATHER[0]}]
    assert FunctionCalls(wrapped, TOKENIZER).ebnf == FunctionCalls(WEATHER, TOKENIZER).ebnf


# ---- Random schemas ----

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


@st.composite
def schemas(draw, depth=2):
    """A JSON schema, and a strategy of values that conform to it."""
    kinds = ["string", "integer", "float", "boolean", "enum", "bounded"] + (
        ["array", "dict", "anyOf", "any"] if depth else []
    )
    match draw(st.sampled_from(kinds)):
        case "string":
            return {"type": "string"}, TEXTS
        case "integer":
            return {"type": "integer"}, st.integers()
        case "float":
            return {"type": "float"}, st.floats(allow_nan=False, allow_infinity=False) | st.integers()
        case "boolean":
            return {"type": "boolean"}, st.booleans()
        case "enum":
            values = draw(st.lists(TEXTS | st.integers() | st.none(), min_size=1, max_size=3))
            return {"enum": values}, st.sampled_from(values)
        case "bounded":
            low = draw(st.integers(-300, 300))
            high = low + draw(st.integers(0, 200))
            return {"type": "integer", "minimum": low, "maximum": high}, st.integers(low, high)
        case "array":
            items, values = draw(schemas(depth=depth - 1))
            low = draw(st.integers(0, 2))
            high = low + draw(st.integers(0, 2))
            return {"type": "array", "items": items, "minItems": low, "maxItems": high}, st.lists(
                values, min_size=low, max_size=high
            )
        case "anyOf":
            options = draw(st.lists(schemas(depth=depth - 1), min_size=1, max_size=3))
            return {"anyOf": [schema for schema, _ in options]}, st.one_of([values for _, values in options])
        case "any":
            return {"type": "any"}, st.recursive(
                TEXTS | st.none() | st.booleans() | st.integers(),
                lambda v: st.lists(v, max_size=2) | st.dictionaries(KEYS, v, max_size=2),
                max_leaves=3,
            )
    return draw(objects(depth=depth - 1))


@st.composite
def objects(draw, depth=2):
    """A schema of an object, with a strategy of conforming values in declared order."""
    properties = draw(st.dictionaries(KEYS, schemas(depth=depth), max_size=4))
    required = [key for key in properties if draw(st.booleans())]
    schema = {
        "type": "dict",
        "properties": {key: inner for key, (inner, _) in properties.items()},
        "required": required,
    }
    if not properties:
        schema["additionalProperties"] = False

    @st.composite
    def value(draw):
        chosen = {}
        for key, (_, values) in properties.items():
            if key in required:
                chosen[key] = draw(values)
            elif draw(st.booleans()):
                chosen[key] = draw(st.none() | values)
        return chosen

    return schema, value()


def conforms(value, schema) -> bool:
    """Whether a parsed value conforms to a schema; knows nothing of grammars. Object keys must be in declared order."""
    if "anyOf" in schema:
        return any(conforms(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(v) and value == v for v in schema["enum"])
    match schema["type"]:
        case "string":
            return isinstance(value, str)
        case "integer":
            limits = schema.get("minimum", -np.inf), schema.get("maximum", np.inf)
            return type(value) is int and limits[0] <= value <= limits[1]
        case "float":
            return type(value) in (int, float)
        case "boolean":
            return isinstance(value, bool)
        case "array":
            if not isinstance(value, list):
                return False
            return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
                conforms(v, schema["items"]) for v in value
            )
        case "any":
            return True
    declared, required = schema["properties"], schema["required"]
    if (
        not isinstance(value, dict)
        or list(value) != [key for key in declared if key in value]
        or set(required) - set(value)
    ):
        return False
    return all(conforms(v, declared[key]) or (v is None and key not in required) for key, v in value.items())


@settings(max_examples=80, deadline=None)
@given(objects(), st.data())
def test_every_conforming_value_is_a_sentence(pair, data):
    schema, values = pair
    calls = FunctionCalls([{"name": "f", "parameters": schema}], TOKENIZER)
    for _ in range(2):
        value = data.draw(values)
        assert conforms(value, schema)
        acceptance = calls.accepts(arguments(json.dumps(value, ensure_ascii=False)))
        assert acceptance.accepted, acceptance.reason
        acceptance = calls.accepts(arguments(json.dumps(value, ensure_ascii=False))[:-1])
        assert not acceptance.accepted


@settings(max_examples=60, deadline=None)
@given(objects(), st.integers(0, 2**32 - 1))
def test_every_walk_under_the_mask_ends_in_a_conforming_value(pair, seed):
    schema, _ = pair
    calls = FunctionCalls([{"name": "f", "parameters": schema}], TOKENIZER, parallel=True, max_calls=2)
    ids = walk(calls.start(), np.random.default_rng(seed), 40)
    text = b"".join(TOKENIZER.token_bytes[i] for i in ids).decode()
    for parsed in calls.parse(text):
        assert parsed["name"] == "f"
        assert conforms(parsed["arguments"], schema), text
