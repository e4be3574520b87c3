"""Malformed and unsupported schemas are errors that name the JSON path; annotations are ignored."""

import pytest

from jaxkv.errors import JaxkvError, SchemaError
from jaxkv.grammar import values as v
from jaxkv.grammar.schema import read_tools


def one(parameter: object, **more: object) -> list[dict]:
    return [{"name": "f", "parameters": {"type": "object", "properties": {"x": parameter}, **more}}]


def node(parameter: object) -> v.Node:
    (tool,) = read_tools(one(parameter))
    return tool.parameters.properties[0].value


X = "tools[0].parameters.properties.x"
UNSUPPORTED = [
    "pattern", "minLength", "maxLength", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains",
    "prefixItems", "additionalItems", "unevaluatedItems", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "not", "if",
    "then", "else", "allOf", "contentEncoding", "$dynamicRef", "$anchor", "minimun", "Enum", "choices",
]  # fmt: skip


@pytest.mark.parametrize("keyword", UNSUPPORTED)
@pytest.mark.parametrize("kind", ["string", "array", "dict", None])
def test_unsupported_keyword_is_named_by_path(keyword, kind):
    schema = {keyword: 1} if kind is None else {"type": kind, keyword: 1}
    with pytest.raises(SchemaError) as error:
        read_tools(one(schema))
    assert str(error.value).startswith(f"{X}.{keyword}: ")


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keyword_on_the_parameters(keyword):
    with pytest.raises(SchemaError, match=r"^tools\[0\]\.parameters\.") as error:
        read_tools(one({"type": "string"}, **{keyword: True}))
    assert keyword in str(error.value).split(":")[0]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "items": {"type": "string", "pattern": "a"}}, f"{X}.items.pattern"),
        ({"type": "object", "properties": {"y": {"type": "number", "not": {}}}}, f"{X}.properties.y.not"),
        ({"anyOf": [{"type": "string"}, {"minLength": 1}]}, f"{X}.anyOf[1].minLength"),
        ({"oneOf": [{"type": "teddy"}]}, f"{X}.oneOf[0].type"),
        ({"type": "object", "additionalProperties": {"type": "string", "format": 1, "pattern": ""}},
         f"{X}.additionalProperties.pattern"),
        ({"type": "text"}, f"{X}.type"),
        ({"type": []}, f"{X}.type"),
        ({"type": ["string", 3]}, f"{X}.type"),
        ({"type": "string", "enum": []}, f"{X}.enum"),
        ({"enum": "abc"}, f"{X}.enum"),
        ({"enum": [float("nan")]}, f"{X}.enum[0]"),
        ({"enum": [{1, 2}]}, f"{X}.enum[0]"),
        ({"anyOf": []}, f"{X}.anyOf"),
        ({"anyOf": {"type": "string"}}, f"{X}.anyOf"),
        ({"anyOf": [{"type": "string"}], "type": "string"}, f"{X}.type"),
        ({"$ref": "#/$defs/a", "enum": [1]}, f"{X}.enum"),
        ({"$ref": "#/$defs/absent"}, f"{X}.$ref"),
        ({"$ref": "http://elsewhere"}, f"{X}.$ref"),
        ({"$ref": 3}, f"{X}.$ref"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, f"{X}.minItems"),
        ({"type": "array", "minItems": -1}, f"{X}.minItems"),
        ({"type": "array", "maxItems": 1.5}, f"{X}.maxItems"),
        ({"type": "array", "items": [{"type": "string"}]}, f"{X}.items"),
        ({"type": "integer", "minimum": "1"}, f"{X}.minimum"),
        ({"type": "integer", "exclusiveMaximum": True}, f"{X}.exclusiveMaximum"),
        ({"type": "number", "maximum": float("inf")}, f"{X}.maximum"),
        ({"minimum": 1}, f"{X}.minimum"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, X),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, X),
        ({"type": "object", "properties": []}, f"{X}.properties"),
        ({"type": "object", "properties": {"y": {}}, "required": ["z"]}, f"{X}.required[0]"),
        ({"type": "object", "properties": {"y": {}}, "required": True}, f"{X}.required"),
        ({"type": "object", "properties": {"y": {}}, "required": ["y", 1]}, f"{X}.required[1]"),
        ({"type": "object", "properties": {"y": {}}, "additionalProperties": {}}, f"{X}.additionalProperties"),
        ({"type": "object", "additionalProperties": "no"}, f"{X}.additionalProperties"),
        ({"type": "string", "nullable": "yes"}, f"{X}.nullable"),
        ("string", X),
        (None, X),
        (False, X),
    ],
)  # fmt: skip
def test_malformed_parameter(schema, path):
    with pytest.raises(SchemaError) as error:
        read_tools(one(schema))
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("tools", "path"),
    [
        (None, "tools:"),
        ({"name": "f"}, "tools:"),
        ("f", "tools:"),
        ([], "tools:"),
        (["f"], "tools[0]:"),
        ([{}], "tools[0].name:"),
        ([{"name": 3}], "tools[0].name:"),
        ([{"name": ""}], "tools[0].name:"),
        ([{"name": "\ud800"}], "tools[0].name:"),
        ([{"name": "f"}, {"name": "f"}], "tools[1].name:"),
        ([{"name": "f", "parameters": []}], "tools[0].parameters:"),
        ([{"name": "f", "parameters": {"type": "string"}}], "tools[0].parameters.type:"),
        ([{"name": "f", "parameters": {"anyOf": [{}]}}], "tools[0].parameters.anyOf:"),
        ([{"name": "f", "input_schema": {}}], "tools[0].input_schema:"),
        ([{"name": "f", "description": 1}], "tools[0].description:"),
        ([{"type": "retrieval", "name": "f"}], "tools[0].type:"),
        ([{"type": "function", "function": "f"}], "tools[0].function:"),
        ([{"type": "function", "function": {}}], "tools[0].function.name:"),
        ([{"type": "code", "function": {"name": "f"}}], "tools[0].type:"),
        ([{"function": {"name": "f"}, "name": "f"}], "tools[0].name:"),
        (one({}, required=["y"]), "tools[0].parameters.required[0]:"),
        (one({}, required="x"), "tools[0].parameters.required:"),
    ],
)
def test_malformed_tools(tools, path):
    with pytest.raises(SchemaError) as error:
        read_tools(tools)
    assert str(error.value).startswith(path)
    assert isinstance(error.value, JaxkvError)


def test_endless_recursion_is_an_error_and_optional_recursion_is_not():
    def tree(required):
        child = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": required}
        return one({"$ref": "#/$defs/node"}, **{"$defs": {"node": child}})

    read_tools(tree([]))
    with pytest.raises(SchemaError, match="requires itself without end"):
        read_tools(tree(["next"]))
    with pytest.raises(SchemaError, match="requires itself without end"):
        read_tools(one({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}}))
    with pytest.raises(SchemaError, match="requires itself without end"):
        read_tools(one({"type": "array", "minItems": 1, "items": {"$ref": "#/properties/x"}}))


def test_a_schema_nested_too_deeply_is_an_error():
    def nested(levels):
        schema = {"type": "integer"}
        for _ in range(levels):
            schema = {"type": "array", "items": schema}
        return one(schema)

    read_tools(nested(63))
    for levels in (64, 5000):
        with pytest.raises(SchemaError, match="nested deeper than 64 levels"):
            read_tools(nested(levels))


def test_annotations_are_ignored():
    described = {
        "type": "string", "description": "d", "title": "t", "default": "a", "examples": ["b"], "example": "c",
        "format": "date", "optional": True, "deprecated": True, "readOnly": True, "x-order": 3, "$comment": "c",
    }  # fmt: skip
    assert node(described) == v.String()


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "float"}, v.Number()),
        ({"type": "int"}, v.Integer()),
        ({"type": "any"}, v.Any()),
        ({}, v.Any()),
        (True, v.Any()),
        ({"type": "dict"}, v.Map(v.Any())),
        ({"type": "dict", "properties": {}}, v.Map(v.Any())),
        ({"type": "object", "additionalProperties": False}, v.Object(())),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, v.Map(v.Integer())),
        ({"type": "dict", "required": ["a"]}, v.Object((v.Property("a", v.Any(), True),))),
        ({"properties": {"a": {"type": "boolean"}}}, v.Object((v.Property("a", v.Boolean(), False),))),
        ({"type": "tuple", "items": {"type": "float"}}, v.Array(v.Number())),
        ({"type": "array"}, v.Array(v.Any())),
        ({"items": {"type": "string"}, "maxItems": 2}, v.Array(v.String(), 0, 2)),
        ({"type": ["string", "null"]}, v.Union((v.String(), v.Null()))),
        ({"type": "string", "nullable": True}, v.Union((v.String(), v.Null()))),
        ({"const": 3}, v.Enum(("3",))),
        ({"enum": ["a", "a", None, 1.5, "é"]}, v.Enum(('"a"', "null", "1.5", '"é"'))),
        ({"type": "array", "enum": ["a", "b"]}, v.Array(v.Enum(('"a"', '"b"')))),
        ({"type": "boolean", "enum": ["True", "dontcare"]}, v.Enum(('"True"', '"dontcare"'))),
        ({"anyOf": [{"type": "string"}, {"type": "string", "title": "t"}]}, v.String()),
    ],
)
def test_reading(schema, expected):
    assert node(schema) == expected


def test_the_parameters_themselves():
    for parameters in (
        None,
        {},
        {"type": "object"},
        {"type": "dict", "properties": {}},
        {"properties": {}, "required": []},
    ):
        (tool,) = read_tools([{"name": "f", "parameters": parameters}])
        assert tool.parameters == v.Object(())
    (tool,) = read_tools([{"name": "f"}])
    assert tool.parameters == v.Object(())
    (tool,) = read_tools([{"name": "f", "parameters": {"type": "object", "additionalProperties": True}}])
    assert tool.parameters == v.Map(v.Any())
    (tool,) = read_tools([{"type": "function", "function": {"name": "g", "description": "d", "strict": True}}])
    assert (tool.name, tool.description) == ("g", "d")
