r"""Function calls: tool schemas -> marked EBNF, and the structural tags of PASK's function-calling vocabulary.

A sentence is ``{"name": "f", "arguments": {...}}``, or ``[{...}, {...}]`` for parallel calls, with the separators
", " and ": " and no other blanks (free blanks let small models loop). Arguments come in declared order; optional ones
may be left out or be null. Strings hold UTF-8 as it is and JSON escapes, no control characters and no lone surrogates.

Which byte belongs to which part:

======================================================  =================  =====================  ======
text                                                    class              role                   region
======================================================  =================  =====================  ======
``{ } [ ] , :`` and blanks, quotes of names, keys and   pure_scaffold      scaffold_separator     no
values, the fixed keys ``name`` and ``arguments``
function name between its quotes                        schema_bearing     dispatch_key           yes
parameter name between its quotes                       schema_bearing     required | optional    yes
enum value (strings: between the quotes), true, false,  schema_bearing     required | optional    yes
null
text of a string between its quotes, number             free_generation    required | optional    yes
======================================================  =================  =====================  ======

So a token is ``critical`` only while it stays between the quotes of one name or value, and one that carries a quote,
comma or brace is ``boundary``; with a piece of a region in it, it has the tags of both parts. A name or value in one
whole token is ``critical``: it stays inside. Brackets inside a parameter's value are scaffold too. A nested parameter
is ``required`` if all parameters around it are required, else ``optional``. Function names, the names of required
parameters and their values are the critical regions that ``lookahead_critical`` announces. Keys that the model makes
up (in free-form objects) are free generation.
"""

import json

from jaxkv.errors import RequestError, SchemaError
from jaxkv.grammar import values as v
from jaxkv.grammar.constraint import GrammarConstraint, TokenizerLike
from jaxkv.grammar.ebnf import GrammarBuilder, choice, literal
from jaxkv.grammar.frontier import Marker
from jaxkv.grammar.numeric_range import UNBOUNDED, Bounds, integer_range, number_range
from jaxkv.grammar.schema import Tool, read_tools
from jaxkv.grammar.tags import CALL_VOCABULARY

_HEX = "[0-9a-fA-F]"
# Plain characters stay in the string's own rule: a rule for each character would leave nearly every token undecided
# when masks are compiled, and masks would take 60 ms instead of 0.1 ms.
# The range leaves out the surrogates: a negated class would let their UTF-8 forms in.
_PLAIN = r"[\x20-\x21\x23-\x5b\x5d-\ud7ff\ue000-\U0010ffff]*"
_TEXT = f'{_PLAIN} ("\\\\" escape {_PLAIN})*'
_ESCAPE = (
    rf'[\"\\/bfnrt] | "u" ([0-9a-cefA-CEF] {_HEX} {_HEX} {_HEX} | [dD] [0-7] {_HEX} {_HEX} | '
    rf'[dD] [89abAB] {_HEX} {_HEX} "\\u" [dD] [c-fC-F] {_HEX} {_HEX})'
)
_INTEGER = '"-"? ("0" | [1-9] [0-9]*)'
_NUMBER = f'{_INTEGER} ("." [0-9]+)? ([eE] [+\\-]? [0-9]+)?'

_STRING_BYTES = frozenset(range(256)) - {ord('"')}
_NUMBER_BYTES = frozenset(b"0123456789+-.eE")
_ARRAY_BYTES = frozenset(b"[], ")
_OBJECT_BYTES = frozenset(b'{}", ')
_LIST_BYTES = frozenset(b"[]{}, ")
_FIXED_PARTS = {
    "call_head": ('{"name": "', '\'{"name": "\''),
    "call_arguments": ('", "arguments": ', '\'", "arguments": \''),
    "colon": ('": ', "the end of the key and ': '"),
    "quote": ('"', "the closing quote"),
}


class FunctionCalls(GrammarConstraint):
    """The constraint of function calling.

    Args:
        tools: function documents, BFCL's, OpenAI's or plain JSON Schema (`jaxkv.grammar.schema.read_tools`).
        tokenizer: the model's tokenizer.
        parallel: False for one call object, True for a list of 1 to `max_calls` calls, None to leave that to the model.
        max_calls: the most calls in a list.
        marked: False leaves the markers out; masks are the same and every tag is unresolved.

    Raises:
        SchemaError: with the JSON path of what is malformed or unsupported.
    """

    def __init__(
        self,
        tools: object,
        tokenizer: TokenizerLike,
        *,
        parallel: bool | None = False,
        max_calls: int = 8,
        marked: bool = True,
    ):
        if max_calls < 1:
            raise SchemaError(f"max_calls: {max_calls} is below 1; a list holds at least one call")
        self.tools = read_tools(tools)
        self.parallel = parallel
        self.max_calls = max_calls
        builder = _CallGrammar(self.tools, parallel, max_calls, marked=marked)
        super().__init__(builder, CALL_VOCABULARY, tokenizer)

    def parse(self, text: str) -> list[dict]:
        """The calls of a complete sentence, each ``{"name": str, "arguments": dict}``.

        Raises:
            RequestError: `text` is not a sentence of the grammar.
        """
        acceptance = self.accepts(text)
        if not acceptance.accepted:
            raise RequestError(f"not a function call at character {acceptance.position}: {acceptance.reason}")
        calls = json.loads(text)
        return calls if isinstance(calls, list) else [calls]


class _CallGrammar(GrammarBuilder):
    """The rules of `tools`: one for each (function, JSON path, part)."""

    def __init__(self, tools: tuple[Tool, ...], parallel: bool | None, max_calls: int, *, marked: bool):
        super().__init__(marked=marked)
        self.rule("root", marker=_scaffold("", "a call", _LIST_BYTES))
        self.rule("escape", _ESCAPE)
        calls = [self._function(i, tool) for i, tool in enumerate(tools)]
        self.rule("call", f'{self.part("call_head")} ({" | ".join(calls)}) "}}"')
        more = f' (", " call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
        forms = {False: "call", True: f'"[" call{more} "]"', None: f'call | "[" call{more} "]"'}
        self.define("root", forms[parallel])

    def part(self, name: str) -> str:
        """A fixed part, the same everywhere; each has its own marker, so that it is never taken for a neighbour."""
        if name not in self:
            text, expected = _FIXED_PARTS[name]
            self.rule(name, literal(text), _fixed_scaffold(text, expected))
        return name

    def _function(self, i: int, tool: Tool) -> str:
        text = _inner(tool.name)
        marker = Marker(
            "dispatch", "schema_bearing", "dispatch_key", True, True,
            tool.name, f"function name {tool.name!r}", frozenset((text.encode(),)),
        )  # fmt: skip
        name = self.rule(f"f{i}", literal(text), marker)
        values = _Values(self, f"f{i}", tool)
        arguments = values.add(f"f{i}_a", tool.name, tool.parameters, "required", top=True)
        return f"{name} {self.part('call_arguments')} {arguments}"


class _Values:
    """Adds the rules for the values of one function."""

    def __init__(self, grammar: _CallGrammar, prefix: str, tool: Tool):
        self.grammar, self.prefix, self.definitions = grammar, prefix, tool.definitions
        self._references: dict[tuple[str, str], str] = {}

    def add(self, name: str, path: str, node: v.Node, role: str, *, top: bool = False) -> str:
        """Add rule `name` for `node`; returns the rule to refer to."""
        match node:
            case v.Ref(key):
                return self._reference(name, path, key, role)
            case v.Union(options):
                rules = [self.add(f"{name}_{i}", path, option, role) for i, option in enumerate(options)]
                return self.grammar.rule(name, " | ".join(dict.fromkeys(rules)))
            case v.Object(properties):
                return self._object(name, path, properties, role)
            case v.Map(values):
                return self._map(name, path, self.add(f"{name}_m", f"{path}.*", values, role), role)
            case v.Array(_, _, 0):
                return self.grammar.rule(name, literal("[]"), _scaffold(path, "'[]'", _ARRAY_BYTES))
            case v.Array(items, minimum, maximum):
                return self._array(name, path, self.add(f"{name}_i", f"{path}[]", items, role), minimum, maximum)
            case v.Enum(texts):
                return self._enum(name, path, texts, role)
            case v.String():
                return self._string(name, path, role)
            case v.Integer(bounds):
                return self._number(name, path, bounds, role, integer=True)
            case v.Number(bounds):
                return self._number(name, path, bounds, role, integer=False)
            case v.Boolean():
                return self._literals(name, path, ("true", "false"), role)
            case v.Null():
                return self._literals(name, path, ("null",), role)
        return self._any(name, path, role)

    def _accepts_null(self, node: v.Node) -> bool:
        match node:
            case v.Any() | v.Null():
                return True
            case v.Enum(texts):
                return "null" in texts
            case v.Union(options):
                return any(self._accepts_null(option) for option in options)
        return False

    def _reference(self, name: str, path: str, key: str, role: str) -> str:
        known = self._references.get((key, role))
        if known is None:
            # Reserved before its target is visited: a recursive reference then finds it.
            known = self._references[key, role] = self.grammar.rule(f"{self.prefix}_r{len(self._references)}_{role}")
            self.grammar.define(known, self.add(name, path, self.definitions[key], role))
        return known

    def _object(self, name: str, path: str, properties: tuple[v.Property, ...], role: str) -> str:
        grammar = self.grammar
        if not properties:
            return grammar.rule(name, literal("{}"), _scaffold(path, "'{}'", _OBJECT_BYTES))
        pairs = []
        for i, prop in enumerate(properties):
            part = role if prop.required else "optional"
            inner, text = f"{path}.{prop.name}", _inner(prop.name)
            marker = Marker(
                f"{part}.key", "schema_bearing", part, True, part == "required",
                inner, f"{part} key {prop.name!r}", frozenset((text.encode(),)),
            )  # fmt: skip
            key = grammar.rule(f"{name}_k{i}", literal(text), marker)
            value = self.add(f"{name}_v{i}", inner, prop.value, part)
            if not prop.required and not self._accepts_null(prop.value):
                value = f"({value} | {self._literals(f'{name}_n{i}', inner, ('null',), part)})"
            pairs.append(f'"\\"" {key} {self.grammar.part("colon")} {value}')
        # Declared order: first_i starts the object with member i or a later one, rest_i goes on with them after a
        # comma.
        for i in reversed(range(len(properties))):
            last = i + 1 == len(properties)
            rest = "" if last else f" {name}_t{i + 1}"
            body = f'", " {pairs[i]}{rest}'
            grammar.rule(f"{name}_t{i}", body if properties[i].required else f"{body} | {rest.strip() or literal('')}")
            skip = literal("") if last else f"{name}_h{i + 1}"
            grammar.rule(f"{name}_h{i}", f"{pairs[i]}{rest}" + ("" if properties[i].required else f" | {skip}"))
        return grammar.rule(name, f'"{{" {name}_h0 "}}"', _scaffold(path, "an object's next part", _OBJECT_BYTES))

    def _map(self, name: str, path: str, value: str, role: str) -> str:
        key = self.grammar.rule(f"{name}_k", _TEXT, _text(path, role, "a key"))
        pair = f'"\\"" {key} {self.grammar.part("colon")} {value}'
        body = f'"{{" ({pair} (", " {pair})*)? "}}"'
        return self.grammar.rule(name, body, _scaffold(path, "an object's next part", _OBJECT_BYTES))

    def _array(self, name: str, path: str, item: str, minimum: int, maximum: int | None) -> str:
        body = _repeated(item, minimum, maximum)
        return self.grammar.rule(name, f'"[" {body} "]"', _scaffold(path, "an array's next part", _ARRAY_BYTES))

    def _string(self, name: str, path: str, role: str) -> str:
        text = self.grammar.rule(f"{name}_s", _TEXT, _text(path, role, "a string's text"))
        return self.grammar.rule(
            name, f'"\\"" {text} {self.grammar.part("quote")}', _fixed_scaffold('"', "a string", path)
        )

    def _enum(self, name: str, path: str, texts: tuple[str, ...], role: str) -> str:
        strings = tuple(text[1:-1] for text in texts if text.startswith('"'))
        others = tuple(text for text in texts if not text.startswith('"'))
        rules = []
        if others:
            rules.append(self._literals(f"{name}_l", path, others, role))
        if strings:
            inner = self.grammar.rule(f"{name}_e", choice(strings), _choice_marker(path, role, strings))
            opened = f'"\\"" {inner} {self.grammar.part("quote")}'
            rules.append(self.grammar.rule(f"{name}_s", opened, _fixed_scaffold('"', _one_of(strings), path)))
        return rules[0] if len(rules) == 1 else self.grammar.rule(name, " | ".join(rules))

    def _literals(self, name: str, path: str, texts: tuple[str, ...], role: str) -> str:
        return self.grammar.rule(name, choice(texts), _choice_marker(path, role, texts))

    def _number(self, name: str, path: str, bounds: Bounds, role: str, *, integer: bool) -> str:
        if bounds == UNBOUNDED:
            body = _INTEGER if integer else _NUMBER
        else:
            body = integer_range(bounds) if integer else number_range(bounds)
        expected = "an integer" if integer else "a number"
        if bounds != UNBOUNDED:
            low = "" if bounds.low is None else f" {'>' if bounds.low_exclusive else '>='} {bounds.low}"
            high = "" if bounds.high is None else f" {'<' if bounds.high_exclusive else '<='} {bounds.high}"
            expected += f"{low}{' and' if low and high else ''}{high}"
        marker = Marker(
            f"{role}.number", "free_generation", role, True, role == "required", path, expected, alphabet=_NUMBER_BYTES
        )
        return self.grammar.rule(name, body, marker)

    def _any(self, name: str, path: str, role: str) -> str:
        """Any JSON value: one set of rules for each role, shared by all functions, entered through a rule of this
        path."""
        shared = f"json_{role}"
        if shared not in self.grammar:
            self.grammar.rule(shared)
            number = self._number(f"{shared}_n", "", UNBOUNDED, role, integer=False)
            literals = self._literals(f"{shared}_l", "", ("true", "false", "null"), role)
            parts = [self._string(f"{shared}_s", "", role), number, literals]
            parts += [self._array(f"{shared}_a", "", shared, 0, None), self._map(f"{shared}_o", "", shared, role)]
            self.grammar.define(shared, " | ".join(parts))
        return shared


def _repeated(item: str, minimum: int, maximum: int | None) -> str:
    """`item` between `minimum` and `maximum` times, separated by ", "."""
    if maximum is None:
        more = f'(", " {item})*' if minimum <= 1 else f'(", " {item}){{{minimum - 1},}}'
    elif maximum == 1:
        more = ""
    else:
        more = f'(", " {item}){{{max(minimum - 1, 0)},{maximum - 1}}}'
    body = f"{item} {more}".rstrip()
    return body if minimum else f"({body})?"


def _inner(name: str) -> str:
    """The JSON text of `name` without its quotes."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _one_of(texts: tuple[str, ...]) -> str:
    shown = ", ".join(repr(text) for text in texts[:8]) + (", ..." if len(texts) > 8 else "")
    return shown if len(texts) == 1 else f"one of {shown}"


def _scaffold(path: str, expected: str, alphabet: frozenset[int]) -> Marker:
    return Marker("scaffold", "pure_scaffold", "scaffold_separator", False, False, path, expected, alphabet=alphabet)


def _fixed_scaffold(text: str, expected: str, path: str = "") -> Marker:
    texts = frozenset((text.encode(),))
    return Marker("scaffold", "pure_scaffold", "scaffold_separator", False, False, path, expected, texts)


def _text(path: str, role: str, expected: str) -> Marker:
    return Marker(
        f"{role}.string", "free_generation", role, True, role == "required", path, expected, alphabet=_STRING_BYTES
    )


def _choice_marker(path: str, role: str, texts: tuple[str, ...]) -> Marker:
    encoded = frozenset(text.encode() for text in texts)
    return Marker(f"{role}.choice", "schema_bearing", role, True, role == "required", path, _one_of(texts), encoded)
