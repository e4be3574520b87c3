"""The Berkeley Function Calling Leaderboard's single-turn Python categories, from the installed `bfcl-eval`.

The data is not part of this project: `pip install --no-deps bfcl-eval==2026.3.23` (its own dependencies pin an
old numpy). A case is a question, the functions on offer, and for every expected call the values that count as
right. `gold_text` writes the expected answer the way a constrained model would.
"""

import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from jaxkv.errors import EvaluationError
from jaxkv.prompting import json_type, tool_messages

CATEGORIES: Final = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
INSTALL: Final = "pip install --no-deps bfcl-eval==2026.3.23"


@dataclass(frozen=True)
class Case:
    """One question of BFCL.

    Attributes:
        id: BFCL's identifier, `simple_python_12`.
        category: one of `CATEGORIES`.
        tools: function documents as BFCL writes them (`{"name", "description", "parameters": {"type": "dict", ...}}`).
        question: the user's text.
        messages: chat messages (`role`, `content`) of the prompt, system first.
        gold: one `{function name: {parameter: [accepted values]}}` for each expected call.
        parallel: whether the answer is a list of calls rather than one call.
    """

    id: str
    category: str
    tools: list[dict[str, Any]]
    question: str
    messages: list[dict[str, str]]
    gold: list[dict[str, dict[str, list[Any]]]]
    parallel: bool


def load(category: str, *, limit: int | None = None, stride: int = 1) -> list[Case]:
    """Read a category: every `stride`-th case, the first `limit` of them.

    Raises:
        EvaluationError: the category is unknown, `bfcl-eval` is not installed, its data is damaged, or `limit` or
            `stride` is below 1.
    """
    check_selection([category], limit, stride)
    return _read_category(category)[::stride][:limit]


def check_selection(categories: Iterable[str], limit: int | None = None, stride: int = 1) -> None:
    """Raise EvaluationError when a category is unknown or `limit` or `stride` is below 1."""
    for category in categories:
        if category not in CATEGORIES:
            raise EvaluationError(f"BFCL category {category!r} is not supported; choose from {', '.join(CATEGORIES)}")
    if stride < 1 or (limit is not None and limit < 1):
        raise EvaluationError(f"limit {limit} and stride {stride} select nothing; both must be at least 1")


def data_folder() -> Path:
    """The folder of BFCL's data files inside the installed package.

    Raises:
        EvaluationError: `bfcl-eval` is not installed.
    """
    # find_spec does not run the package: importing it reads environment files and makes folders.
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise EvaluationError(f"BFCL's data is not installed; run: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations))) / "data"


@cache
def _read_category(category: str) -> list[Case]:
    folder = data_folder()
    entries = _read_lines(folder / f"BFCL_v4_{category}.json")
    answers = {entry["id"]: entry for entry in _read_lines(folder / "possible_answer" / f"BFCL_v4_{category}.json")}
    cases = []
    for entry in entries:
        if entry["id"] not in answers:
            raise EvaluationError(f"BFCL has no answer for {entry['id']}; reinstall it: {INSTALL}")
        cases.append(_case(category, entry, answers[entry["id"]]["ground_truth"]))
    return cases


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as stream:
            return [json.loads(line) for line in stream if line.strip()]
    except (OSError, json.JSONDecodeError) as error:
        raise EvaluationError(f"cannot read BFCL's {path.name}: {error}; reinstall it: {INSTALL}") from error


def _case(category: str, entry: dict[str, Any], gold: list[dict[str, Any]]) -> Case:
    turn = entry["question"][0]
    parallel = "parallel" in category
    return Case(
        id=entry["id"],
        category=category,
        tools=entry["function"],
        question="\n".join(message["content"] for message in turn if message["role"] == "user"),
        messages=tool_messages(entry["function"], turn, parallel=parallel),
        gold=gold,
        parallel=parallel,
    )


def json_schema(declared: Mapping[str, Any]) -> dict[str, Any]:
    """A BFCL parameter schema with JSON-Schema type names, recursively; `any` becomes a schema without a type."""
    schema = {key: value for key, value in declared.items() if key not in ("type", "properties", "items")}
    kind = json_type(declared)
    if kind is not None:
        schema["type"] = kind
    if isinstance(declared.get("properties"), Mapping):
        schema["properties"] = {name: json_schema(inner) for name, inner in declared["properties"].items()}
    if isinstance(declared.get("items"), Mapping):
        schema["items"] = json_schema(declared["items"])
    return schema


def gold_calls(case: Case) -> list[dict[str, Any]]:
    """The expected calls, `{"name", "arguments"}` each, with the first accepted value of every parameter.

    BFCL writes "" among the accepted values of what may be left out. So: "" first leaves an optional parameter out,
    and for a required one the first other value is taken ("" itself where it is the only one). An undeclared
    parameter that may be left out is, wherever its "" stands: the official checker refuses undeclared ones. A
    parameter without any accepted value is left out. Arguments follow the declared order; undeclared ones come last.
    Objects, and the elements of a list of objects, are again `{key: [accepted values]}`, one level deep, as the
    official checker reads them; deeper values are literal.
    """
    schemas = {tool["name"]: tool["parameters"] for tool in case.tools}
    return [
        {"name": name, "arguments": _first_values(accepted, schemas.get(name, {}))}
        for call in case.gold
        for name, accepted in call.items()
    ]


def gold_text(case: Case) -> str:
    """The expected answer as one JSON text: a call, or for a parallel category the list of calls."""
    calls = gold_calls(case)
    return json.dumps(calls if case.parallel else calls[0], ensure_ascii=False)


_OMITTED: Final = object()


def _first_values(accepted: Mapping[str, Any], schema: Mapping[str, Any], *, nested: bool = False) -> dict[str, Any]:
    """First accepted value of each key; `nested` for an object inside a parameter, whose values are literal."""
    declared = schema.get("properties") or {}
    values = {}
    for name in _in_declared_order(accepted, declared):
        listed = accepted[name]
        value = listed
        if isinstance(listed, list):
            refused = bool(declared) and name not in declared and "" in listed
            value = _OMITTED if refused else _first_value(listed, name in schema.get("required", ()))
        if value is not _OMITTED:
            inner = declared.get(name, {})
            values[name] = _literal(value, inner) if nested else _parameter_value(value, inner)
    return values


def _first_value(listed: list[Any], required: bool) -> Any:
    if not listed or (listed[0] == "" and not required):
        return _OMITTED
    return next((value for value in listed if value != ""), "")


def _parameter_value(value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return _first_values(value, schema, nested=True)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_first_values(item, schema.get("items") or {}, nested=True) for item in value]
    return _literal(value, schema)


def _literal(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value as it is, its objects' keys in the declared order."""
    if isinstance(value, dict):
        declared = schema.get("properties") or {}
        return {name: _literal(value[name], declared.get(name, {})) for name in _in_declared_order(value, declared)}
    if isinstance(value, list):
        return [_literal(item, schema.get("items") or {}) for item in value]
    return value


def _in_declared_order(names: Iterable[str], declared: Mapping[str, Any]) -> list[str]:
    names = list(names)
    return [name for name in declared if name in names] + [name for name in names if name not in declared]
