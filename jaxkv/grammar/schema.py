"""Tool schemas: from what users hand in to a small tree of value types.

Reads the function documents of BFCL (types ``dict``, ``float``, ``tuple``, ``any``), OpenAI tools
(``{"type": "function", "function": {...}}``) and plain JSON Schema. Every keyword that narrows the set of values is
either enforced by the tree or an error that names its JSON path, such as
``tools[0].parameters.properties.x.pattern``; nothing is dropped silently. Keywords that only describe
(``description``, ``default``, ``format``, ...) are ignored.

Readings of what schemas leave open:

* An object with declared properties has these and no others, in the order of their declaration.
* The parameters of a function without properties are exactly ``{}``; a nested object without properties is any object,
  or, if it lists ``required`` names all the same, the object of these names with any values.
* An ``enum`` or ``const`` decides alone: values that lack the declared type stay as written, except that an enum of
  non-arrays beside ``"type": "array"`` limits the array's items (both occur in BFCL).
* ``oneOf`` is read as ``anyOf``: a grammar cannot refuse a value for matching twice.
"""

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any as AnyJson

from jaxkv.errors import SchemaError
from jaxkv.grammar.numeric_range import Bounds
from jaxkv.grammar.values import (
    Any,
    Array,
    Boolean,
    Enum,
    Integer,
    Map,
    Node,
    Null,
    Number,
    Object,
    Property,
    Ref,
    String,
    Union,
)


@dataclass(frozen=True)
class Tool:
    """A function with its parameters, always an `Object` or `Map`, and the targets of its references."""

    name: str
    description: str
    parameters: Object | Map
    definitions: dict[str, Node]


_TYPES = {
    "string": "string", "str": "string",
    "integer": "integer", "int": "integer",
    "number": "number", "float": "number", "double": "number",
    "boolean": "boolean", "bool": "boolean",
    "array": "array", "list": "array", "tuple": "array",
    "object": "object", "dict": "object",
    "null": "null", "any": "any",
}  # fmt: skip

_ANNOTATIONS = frozenset(
    ("description", "title", "default", "example", "examples", "format", "optional", "deprecated", "readOnly",
     "writeOnly", "$schema", "$id", "$comment", "$defs", "definitions")
)  # fmt: skip
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ENFORCED = frozenset(
    ("type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems",
     "anyOf", "oneOf", "$ref", "nullable", *_NUMERIC)
)  # fmt: skip
_MAX_DEPTH = 64
_TOOL_KEYS = frozenset(("name", "description", "parameters", "strict", "response", "type"))


def read_tools(tools: object) -> tuple[Tool, ...]:
    """Validate and normalise `tools`.

    Args:
        tools: a non-empty list of function documents, each ``{"name", "description"?, "parameters"?}``, bare or
            wrapped as
            ``{"type": "function", "function": {...}}``.

    Raises:
        SchemaError: for anything malformed or unsupported; the message starts with the JSON path.
    """
    if not isinstance(tools, list | tuple):
        raise SchemaError(f"tools: expected a list of function documents, got {type(tools).__name__}")
    if not tools:
        raise SchemaError("tools: the list is empty; a function call needs at least one function")
    result, seen = [], {}
    for i, document in enumerate(tools):
        tool = _read_tool(document, f"tools[{i}]")
        if tool.name in seen:
            raise SchemaError(
                f"tools[{i}].name: {tool.name!r} is already the name of tools[{seen[tool.name]}]; names must be unique"
            )
        seen[tool.name] = i
        result.append(tool)
    return tuple(result)


def _read_tool(document: object, path: str) -> Tool:
    if not isinstance(document, dict):
        raise SchemaError(f"{path}: expected a function document, got {_show(document)}")
    if "function" in document:
        if document.get("type", "function") != "function":
            raise SchemaError(f'{path}.type: only "function" tools are supported, got {_show(document["type"])}')
        for key in document:
            if key not in ("type", "function"):
                raise SchemaError(f"{path}.{key}: unknown key beside 'function'")
        return _read_tool(_expect(document["function"], dict, f"{path}.function"), f"{path}.function")
    for key in document:
        if key not in _TOOL_KEYS and not key.startswith("x-"):
            raise SchemaError(
                f"{path}.{key}: unknown key of a function document; known: {', '.join(sorted(_TOOL_KEYS))}"
            )
    if document.get("type", "function") != "function":
        raise SchemaError(f'{path}.type: only "function" tools are supported, got {_show(document["type"])}')
    if "name" not in document:
        raise SchemaError(f"{path}.name: missing; a function needs a name")
    name = _expect(document["name"], str, f"{path}.name")
    if not name:
        raise SchemaError(f"{path}.name: empty; a function needs a name")
    _check_unicode(name, f"{path}.name")
    parameters = document.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    reader = _Reader(_expect(parameters, dict, f"{path}.parameters"), f"{path}.parameters")
    node = reader.read_parameters()
    return Tool(name, _given(document, "description", str, path), node, reader.definitions)


class _Reader:
    """Reads one parameter schema; `definitions` collects the targets of its references."""

    def __init__(self, root: dict, path: str):
        self.root, self.path = root, path
        self.definitions: dict[str, Node] = {}
        self._origins: dict[str, str] = {}
        self._depth = 0

    def read_parameters(self) -> Object | Map:
        schema = self.root
        if schema.get("type", "object") not in ("object", "dict"):
            raise SchemaError(f"{self.path}.type: parameters must be an object, got {_show(schema['type'])}")
        for key in ("enum", "const", "anyOf", "oneOf", "nullable", *_NUMERIC):
            if schema.get(key):
                raise SchemaError(
                    f"{self.path}.{key}: not supported on the parameters themselves; declare properties instead"
                )
        if schema.get("$ref"):
            node = self.read(schema, self.path)
            while isinstance(node, Ref):
                node = self.definitions[node.key]
            if not isinstance(node, Object | Map):
                raise SchemaError(f"{self.path}.$ref: parameters must refer to an object")
        else:
            self._check_keywords(schema, self.path)
            node = self._object(schema, self.path)
            if node == Map(Any()) and not schema.get("additionalProperties"):
                node = Object(())
        self._check_productive(node)
        return node

    def read(self, schema: object, path: str) -> Node:
        """The node of `schema`, which lies at `path`."""
        if schema is True:
            return Any()
        if not isinstance(schema, dict):
            raise SchemaError(f"{path}: expected a schema object, got {_show(schema)}")
        self._check_keywords(schema, path)
        if self._depth == _MAX_DEPTH:
            raise SchemaError(f"{path}: nested deeper than {_MAX_DEPTH} levels; use references for recursion")
        self._depth += 1
        node = self._read_one(schema, path)
        self._depth -= 1
        nullable = schema.get("nullable", False)
        if not isinstance(nullable, bool):
            raise SchemaError(f"{path}.nullable: expected true or false, got {_show(nullable)}")
        return Union((node, Null())) if nullable else node

    def _read_one(self, schema: dict, path: str) -> Node:
        for key in ("$ref", "anyOf", "oneOf"):
            if key in schema:
                others = sorted(set(schema) & _ENFORCED - {key, "nullable"})
                if others:
                    raise SchemaError(f"{path}.{others[0]}: not supported beside {key}; move it into the schemas there")
                return self._ref(schema[key], path) if key == "$ref" else self._union(schema[key], f"{path}.{key}")
        kinds = self._types(schema, path)
        if "const" in schema:
            return self._enum([schema["const"]], f"{path}.const")
        if "enum" in schema:
            values = _expect(schema["enum"], list, f"{path}.enum")
            if not values:
                raise SchemaError(f"{path}.enum: empty; no value is possible")
            node = self._enum(values, f"{path}.enum")
            if kinds == ["array"] and not any(isinstance(v, list) for v in values):
                return self._array(schema, path, node)
            return node
        nodes = [self._read_kind(kind, schema, path) for kind in kinds]
        return nodes[0] if len(nodes) == 1 else Union(tuple(nodes))

    def _check_keywords(self, schema: dict, path: str) -> None:
        for key in schema:
            if key not in _ENFORCED and key not in _ANNOTATIONS and not str(key).startswith("x-"):
                raise SchemaError(
                    f"{path}.{key}: this JSON Schema keyword cannot be enforced by the grammar; remove it or check it "
                    f"after parsing (supported: {', '.join(sorted(_ENFORCED))})"
                )

    def _types(self, schema: dict, path: str) -> list[str]:
        given = schema.get("type")
        if given is None:
            if "properties" in schema or "required" in schema or "additionalProperties" in schema:
                return ["object"]
            if "items" in schema or "minItems" in schema or "maxItems" in schema:
                return ["array"]
            for key in _NUMERIC:
                if key in schema:
                    raise SchemaError(f'{path}.{key}: needs "type": "integer" or "number" beside it')
            return ["any"]
        names = given if isinstance(given, list) else [given]
        if not names:
            raise SchemaError(f"{path}.type: empty list of types")
        kinds = []
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                raise SchemaError(f"{path}.type: unknown type {_show(name)}; known: {', '.join(_TYPES)}")
            if _TYPES[name] not in kinds:
                kinds.append(_TYPES[name])
        return kinds

    def _read_kind(self, kind: str, schema: dict, path: str) -> Node:
        match kind:
            case "any":
                return Any()
            case "null":
                return Null()
            case "boolean":
                return Boolean()
            case "string":
                return String()
            case "integer":
                return Integer(self._bounds(schema, path, integer=True))
            case "number":
                return Number(self._bounds(schema, path, integer=False))
            case "array":
                return self._array(schema, path)
            case _:
                return self._object(schema, path)

    def _bounds(self, schema: dict, path: str, *, integer: bool) -> Bounds:
        values: dict[str, Decimal | None] = dict.fromkeys(_NUMERIC)
        for key in _NUMERIC:
            if key in schema:
                value = schema[key]
                if isinstance(value, bool) or not isinstance(value, int | float) or not Decimal(str(value)).is_finite():
                    raise SchemaError(f"{path}.{key}: expected a number, got {_show(value)}")
                values[key] = Decimal(str(value))
        low, high = values["minimum"], values["maximum"]
        above, below = values["exclusiveMinimum"], values["exclusiveMaximum"]
        low_exclusive = above is not None and (low is None or above >= low)
        high_exclusive = below is not None and (high is None or below <= high)
        bounds = Bounds(
            above if low_exclusive else low, below if high_exclusive else high, low_exclusive, high_exclusive
        )
        if bounds.empty(integer):
            named = ", ".join(f"{key} {schema[key]}" for key in _NUMERIC if key in schema)
            raise SchemaError(f"{path}: no {'integer' if integer else 'number'} satisfies {named}")
        return bounds

    def _array(self, schema: dict, path: str, items: Node | None = None) -> Array:
        if items is None:
            items = self.read(schema["items"], f"{path}.items") if "items" in schema else Any()
        limits: dict[str, int | None] = {"minItems": 0, "maxItems": None}
        for key in limits:
            if key in schema:
                value = schema[key]
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise SchemaError(f"{path}.{key}: expected a non-negative integer, got {_show(value)}")
                limits[key] = value
        low, high = limits["minItems"] or 0, limits["maxItems"]
        if high is not None and low > high:
            raise SchemaError(f"{path}.minItems: {low} exceeds maxItems {high}; no array is possible")
        return Array(items, low, high)

    def _object(self, schema: dict, path: str) -> Object | Map:
        declared = _given(schema, "properties", dict, path)
        required = _given(schema, "required", list, path)
        for i, name in enumerate(required):
            _expect(name, str, f"{path}.required[{i}]")
            if declared and name not in declared:
                raise SchemaError(f"{path}.required[{i}]: {name!r} is not a declared property")
        extra = schema.get("additionalProperties")
        if not isinstance(extra, bool | dict | None):
            raise SchemaError(f"{path}.additionalProperties: expected true, false or a schema, got {_show(extra)}")
        if not declared:
            if required:
                for name in required:
                    _check_unicode(name, f"{path}.required")
                return Object(tuple(Property(name, Any(), True) for name in dict.fromkeys(required)))
            if extra is False:
                return Object(())
            return Map(self.read(extra, f"{path}.additionalProperties") if isinstance(extra, dict) else Any())
        if isinstance(extra, dict):
            raise SchemaError(
                f"{path}.additionalProperties: a schema is supported only without declared properties; use false"
            )
        properties = []
        for name, value in declared.items():
            _expect(name, str, f"{path}.properties")
            _check_unicode(name, f"{path}.properties")
            properties.append(Property(name, self.read(value, f"{path}.properties.{name}"), name in required))
        return Object(tuple(properties))

    def _union(self, given: object, path: str) -> Node:
        options = _expect(given, list, path)
        if not options:
            raise SchemaError(f"{path}: empty; no value is possible")
        nodes = tuple(dict.fromkeys(self.read(option, f"{path}[{i}]") for i, option in enumerate(options)))
        return nodes[0] if len(nodes) == 1 else Union(nodes)

    def _enum(self, values: list, path: str) -> Enum:
        texts = []
        for i, value in enumerate(values):
            try:
                text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise SchemaError(f"{path}[{i}]: {value!r} is not a JSON value") from error
            _check_unicode(text, f"{path}[{i}]")
            if text not in texts:
                texts.append(text)
        return Enum(tuple(texts))

    def _ref(self, target: object, path: str) -> Ref:
        key = _expect(target, str, f"{path}.$ref")
        if key not in self.definitions:
            self._origins[key] = f"{path}.$ref"
            self.definitions[key] = Any()  # A recursive visit finds the key and goes no deeper.
            self.definitions[key] = self.read(
                self._resolve(key, f"{path}.$ref"), f"{self.path}{key.lstrip('#').replace('/', '.')}"
            )
        return Ref(key)

    def _resolve(self, key: str, path: str) -> AnyJson:
        if key != "#" and not key.startswith("#/"):
            raise SchemaError(
                f"{path}: only references inside the parameters ('#/$defs/...') are supported, got {key!r}"
            )
        target: AnyJson = self.root
        for part in key.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or part not in target:
                raise SchemaError(f"{path}: {key!r} points nowhere in {self.path}")
            target = target[part]
        return target

    def _check_productive(self, root: Node) -> None:
        """Recursion must be able to end, or no sentence of the grammar would ever be complete."""
        finite: set[str] = set()
        while True:
            grown = {k for k, node in self.definitions.items() if k not in finite and _finite(node, finite)}
            if not grown:
                break
            finite |= grown
        for key in self.definitions:
            if key not in finite:
                raise SchemaError(
                    f"{self._origins[key]}: {key!r} requires itself without end; make a property on the way optional"
                )
        if not _finite(root, finite):
            raise SchemaError(f"{self.path}: the parameters can never be complete")


def _finite(node: Node, finite: set[str]) -> bool:
    """Whether `node` has a value of finite size, given the references that have one."""
    match node:
        case Ref(key):
            return key in finite
        case Union(options):
            return any(_finite(option, finite) for option in options)
        case Array(items, minimum, _):
            return minimum == 0 or _finite(items, finite)
        case Object(properties):
            return all(not p.required or _finite(p.value, finite) for p in properties)
    return True


def _expect(value: AnyJson, kind: type, path: str) -> AnyJson:
    if not isinstance(value, kind):
        names = {dict: "an object", list: "a list", str: "a string"}
        raise SchemaError(f"{path}: expected {names[kind]}, got {_show(value)}")
    return value


def _given(schema: dict, key: str, kind: type, path: str) -> AnyJson:
    """The value of `key`; absent and null are empty."""
    value = schema.get(key)
    return kind() if value is None else _expect(value, kind, f"{path}.{key}")


def _check_unicode(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(f"{path}: {text!r} is not valid Unicode") from error


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
