"""How many of BFCL's expected answers the function-call grammar can write, and why it cannot write the others.

An expected answer that breaks the very schema it is asked under must be rejected. Which ones do is decided here by
a validator that knows nothing of the grammar.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jaxkv.evaluation.bfcl import Case, gold_calls, gold_text, json_schema, load

MAX_CALLS: Final = 8
"""Most calls of one answer in the parallel categories."""


@dataclass(frozen=True)
class Rejection:
    """An expected answer that the grammar does not accept.

    Attributes:
        id: the case.
        position: characters of `text` that the grammar accepts.
        reason: the grammar's reason.
        text: the answer.
        contradictions: how the answer breaks its own schema, with JSON paths; empty when it does not.
    """

    id: str
    position: int
    reason: str
    text: str
    contradictions: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "contradicts its own schema: " + "; ".join(self.contradictions) if self.contradictions else "FITS"
        return f"{self.id} at {self.position}: {self.reason} [{verdict}]"


@dataclass(frozen=True)
class Coverage:
    """Coverage of one category; `share` = accepted / total."""

    category: str
    total: int
    rejected: tuple[Rejection, ...]

    @property
    def accepted(self) -> int:
        return self.total - len(self.rejected)

    @property
    def share(self) -> float:
        return self.accepted / self.total


@dataclass(frozen=True)
class ByteTokenizer:
    """A token a byte, and a stop token: whether a grammar accepts a text does not depend on how it is cut."""

    vocab_size: int = 257
    stop_ids: tuple[int, ...] = (256,)
    token_bytes: tuple[bytes, ...] = (*(bytes([byte]) for byte in range(256)), b"")


BYTES = ByteTokenizer()


def grammar_coverage(
    categories: Iterable[str],
    *,
    limit: int | None = None,
    stride: int = 1,
    on_case: Callable[[Case], None] | None = None,
) -> dict[str, Coverage]:
    """Feed every expected answer to its question's grammar.

    Args:
        categories: BFCL categories.
        limit, stride: the selection of `load`.
        on_case: called after each case, for a progress bar.
    """
    # At run time and not at import: the data and the prompt are of use without XGrammar.
    from jaxkv.grammar.function_calling import FunctionCalls

    coverage = {}
    for category in categories:
        cases = load(category, limit=limit, stride=stride)
        rejected = []
        for case in cases:
            text = gold_text(case)
            grammar = FunctionCalls(case.tools, BYTES, parallel=case.parallel, max_calls=MAX_CALLS)
            accepted, position, reason = grammar.accepts(text)
            if not accepted:
                rejected.append(Rejection(case.id, position, reason, text, contradictions(case)))
            if on_case is not None:
                on_case(case)
        coverage[category] = Coverage(category, len(cases), tuple(rejected))
    return coverage


def contradictions(case: Case) -> tuple[str, ...]:
    """How a case's expected answer breaks the schemas of its own functions; empty when it does not.

    The reading of a schema is JSON Schema's, with what a caller of a Python function expects besides: an object that
    declares properties has no others, an optional property may be null, and an answer has as many calls as its
    category allows.
    """
    schemas = {tool["name"]: json_schema(tool["parameters"]) for tool in case.tools}
    calls = gold_calls(case)
    found = []
    if not 1 <= len(calls) <= (MAX_CALLS if case.parallel else 1):
        found.append(f"$: {len(calls)} calls")
    for index, call in enumerate(calls):
        path = f"$[{index}]" if case.parallel else "$"
        schema = schemas.get(call["name"])
        if schema is None:
            found.append(f"{path}.name: {call['name']!r} is not among the functions")
        else:
            found.extend(violations(call["arguments"], schema, f"{path}.arguments"))
    return tuple(found)


_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "string": lambda value: isinstance(value, str),
    # JSON has one number type: 2.0 is an integer.
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def violations(value: Any, schema: Mapping[str, Any], path: str = "$") -> list[str]:
    """Where a JSON value breaks a JSON schema, each as `path: what`; an object's declared properties are closed."""
    declared = schema.get("type")
    kinds = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if kinds and not any(_CHECKS[kind](value) for kind in kinds if kind in _CHECKS):
        return [f"{path}: {type(value).__name__} {value!r} where {declared} is declared"]
    found = []
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        found.append(f"{path}: {value!r} is not among {schema['enum']!r}")
    if _is_number(value):
        if "maximum" in schema and value > schema["maximum"]:
            found.append(f"{path}: {value} is above the maximum of {schema['maximum']}")
        if "minimum" in schema and value < schema["minimum"]:
            found.append(f"{path}: {value} is below the minimum of {schema['minimum']}")
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for index, item in enumerate(value):
            found.extend(violations(item, schema["items"], f"{path}[{index}]"))
    if isinstance(value, dict):
        found.extend(_object_violations(value, schema, path))
    return found


def _object_violations(value: dict[str, Any], schema: Mapping[str, Any], path: str) -> list[str]:
    properties = schema.get("properties")
    required = schema.get("required", ())
    found = [f"{path}: {name!r} is required and absent" for name in required if name not in value]
    if not isinstance(properties, Mapping):
        return found
    for name, item in value.items():
        if name not in properties:
            found.append(f"{path}: {name!r} is not declared")
        elif item is not None or name in required:
            found.extend(violations(item, properties[name], f"{path}.{name}"))
    return found


def _same(left: Any, right: Any) -> bool:
    """JSON equality: true is not 1, though Python says so."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)
